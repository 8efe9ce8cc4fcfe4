package flow

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Report is what became of a flow's bytes since Open. Counters are cumulative and start at zero, so a datapath may
// report every acknowledgement or every few milliseconds and loses nothing in between. Gauges are as of At.
type Report struct {
	At      cc.Time
	Written cc.Bytes // accepted by the transport; bytes taken beyond it are still on their way there
	Acked   cc.Bytes // delivered to the peer, selectively acknowledged bytes included
	// Newest is the stream offset up to which a first transmission is known to have arrived, even above holes.
	// 0: Acked.
	Newest cc.Bytes
	// Sacked (gauge) is the part of Acked above a hole. A loss found before the hole is filled is part of the same
	// loss event.
	Sacked   cc.Bytes
	Lost     cc.Bytes // retransmitted by the transport; they stay in flight until acknowledged
	Marked   cc.Bytes // acknowledged with ECN-CE
	L4S      bool     // gauge: packets leave as ECT(1), and the peer reports each mark (RFC 9331, 9768)
	Timeouts int      // retransmission timeouts; offsets in flight at one give no round trip (Karn)
	// RTT is the newest raw sample, never a smoothed one. 0: none; then the send ledger measures, unless the leg
	// enforces the window and has given samples before.
	RTT      time.Duration
	Peer     PeerClock // newest reading of the peer's clock; zero value: none
	Unsent   cc.Bytes  // gauge: accepted by the transport, not on the wire yet
	Pipe     cc.Bytes  // gauge: on the wire, neither acknowledged, SACKed nor lost; <0: unknown
	MSS      cc.Bytes  // gauge: payload of a full segment; 0: unchanged
	RwndFull bool      // gauge: the peer's receive window, not ours, holds the flow back
}

// PeerClock is the timestamp of an acknowledgement (TSval, RFC 7323 §3.2): the peer's clock when the peer sent it.
type PeerClock struct {
	At    cc.Time // when the acknowledgement arrived; 0: there is none
	Value uint32  // ticks; their length and origin are known to the peer only; wraps around
}

// Limit is what a flow may use from now on.
type Limit struct {
	Cwnd       cc.Bytes // the flow's part of the group's window
	PacingRate cc.Rate  // the flow's part of the group's rate; 0: not paced
	Now        bool     // send at once what a raise lets out; false: as acknowledgements arrive, packet by packet
}

// Leg is the transport below a flow. Apply is called by whatever changes a limit: a report, a tick, a hint, a move,
// another member. Apply and Wake run with locks held, on any goroutine: they must neither block nor call back.
type Leg struct {
	// Enforces is true for a transport that keeps Limit.Cwnd itself. Its bytes count in flight once they leave.
	// Otherwise the flow keeps the window: Take must be called before each write.
	Enforces bool
	Apply    func(Limit) // the limit is this one from now on; nil: not called
	Wake     func()      // a refused Take may succeed now; nil: not called
}

// Grant is the answer to Take.
type Grant struct {
	Bytes cc.Bytes // may be written now; 0: wait for Leg.Wake
}

// Terms are what policy grants a flow. Flows with equal Group, Algorithm, Params and Receives share one window.
type Terms struct {
	Group            string     // a host, a subscriber, …
	Host             netip.Addr // where the bytes go to, or come from; flows to one host have one path; invalid: not known
	Ends             *cc.Ends   // of an Alone flow; nil: not known
	Algorithm        string     // a name in the registry
	Params           cc.Params  // of the algorithm; nil: its defaults
	MaxRate          cc.Rate    // what all flows of Group with this MaxRate may send together; 0: no maximum
	ConnectionRate   cc.Rate    // what this flow may send; 0: as much as the others leave
	Priority, Weight int        // lower Priority first; Weight, up to MaxWeight, shares within it; 0 counts as 1
	Target           cc.Rate    // payload that the application of a Guarantee flow needs; 0: not known
	MinRate          cc.Rate    // what the flow gets of the window before all others; 0: two segments
	HintCap          float64    // most the group sends, as a part of the capacity that fresh hints state; 0: no cap
	Class            Class
	Receives         bool // the window is the one we advertise to the host that sends; set by Manager.Receive
	Shared           bool // other edges send by the same MaxRate: Manager.SetSharedRate says which part may be used here
	Restarts         bool // an idle window halves from the first timeout on, as in Linux; false: after ten seconds
	Alone            bool // no other flow will ever have this Group: nothing of it is kept once the flow is closed
}

// Check returns the error that Open would return for t; nil: none.
func (t Terms) Check() error {
	_, err := t.resolveWith(cc.Lookup)
	return err
}

