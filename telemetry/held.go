package telemetry

import (
	"cmp"
	"net/http"
	"net/netip"
	"slices"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy"
)

// HeldClient is the held UDP of one client, as /held lists it. A client has one for each group and set of terms.
type HeldClient struct {
	Listener       string     `json:"listener"`
	Direction      string     `json:"direction"` // down: Address is a client; up: a server that clients send to
	Address        netip.Addr `json:"address"`
	Group          string     `json:"group"`
	WaitingPackets int        `json:"waiting_packets"`
	WaitingBytes   cc.Bytes   `json:"waiting_bytes"`
	BusyFlows      int        `json:"busy_flows"`
	// AcknowledgedBy is echo or neighbour (ARP, neighbour solicitations) where the client answers, share where the
	// acknowledgements of its TCP serve, none where nothing acknowledges and the packets pass.
	AcknowledgedBy string `json:"acknowledged_by"`
	// EchoTrouble is why its answers to echo requests do not serve: no answers, rare answers, or beside the path.
	// Absent: no reason is known.
	EchoTrouble string   `json:"echo_trouble,omitempty"`
	Control     *Control `json:"control,omitempty"`
}

// serveHeld answers with the clients that UDP is held for, by listener and address.
func (p Pages) serveHeld(w http.ResponseWriter, r *http.Request) {
	clients := describeHeld(p.Source.Held())
	p.serveList(w, r, len(clients), eachOf(clients, func(c *HeldClient) any { return c }))
}

// describeHeld returns the proxy's held UDP as /held lists it, in order.
func describeHeld(all []proxy.HeldInfo) []HeldClient {
	var out []HeldClient
	for _, l := range all {
		for _, c := range l.Clients {
			client := HeldClient{
				Listener: l.Listener, Direction: l.Direction, Address: c.Address, Group: c.Group,
				WaitingPackets: c.Waiting, WaitingBytes: c.WaitingBytes, BusyFlows: c.BusyFlows,
				AcknowledgedBy: c.AcknowledgedBy, EchoTrouble: c.EchoTrouble,
			}
			if c.Flow != nil {
				client.Control = describeControl(c.Flow)
			}
			out = append(out, client)
		}
	}
	slices.SortFunc(out, func(a, b HeldClient) int {
		return cmp.Or(cmp.Compare(a.Listener, b.Listener), cmp.Compare(a.Direction, b.Direction),
			a.Address.Compare(b.Address), cmp.Compare(a.Group, b.Group))
	})
	return out
}

// Families of held UDP.
var (
	heldPackets = newCounter("held_packets_total",
		"UDP packets by what became of them: accepted (let go as their window says), late and overflow "+
			"(dropped in their queue), refused (dropped by a rule), unmanaged (let go, as rules say), passed (let go: "+
			"unreadable, or above a bound). Counted twice are held (had to wait) and marked (accepted, with CE).",
		"listener", "direction", "outcome")
	heldBytes = newCounter("held_bytes_total", "Bytes of the UDP packets that windows let go.",
		"listener", "direction")
	passedBytes = newCounter("passed_bytes_total",
		"Bytes forwarded to clients under no window while the proxy sent to them: connections that are not captured, "+
			"and other protocols.", "listener")
	heldEchoes  = newCounter("held_echoes_total", "Echo requests about UDP that is held.", "listener", "direction")
	heldAnswers = newCounter("held_echo_answers_total", "Echo replies about UDP that is held.", "listener", "direction")
	heldWaiting = newGauge("held_waiting_packets",
		"UDP packets that wait for room in their client's window.", "listener", "direction")
	heldWaitingBytes = newGauge("held_waiting_bytes",
		"Bytes of the UDP packets that wait for room in their client's window.", "listener", "direction")
	heldClients = newGauge("held_clients", "Clients that UDP is held for; servers in direction up.",
		"listener", "direction")
	heldFlows = newGauge("held_flows", "UDP flows that rules have decided about.", "listener", "direction")
)

// writeHeld writes what is counted of a listener's held UDP.
func (s sink) writeHeld(h *proxy.HeldInfo) {
	for outcome, n := range map[string]uint64{
		"accepted": h.AcceptedPackets, "held": h.HeldPackets, "late": h.LateDrops, "overflow": h.OverflowDrops,
		"marked": h.MarkedPackets, "refused": h.RefusedPackets, "passed": h.PassedPackets, "unmanaged": h.UnmanagedPackets,
	} {
		s.putSample(heldPackets, float64(n), h.Listener, h.Direction, outcome)
	}
	s.putSample(heldBytes, float64(h.AcceptedBytes), h.Listener, h.Direction)
	if h.Direction == "down" {
		s.putSample(passedBytes, float64(h.PassedBytes), h.Listener)
	}
	s.putSample(heldEchoes, float64(h.Echoes), h.Listener, h.Direction)
	s.putSample(heldAnswers, float64(h.EchoAnswers), h.Listener, h.Direction)
	s.putSample(heldWaiting, float64(h.Waiting), h.Listener, h.Direction)
	s.putSample(heldWaitingBytes, float64(h.WaitingBytes), h.Listener, h.Direction)
	s.putSample(heldClients, float64(h.Stats.Clients), h.Listener, h.Direction)
	s.putSample(heldFlows, float64(h.Flows), h.Listener, h.Direction)
}
