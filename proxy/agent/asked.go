package agent

import (
	"iter"
	"slices"
	"sync"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// tookBounds are the upper bounds of the buckets of Info.Took, in seconds.
var tookBounds = []float64{
	20e-6, 30e-6, 50e-6, 75e-6, 100e-6, 150e-6, 200e-6, 300e-6, 500e-6, 750e-6,
	1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 1,
}

// asked remembers the reports that the agent may still answer with a decision.
type asked struct {
	mu    sync.Mutex          // not Link.mu, so that receiving does not wait for sending
	since map[uint32]cc.Time  // by flow: when the oldest question was sent
	order []pending           // the same in the order sent, and some that are over
	took  *datapath.Durations // from report to decision in force
}

// pending is the oldest report of its flow without a decision, when it was sent.
type pending struct {
	flow uint32
	at   cc.Time
}

// closesFlow reports whether a message closes its flow, as a report of no program without fields does.
func closesFlow(b []byte) bool {
	m, _, err := ccp.Next(b)
	if err != nil || m.Kind != ccp.KindMeasure || len(b) > ccp.HeaderLen+8 {
		return false
	}
	r, err := m.Measure()
	return err == nil && r.Program == 0
}

// newAsked returns an asked without questions.
func newAsked() *asked {
	return &asked{since: map[uint32]cc.Time{}, took: datapath.NewDurations(tookBounds)}
}

// noteSent notes a message to the agent, if it is a report.
func (a *asked) noteSent(now cc.Time, b []byte) {
	m, _, err := ccp.Next(b)
	if err != nil || m.Kind != ccp.KindMeasure {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if closesFlow(b) {
		delete(a.since, m.Flow)
	} else if _, waits := a.since[m.Flow]; !waits {
		a.since[m.Flow] = now
		if len(a.order) > 2*len(a.since)+len(tookBounds) { // an agent that decides nothing, and flows come and go
			a.order = slices.DeleteFunc(a.order, a.isAnswered)
		}
		a.order = append(a.order, pending{m.Flow, now})
	}
}

// isAnswered reports whether p was answered or forgotten: its flow waits since another time, or no longer.
func (a *asked) isAnswered(p pending) bool {
	at, waits := a.since[p.flow]
	return !waits || at != p.at
}

// forgetAll forgets all reports, when the agent is gone.
func (a *asked) forgetAll() {
	a.mu.Lock()
	defer a.mu.Unlock()
	clear(a.since)
	a.order = nil
}

// noteDecision notes that a datagram of the agent is in force. Agents read reports in order: one that
// answers a report does not answer those before it any more.
func (a *asked) noteDecision(now cc.Time, b []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for m := range messagesIn(b) {
		since, waits := a.since[m.Flow]
		if waits && (m.Kind == ccp.KindChange || m.Kind == ccp.KindUpdate) {
			a.took.Observe(now.Sub(since))
			delete(a.since, m.Flow)
			n := 0
			for ; n < len(a.order) && a.order[n].at < since; n++ {
				if !a.isAnswered(a.order[n]) {
					delete(a.since, a.order[n].flow)
				}
			}
			a.order = a.order[n:]
		}
	}
}

// messagesIn returns the messages of a datagram, up to the first that is malformed.
func messagesIn(b []byte) iter.Seq[ccp.Message] {
	return func(yield func(ccp.Message) bool) {
		for len(b) > 0 {
			m, rest, err := ccp.Next(b)
			if err != nil || !yield(m) {
				return
			}
			b = rest
		}
	}
}

// handleDatagram hands a datagram of the agent to the flows: what it decides is in force when hear returns.
func (l *Link) handleDatagram(datagram []byte) error {
	l.dropAnsweredCreates(datagram)
	err := l.agent.Receive(l.cfg.Clock(), datagram)
	l.asked.noteDecision(l.cfg.Clock(), datagram)
	return err
}

// dropAnsweredCreates drops waiting Creates of flows that the agent answers for: it knows them, and would begin anew.
func (l *Link) dropAnsweredCreates(datagram []byte) {
	for m := range messagesIn(datagram) {
		if m.Kind == ccp.KindChange {
			l.mu.Lock()
			l.waiting.dropCreate(m.Flow)
			delete(l.sent.begun, m.Flow)
			l.mu.Unlock()
		}
	}
}