// checkClass returns what is wrong with the class and the rates of t; nil: nothing.
func (t Terms) checkClass() error {
	switch {
	case int(t.Class) >= len(classNames):
		return fmt.Errorf("class %d is none of those there are", t.Class)
	case t.Target < 0 || t.MinRate < 0:
		return fmt.Errorf("target %v and minimum rate %v must not be negative; 0: none", t.Target, t.MinRate)
	case t.Class == Guarantee && t.Target > 0 && t.MinRate > t.Target:
		return fmt.Errorf("a minimum rate of %v is above the target of %v", t.MinRate, t.Target)
	case t.MaxRate < 0 || t.ConnectionRate < 0:
		return fmt.Errorf("maximum rates %v and %v must not be negative; 0: none", t.MaxRate, t.ConnectionRate)
	case t.maxAllowedRate() > 0 && t.MinRate > t.maxAllowedRate():
		return fmt.Errorf("a minimum rate of %v is above the maximum of %v", t.MinRate, t.maxAllowedRate())
	}
	return nil
}

// multiply returns the terms of n flows as those of one. The group's maximum rate stays.
func (t Terms) multiply(n int) Terms {
	t.Weight = min(max(1, t.Weight)*n, MaxWeight)
	t.ConnectionRate *= cc.Rate(n)
	t.Target *= cc.Rate(n)
	t.MinRate *= cc.Rate(n)
	if most := t.maxAllowedRate(); most > 0 {
		t.MinRate = min(t.MinRate, most)
	}
	return t
}

// maxAllowedRate returns the rate that the flow never exceeds; 0: none.
func (t Terms) maxAllowedRate() cc.Rate { return lesserRate(t.MaxRate, t.ConnectionRate) }

// lesserRate returns the lesser of two rates, where 0 means no limit.
func lesserRate(a, b cc.Rate) cc.Rate {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// Class is what a flow is for (Janus, TMC 2018, §4.1). It decides how members of one group share the window.
type Class uint8

// The classes.
const (
	Bulk           Class = iota // takes what the others leave
	DelaySensitive              // short and awaited: gets its share at once, before Bulk flows have given way
	Guarantee                   // gets its Target before others share the rest, and at most a tenth more
)

var classNames = [...]string{"bulk", "delay_sensitive", "guarantee"}

// String returns the name that is used in configuration, metrics and JSON.
func (c Class) String() string { return classNames[c] }

// ParseClass returns the class with a name. It is the inverse of String.
func ParseClass(s string) (Class, error) {
	if i := slices.Index(classNames[:], s); i >= 0 {
		return Class(i), nil
	}
	return Bulk, fmt.Errorf("%q is not one of %s", s, strings.Join(classNames[:], ", "))
}

// groupTerms is the part of Terms that identifies a group.
type groupTerms struct {
	key, name string // key: unique, from all the others; name: Terms.Group
	spec      cc.Spec
	params    cc.Params // complete, with the defaults of spec
	receives  bool
}

// resolveWith checks t and returns the group that it leads to. lookup finds algorithms by name.
func (t Terms) resolveWith(lookup func(string) (cc.Spec, error)) (groupTerms, error) {
	spec, err := lookup(t.Algorithm)
	if err != nil {
		return groupTerms{}, err
	}
	params, err := spec.Resolve(t.Params)
	if err != nil {
		return groupTerms{}, err
	}
	if t.Weight < 0 || t.Weight > MaxWeight {
		return groupTerms{}, fmt.Errorf("weight %d is not between 0 and %d", t.Weight, MaxWeight)
	}
	if err := t.checkClass(); err != nil {
		return groupTerms{}, err
	}
	if err := spec.CheckReceives(); t.Receives && err != nil {
		return groupTerms{}, err
	}
	return groupTerms{groupKey(t.Group, spec.Name, params, t.Receives), t.Group, spec, params, t.Receives}, nil
}

// MaxWeight bounds Terms.Weight, so that a window times the sum of all weights fits an int64.
const MaxWeight = 1000

// groupKey returns a key that is equal only for flows that would run a window in the same way.
func groupKey(name, algorithm string, p cc.Params, receives bool) string {
	var b strings.Builder
	if receives {
		b.WriteByte(0)
	}
	b.WriteString(name)
	b.WriteByte(0)
	b.WriteString(algorithm)
	for _, name := range slices.Sorted(maps.Keys(p)) {
		b.WriteByte(0)
		b.WriteString(strconv.FormatFloat(p[name], 'g', -1, 64))
	}
	return b.String()
}

// ReceiveBulk is how many bytes of a stream come before its window is held: what Linux lets a peer send at first.
// Shorter requests are left alone.
const ReceiveBulk cc.Bytes = 64 << 10

// firstReceive is the first window of a group that receives. A sender that has just sent ReceiveBulk in slow start has
// up to twice as much in flight.
const firstReceive = 2 * ReceiveBulk

// PacketWindow lets packets go as a congestion window has room. FairQueue asks it.
type PacketWindow interface {
	// Take asks whether a packet of n bytes may leave now, and accounts for it if it may. One of a sparse flow may be
	// lent room. After a refusal the window's owner is called when asking again may help.
	Take(now cc.Time, n cc.Bytes, sparse bool) bool
	// UsualRate returns the rate of what may leave, smoothed over some seconds; 0: not known.
	UsualRate() cc.Rate
	// QueueTarget returns for how long a flow's packets may wait for room. A sender that halves its own window still
	// fills the path when a round trip's worth of its packets waits.
	QueueTarget() time.Duration
}
