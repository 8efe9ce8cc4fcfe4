package proxy

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/hold"
	"github.com/penstock-net/penstock/proxy/ingress"
)

func TestHeldUDPIsDecidedByRules(t *testing.T) {
	cfg, err := config.Parse([]byte(`
listeners: [{name: lan, mode: tproxy, address: ":1", udp: {queue: 1, up_queue: 2}}]
rules:
  - {name: tcp, match: {protocol: tcp}, refuse: true}
  - {name: calls, match: {protocol: udp, ports: [5000]}, weight: 3, priority: 1, class: delay_sensitive}
  - {name: games, match: {protocol: udp, ports: [6000]}, class: guarantee, target: 2mbit, min_rate: 1mbit}
  - {name: video, match: {server_name: ["*.video.test"]}, algorithm: copa, group: source, max_rate: 8mbit}
  - {name: ads, match: {server_name: [ads.test]}, refuse: true, undecided: refuse}
  - {name: slow, match: {destination: [198.51.100.0/24]}, algorithm: none, down: {max_rate: 1mbit}}
  - {name: free, match: {source: [192.0.2.8]}, algorithm: none}
  - {name: tcp-keys, match: {protocol: udp, ports: [7000]}, send_proxy: v2, dscp: keep, connection_rate: 3mbit}
`))
	require.NoError(t, err)
	compiled, err := cfg.Policy()
	require.NoError(t, err)
	s := &settings{policy: compiled}
	l := &listenerState{cfg: cfg.Listeners[0]}
	const client, other, server, slow = "192.0.2.7:1000", "192.0.2.8:1000", "203.0.113.9", "198.51.100.1"
	managed := func(t flow.Terms) hold.Decision { return hold.Decision{Manage: true, Acknowledged: true, Terms: t} }
	ofClient := func(t flow.Terms) flow.Terms {
		t.Group, t.Host, t.Algorithm = "down|lan|192.0.2.7", netip.MustParseAddr("192.0.2.7"), "penstock"
		return t
	}
	toServer := func(t flow.Terms) flow.Terms {
		t.Group, t.Host, t.Algorithm = "up|lan|to 203.0.113.9", netip.MustParseAddr(server), "penstock"
		return t
	}
	for what, c := range map[string]struct {
		client, server, name string
		down, up             hold.Decision
	}{
		"no rule": {client, server + ":9", "x.test", managed(ofClient(flow.Terms{})), managed(toServer(flow.Terms{}))},
		"weight, priority and class": {
			client, server + ":5000", "",
			managed(ofClient(flow.Terms{Weight: 3, Priority: 1, Class: flow.DelaySensitive})),
			managed(toServer(flow.Terms{Weight: 3, Priority: 1, Class: flow.DelaySensitive})),
		},
		"a guarantee": {
			client, server + ":6000", "",
			managed(ofClient(flow.Terms{Class: flow.Guarantee, Target: 2e6, MinRate: 1e6})),
			managed(toServer(flow.Terms{Class: flow.Guarantee, Target: 2e6, MinRate: 1e6})),
		},
		"algorithm, group and maximum rate, by name": {
			client, server + ":443", "a.video.test",
			managed(flow.Terms{
				Group: "down|lan|192.0.2.7", Host: netip.MustParseAddr("192.0.2.7"), Algorithm: "copa", MaxRate: 8e6,
			}),
			managed(flow.Terms{
				Group: "up|lan|192.0.2.7", Host: netip.MustParseAddr(server), Algorithm: "copa", MaxRate: 8e6,
			}),
		},
		"refused by name":      {client, server + ":443", "ads.test", hold.Decision{Refuse: true}, hold.Decision{Refuse: true}},
		"refused without name": {client, server + ":443", "", hold.Decision{Refuse: true}, hold.Decision{Refuse: true}},
		"a maximum rate alone": {client, slow + ":443", "x.test", hold.Decision{Manage: true, Terms: flow.Terms{
			Group: "down|lan|192.0.2.7", Host: netip.MustParseAddr("192.0.2.7"), Algorithm: "none", MaxRate: 1e6,
		}}, hold.Decision{}},
		"not managed": {other, server + ":443", "x.test", hold.Decision{}, hold.Decision{}},
		"keys that TCP alone has a use for": {
			client, server + ":7000", "x.test",
			managed(ofClient(flow.Terms{ConnectionRate: 3e6})), managed(toServer(flow.Terms{ConnectionRate: 3e6})),
		},
	} {
		t.Run(what, func(t *testing.T) {
			down := hold.FlowKey{
				Source: netip.MustParseAddrPort(c.server), Target: netip.MustParseAddrPort(c.client), Protocol: 17,
			}
			up := hold.FlowKey{Source: down.Target, Target: down.Source, Protocol: 17}
			decide := func(f hold.FlowKey, uplink bool) hold.Decision {
				d := s.decideHeld(heldFacts(l, f, c.name, uplink), uplink)
				assert.Empty(t, d.Terms.Params)
				d.Terms.Params = nil
				return d
			}
			assert.Equal(t, c.down, decide(down, false), "down")
			assert.Equal(t, c.up, decide(up, true), "up")
		})
	}
}

// socketOnly is a socket that accepts nothing.
type socketOnly struct{ *net.TCPListener }

func (socketOnly) SetTransparent() error { return nil }

func (socketOnly) Duplicate() (int, error) { return 0, errors.ErrUnsupported }

func (socketOnly) Serve(func(datapath.Conn), func(error) time.Duration) error { return net.ErrClosed }

// TestHeldUDPShowsWhileItsListenerIsClosed reads what telemetry reads, beside a stop.
func TestHeldUDPShowsWhileItsListenerIsClosed(t *testing.T) {
	runtime.LockOSThread() // for good: the thread ends with the test's goroutine
	if _, err := netns.New(); errors.Is(err, os.ErrPermission) {
		need.Namespaces(t, err)
	} else {
		require.NoError(t, err)
	}
	socket, err := ingress.Listen(t.Context(), ingress.Config{Mode: access.SOCKS5, Addr: ":0"},
		func(ln *net.TCPListener) (ingress.Acceptor, error) { return socketOnly{ln}, nil })
	require.NoError(t, err)
	in := &socketListener{Socket: socket}
	in.held, err = openHeldUDPs(access.UDPSettings{Queue: 9})
	require.NoError(t, err)
	var turn atomic.Pointer[passCounter]
	in.held[0].serveQueue(hold.Config{
		Flows: &flow.Manager{}, Clock: func() cc.Time { return 1 },
		KeepServed: func(time.Duration) (bool, error) { return true, nil },
	}, &turn)
	l := &listenerState{openListener: &openListener{Listener: in}}
	closed := make(chan error)
	go func() { closed <- in.Close() }()
	for isClosed := false; !isClosed; {
		select {
		case err := <-closed:
			require.NoError(t, err)
			isClosed = true
		default:
		}
		require.Len(t, servedUDP(l), 1)
	}
	require.Error(t, in.Close(), "its socket is closed, and nothing else")
}
