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
	Flow      uint64 // 0: the whole macroflow
	Group     string
	Algorithm string
	State     cc.State
	RTT       time.Duration // the acknowledgement's sample; 0: none
	Bytes     cc.Bytes      // newly acknowledged or lost
	Control   cc.Control
	Internals cc.Internals // in the order of the algorithm's Spec; all 0 for one that shows none
}

// event describes what m's algorithm has just been told.
func (m *macroflow) event(f *Flow, kind Kind, s cc.State, rtt time.Duration, n cc.Bytes) Event {
	if m.mgr.Trace == nil {
		return Event{}
	}
	e := Event{Kind: kind, Algorithm: m.spec.Name, State: s, RTT: rtt, Bytes: n, Control: m.ctl, Internals: m.inspect()}
	e.State.Hint = nil // which is the macroflow's to change
	if f != nil {
		e.Flow, e.Group = f.id, f.terms.Group
	}
	return e
}

// inspect is what m's algorithm shows.
func (m *macroflow) inspect() cc.Internals {
	if a, ok := m.alg.(cc.Inspector); ok {
		return a.Inspect()
	}
	return cc.Internals{}
}

func (m *Manager) trace(events []Event) {
	if m.Trace == nil {
		return
	}
	for _, e := range events {
		m.Trace(e)
	}
}
