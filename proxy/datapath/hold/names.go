package hold

import (
	"maps"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath/hold/initial"
)

// Bounds of a nameTable. Beyond them any other entry is forgotten.
const (
	maxNames      = 16_384
	maxHandshakes = 256
	handshakeTime = 5 * time.Second // a ClientHello that is not whole by then is given up
	nameIdleTime  = 5 * time.Minute // a name is forgotten so long after its flow's last packet
)

// nameTable knows the server names of QUIC flows by what their clients send. Its keys are flows from the client to the
// server.
type nameTable struct {
	known      map[FlowKey]*knownName
	handshakes map[FlowKey]*pendingHandshake
}

// knownName is the server name of a flow. A nil *knownName is none.
type knownName struct {
	name string
	used cc.Time
}

// pendingHandshake is a ClientHello that is not whole yet.
type pendingHandshake struct {
	initial.Handshake
	begun cc.Time
}

// addDatagram reads a datagram of a client, and returns the ClientHello once it is whole; nil: it is not.
func (t *nameTable) addDatagram(now cc.Time, key FlowKey, datagram []byte) []byte {
	handshake := t.handshakes[key]
	if handshake == nil {
		makeRoom(t.handshakes, maxHandshakes)
		handshake = &pendingHandshake{begun: now}
		t.handshakes[key] = handshake
	}
	hello := handshake.Add(datagram)
	if hello != nil {
		delete(t.handshakes, key)
	}
	return hello
}

// setName remembers the name of a flow. A further connection between the same ports may replace it.
func (t *nameTable) setName(now cc.Time, key FlowKey, name string) {
	switch known := t.known[key]; {
	case known != nil && known.name == name:
		known.used = now
	case name == "":
		delete(t.known, key)
	default:
		makeRoom(t.known, maxNames)
		t.known[key] = &knownName{name, now}
	}
}

// nameOf returns what is known of a flow.
func (t *nameTable) nameOf(now cc.Time, key FlowKey) *knownName {
	known := t.known[key]
	known.markUsed(now)
	return known
}

// forgetIdle forgets names of flows without packets, and what is left of handshakes.
func (t *nameTable) forgetIdle(now cc.Time) {
	maps.DeleteFunc(t.known, func(_ FlowKey, n *knownName) bool { return now.Sub(n.used) >= nameIdleTime })
	maps.DeleteFunc(t.handshakes, func(_ FlowKey, h *pendingHandshake) bool {
		return now.Sub(h.begun) >= handshakeTime
	})
}

// markUsed keeps the name for nameIdleTime from a packet of its flow on.
func (n *knownName) markUsed(used cc.Time) {
	if n != nil {
		n.used = max(n.used, used)
	}
}

// text returns the name; empty: none is known.
func (n *knownName) text() string {
	if n == nil {
		return ""
	}
	return n.name
}

// makeRoom removes an entry of a map that has as many as it may.
func makeRoom[V any](entries map[FlowKey]V, most int) {
	if len(entries) < most {
		return
	}
	for key := range entries {
		delete(entries, key)
		return
	}
}
