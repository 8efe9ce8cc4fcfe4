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

// Report is what became of a flow's bytes so far. All counters are cumulative
// and zero at Open, so a datapath may report every acknowledgement or every few
// milliseconds and nothing is lost in between.
type Report struct {
	At      cc.Time
	Written cc.Bytes // accepted by the transport; those taken beyond it are still on their way there
	Acked   cc.Bytes // delivered to the peer; selectively acknowledged bytes count
	// stream offset up to which a first transmission is known to have arrived, holes below it notwithstanding; 0:
	// Acked
	Newest cc.Bytes
	// gauge: of Acked, what lies beyond a hole; a loss found before the hole is filled belongs to the same event
	Sacked   cc.Bytes
	Lost     cc.Bytes // retransmitted by the transport; they stay in flight until acknowledged
	Marked   cc.Bytes // acknowledged with ECN-CE
	L4S      bool     // gauge: packets leave as ECT(1), and the peer reports each mark (RFC 9331, 9768)
	Timeouts int      // retransmission timeouts; after one, offsets in flight give no RTT (Karn)
	// newest raw sample, never a smoothed one; 0: none, and the send ledger measures, unless a leg that enforces the
	// window has had samples before
	RTT      time.Duration
	Peer     PeerClock // newest reading of the peer's clock; the zero value: none
	Unsent   cc.Bytes  // gauge: accepted by the transport, not on the wire yet
	Pipe     cc.Bytes  // gauge: on the wire, neither acknowledged, SACKed nor lost; <0: unknown
	MSS      cc.Bytes  // gauge: payload of a full segment; 0: unchanged
	RwndFull bool      // gauge: the peer's receive window, not ours, holds the flow back
}

// PeerClock is the timestamp of an acknowledgement (TSval, RFC 7323 §3.2): the peer's
// clock when it was sent.
type PeerClock struct {
	At    cc.Time // when the acknowledgement arrived; 0: there is none
	Value uint32  // in ticks whose length and origin only the peer knows; it wraps around
}

// Limit is what a flow may use from now on.
type Limit struct {
	Cwnd       cc.Bytes // its part of the group's window
	PacingRate cc.Rate  // 0: not paced; otherwise its part of the group's rate
	Now        bool     // send what this lets out at once; otherwise acknowledgements do, one packet for another
}

// Leg is the transport below a flow. Whoever changes a limit calls Apply: a report, a
// tick, a hint, a move, another member. Apply and Wake run with locks held, on any
// goroutine: they must neither block nor call back.
type Leg struct {
	// it keeps Limit.Cwnd by itself: bytes count in flight once they leave; otherwise Take keeps it
	Enforces bool
	Apply    func(Limit) // the limit is this from now on; nil: nobody to tell
	Wake     func()      // a refused Take may succeed now; nil: nobody to tell
}

// Grant is the answer to Take.
type Grant struct {
	Bytes cc.Bytes // may be written now; 0: wait for Leg.Wake, which comes when asking again may help
}

// Terms are what policy grants a flow.
type Terms struct {
	Group            string     // flows with equal Group, Algorithm and Params share one window (host, subscriber, …)
	Host             netip.Addr // where the bytes go, or come from; flows to one host have one path; invalid: not known
	Ends             *cc.Ends   // of an Alone flow; nil: not known
	Algorithm        string
	Params           cc.Params
	MaxRate          cc.Rate // what all flows of the group with this MaxRate may send together; 0: the algorithm alone
	ConnectionRate   cc.Rate // what the flow may send; 0: as much as the others leave
	Priority, Weight int     // lower Priority first; Weight, up to MaxWeight, shares within it; 0 counts as 1
	Target           cc.Rate // payload that the application needs, of a Guarantee flow; 0: not known
	MinRate          cc.Rate // what the flow has of its group's window whatever the others want; 0: two segments
	HintCap          float64 // the most the group sends, in parts of the capacity that fresh hints tell; 0: any
	Class            Class
	Receives         bool // the window is what the host that sends is let send; Manager.Receive sets it
	Restarts         bool // an idle window halves with each timeout from the first on, as Linux's own do
	Alone            bool // no other flow will ever have that Group: nothing of it is kept once the flow is closed
}

// Check tells what Open would refuse of t.
func (t Terms) Check() error {
	_, err := t.resolveWith(cc.Lookup)
	return err
}

// checkClass tells what is wrong with what t asks of the window.
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

// maxAllowedRate is the rate that a flow never exceeds; 0: any.
func (t Terms) maxAllowedRate() cc.Rate { return lesserRate(t.MaxRate, t.ConnectionRate) }

// lesserRate is the lesser of two rates, of which 0 stands for none.
func lesserRate(a, b cc.Rate) cc.Rate {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// Class is what a flow is for (Janus, TMC 2018, §4.1).
type Class uint8

// The classes: who shares a window with others is served by them.
const (
	Bulk Class = iota // takes what is left, at leisure
	// short and awaited: has its share at once, before Bulk flows have fallen back to theirs
	DelaySensitive
	Guarantee // has its Target before others share the rest, and no more than a little above it
)

var classNames = [...]string{"bulk", "delay_sensitive", "guarantee"}

// String returns the name used in configuration, metrics and JSON.
func (c Class) String() string { return classNames[c] }

// ParseClass is the inverse of String.
func ParseClass(s string) (Class, error) {
	if i := slices.Index(classNames[:], s); i >= 0 {
		return Class(i), nil
	}
	return Bulk, fmt.Errorf("%q is not one of %s", s, strings.Join(classNames[:], ", "))
}

// resolved is what Terms say about the group they lead to.
type resolved struct {
	key, name string
	spec      cc.Spec
	params    cc.Params
	receives  bool
}

func (t Terms) resolveWith(lookup func(string) (cc.Spec, error)) (resolved, error) {
	spec, err := lookup(t.Algorithm)
	if err != nil {
		return resolved{}, err
	}
	params, err := spec.Resolve(t.Params)
	if err != nil {
		return resolved{}, err
	}
	if t.Weight < 0 || t.Weight > MaxWeight {
		return resolved{}, fmt.Errorf("weight %d is not between 0 and %d", t.Weight, MaxWeight)
	}
	if err := t.checkClass(); err != nil {
		return resolved{}, err
	}
	if err := spec.CheckReceives(); t.Receives && err != nil {
		return resolved{}, err
	}
	return resolved{groupKey(t.Group, spec.Name, params, t.Receives), t.Group, spec, params, t.Receives}, nil
}

// MaxWeight bounds Terms.Weight: a window times all weights fits an int64.
const MaxWeight = 1000

// groupKey tells groups apart: flows share a window only when they would run it the
// same way.
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

// ReceiveBulk is how much of a stream has come before its window is held: what Linux
// lets a peer send first. Shorter requests are left alone.
const ReceiveBulk cc.Bytes = 64 << 10

// firstReceive is the first window of a group that receives: a sender that has just sent
// ReceiveBulk in slow start has a little more in flight.
const firstReceive = 2 * ReceiveBulk
