package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

const mss = cc.DefaultMSS

// testbed drives one or more flows the way datapaths would, in virtual time: what is
// taken is written and on the wire at once, in order, and the manager's clock runs.
type testbed struct {
	t     *testing.T
	mgr   *Manager
	now   cc.Time
	due   cc.Time     // when the manager wants its next tick; cc.Never: not at all
	trace func(Event) // sees all events; nil: not traced
}

// leg is one flow of a testbed and what its transport knows.
type leg struct {
	*Flow
	p       *testbed
	r       Report
	limit   Limit   // the newest
	applied int     // calls of Apply
	wakes   int     // calls of Wake
	paced   cc.Time // when the next packet may leave
}

func newTestbed(t *testing.T) *testbed {
	p := &testbed{t: t, mgr: &Manager{}, now: cc.Time(time.Second), due: cc.Never}
	p.mgr.Arm = func(_ int, at cc.Time) { p.due = min(p.due, at) }
	p.mgr.Trace = func(e Event) {
		if p.trace != nil {
			p.trace(e)
		}
	}
	return p
}

// open opens a flow over a leg that does not enforce the window.
func (p *testbed) open(terms Terms) *leg {
	p.t.Helper()
	return p.openOver(terms, false)
}

// openEnforced opens a flow over a leg that enforces the window.
func (p *testbed) openEnforced(terms Terms) *leg {
	p.t.Helper()
	return p.openOver(terms, true)
}

func (p *testbed) openOver(terms Terms, enforces bool) *leg {
	p.t.Helper()
	return p.resume(terms, enforces, Dormant{})
}

// resume opens a flow that goes on from elsewhere.
func (p *testbed) resume(terms Terms, enforces bool, from Dormant) *leg {
	p.t.Helper()
	l := &leg{p: p}
	f, err := p.mgr.Resume(p.now, terms, Leg{
		Enforces: enforces,
		Apply:    func(limit Limit) { l.limit, l.applied = limit, l.applied+1 },
		Wake:     func() { l.wakes++ },
	}, from)
	require.NoError(p.t, err)
	l.Flow = f
	l.r.MSS = mss
	return l
}

// wait lets d pass, and the manager have the ticks that it wants.
func (p *testbed) wait(d time.Duration) {
	end := p.now.Add(d)
	for p.due <= end {
		p.now = max(p.now, p.due)
		p.due = cc.Never
		p.due = min(p.due, p.mgr.Tick(0, p.now))
	}
	p.now = end
}

// waitForDivision lets windows be divided after their members have changed.
func (p *testbed) waitForDivision() { p.wait(tickInterval) }

// send takes up to n bytes and puts what is granted on the wire.
func (l *leg) send(n cc.Bytes) cc.Bytes {
	g := l.Take(l.p.now, n)
	l.r.Written += g.Bytes
	l.r.Pipe += g.Bytes
	return g.Bytes
}

// ack lets n bytes arrive, in order, and returns the limit that the leg has then.
func (l *leg) ack(n cc.Bytes) Limit {
	l.r.Acked += n
	l.r.Pipe -= n
	return l.report()
}

// report tells the flow what the transport knows, and returns the limit that the leg
// has then.
func (l *leg) report() Limit {
	l.r.At = l.p.now
	l.Report(l.r)
	return l.limit
}

// inflight is the flow's own count.
func (l *leg) inflight() cc.Bytes { return l.Snapshot().Inflight }

// group is what the flow is a member of.
func (l *leg) group() *group { return l.home.Load() }

// write hands n bytes to a transport that enforces the window, and sent of them leave at once.
func (l *leg) write(n, sent cc.Bytes) {
	l.r.Written += n
	l.r.Unsent += n - sent
	l.r.Pipe += sent
}

// fill leaves such a transport with a full window and more to send.
func (l *leg) fill() Limit {
	l.write(max(0, 20*mss-l.r.Unsent), 0)
	n := max(0, l.report().Cwnd-l.r.Pipe)
	l.write(n, n)
	return l.report()
}

func static(packets float64) Terms {
	return Terms{
		Group: "host", Host: addr("192.0.2.1"), Algorithm: "static",
		Params: cc.Params{"cwnd_packets": packets},
	}
}

func reno() Terms { return Terms{Group: "host", Host: addr("192.0.2.1"), Algorithm: "reno"} }

func under(algorithm string) Terms { return Terms{Group: "host", Algorithm: algorithm} }

// watched is an algorithm with a fixed window that shows its events.
type watched struct{ cc.NoTick }

var (
	watchedCwnd = 10 * mss
	onAck       = func(cc.Ack) {}
	onLoss      = func(cc.Loss) {}
)

func init() {
	cc.Register(cc.Spec{Name: "watched", About: "test double", New: func(cc.Config) cc.Algorithm { return watched{} }})
}

func (watched) OnAck(a cc.Ack)   { onAck(a) }
func (watched) OnLoss(l cc.Loss) { onLoss(l) }
func (watched) Control() cc.Control {
	return cc.Control{Cwnd: watchedCwnd}
}

// watch shows the acknowledgements that algorithm "watched" gets.
func watch(t *testing.T, f func(cc.Ack)) {
	onAck = f
	t.Cleanup(func() { onAck = func(cc.Ack) {} })
}

// watchLosses does so for losses.
func watchLosses(t *testing.T) *[]cc.Loss {
	var losses []cc.Loss
	onLoss = func(l cc.Loss) { losses = append(losses, l) }
	t.Cleanup(func() { onLoss = func(cc.Loss) {} })
	return &losses
}

// countMembers returns the number of members of all groups.
func countMembers(groups []Group) (n int) {
	for _, g := range groups {
		n += g.Members
	}
	return n
}
