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

// openReports are the reports that the agent may still answer with a decision.
type openReports struct {
	mu    sync.Mutex          // not Link.mu, so that receiving does not wait for sending
	since map[uint32]cc.Time  // by flow: when the oldest open report was sent
	order []pending           // the same in the order sent, and some that are no longer open
	took  *datapath.Durations // from report to decision in force
}

// pending is the oldest open report of its flow.
type pending struct {
	flow uint32
	at   cc.Time
}

// closesFlow reports whether a message closes its flow: it is a report of program 0 without fields.
func closesFlow(b []byte) bool {
	m, _, err := ccp.Next(b)
	if err != nil || m.Kind != ccp.KindMeasure || len(b) > ccp.HeaderLen+8 {
		return false
	}
	r, err := m.Measure()
	return err == nil && r.Program == 0
}

// newOpenReports returns an empty openReports.
func newOpenReports() *openReports {
	return &openReports{since: map[uint32]cc.Time{}, took: datapath.NewDurations(tookBounds)}
}

// noteSent notes a message to the agent, if it is a report.
func (a *openReports) noteSent(now cc.Time, b []byte) {
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
		// An agent that decides nothing would let order grow, while flows come and go.
		if len(a.order) > 2*len(a.since)+len(tookBounds) {
			a.order = slices.DeleteFunc(a.order, a.isAnswered)
		}
		a.order = append(a.order, pending{m.Flow, now})
	}
}

// isAnswered reports whether p is no longer the oldest open report of its flow.
func (a *openReports) isAnswered(p pending) bool {
	at, waits := a.since[p.flow]
	return !waits || at != p.at
}

// forgetAll forgets all reports, when the agent is gone.
func (a *openReports) forgetAll() {
	a.mu.Lock()
	defer a.mu.Unlock()
	clear(a.since)
	a.order = nil
}

// noteDecision notes that the decisions in a datagram of the agent are in force. Agents read reports in order: after
// an answer to one report they do not answer earlier ones.
func (a *openReports) noteDecision(now cc.Time, b []byte) {
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

// handleDatagram passes a datagram of the agent to the flows. Its decisions are in force when handleDatagram returns.
func (l *Link) handleDatagram(datagram []byte) error {
	l.dropAnsweredCreates(datagram)
	err := l.agent.Receive(l.cfg.Clock(), datagram)
	l.openReports.noteDecision(l.cfg.Clock(), datagram)
	return err
}

// dropAnsweredCreates drops waiting Creates of flows that the agent decides for. It knows these flows, and would start
// them anew at another Create.
func (l *Link) dropAnsweredCreates(datagram []byte) {
	for m := range messagesIn(datagram) {
		if m.Kind == ccp.KindChange {
			l.mu.Lock()
			l.waiting.dropCreate(m.Flow)
			delete(l.sent.announced, m.Flow)
			l.mu.Unlock()
		}
	}
}
