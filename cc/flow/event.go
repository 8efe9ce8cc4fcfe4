package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Kind is what an Event tells of.
type Kind string

// The kinds of events an algorithm sees.
const (
	KindAck  Kind = "ack"
	KindLoss Kind = "loss"
	KindTick Kind = "tick"
)

// Event is one thing an algorithm was told, and what it answered.
type Event struct {
	Kind      Kind
	Flow      uint64 // 0: the whole group
	Group     string
	Algorithm string
	State     cc.State
	RTT       time.Duration // the acknowledgement's sample; 0: none
	Bytes     cc.Bytes      // newly acknowledged or lost
	Control   cc.Control
	Internals cc.Internals // in the order of the algorithm's Spec; all 0 for one that shows none
}

// event describes what g's algorithm has just been told.
func (g *group) event(m *member, kind Kind, s cc.State, rtt time.Duration, n cc.Bytes) Event {
	if g.emit == nil {
		return Event{}
	}
	e := Event{Kind: kind, Algorithm: g.spec.Name, State: s, RTT: rtt, Bytes: n, Control: g.ctl, Internals: g.inspect()}
	e.State.Hint = nil // which is the group's to change
	if m != nil {
		e.Flow, e.Group = m.id, m.terms.Group
	}
	return e
}

// inspect is what g's algorithm shows.
func (g *group) inspect() cc.Internals {
	if a, ok := g.alg.(cc.Inspector); ok {
		return a.Inspect()
	}
	return cc.Internals{}
}
