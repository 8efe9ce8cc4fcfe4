package flow

import (
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// group is the flows that share one algorithm and one window: a macroflow of RFC 3124.
// Its mutex guards everything in it and in its members.
type group struct {
	key    string
	name   string // the Terms.Group of all members
	spec   cc.Spec
	params cc.Params
	seed   uint64
	timers *timers
	emit   func(Event) // sees every event of the algorithm; nil: nobody does

	mu        sync.Mutex
	alg       cc.Algorithm // nil before the first event, when the segment size is known, and once it is forgotten
	ctl       cc.Control   // alg's limits, as far as caps leave them
	mss       cc.Bytes
	members   []*member // in no order
	alloc     allocator
	datagrams []*Datagrams // beside the members, in their window
	rtt       rttEstimator
	paths     paths
	delivered delivery
	rate      cc.Rate  // newest delivery-rate sample
	inflight  cc.Bytes // sum of what the members count
	overflow  int      // members that have more than their floors in flight
	wanting   int      // members that want more than they have

	changed   bool    // the window or what members want: divide anew
	now       bool    // likewise, and what the limits let out is not to wait for acknowledgements
	divideAt  cc.Time // not before this, unless it is urgent
	lossEpoch uint64  // counts loss events
	lossAt    cc.Time

	cwndFullAt cc.Time  // when the window last cut a grant short, or kept bytes waiting in a transport
	wantedAt   cc.Time  // when a member last got less than it wanted; 0: never
	heldBelow  bool     // the transport or the receiver, not the window, holds bytes back
	started    cc.Time  // when alg was built
	base       cc.Bytes // what had been delivered then: alg counts from there
	initial    cc.Bytes // window for alg to start from; 0: the usual one
	ssthresh   cc.Bytes // window that the path is known to carry, for alg to start with; 0: not known
	takenAway  float64  // part of the window that members have taken elsewhere, until a round trip after takenAt
	takenAt    cc.Time
	idle       idleness
	caps       caps

	timer
}

// start builds the algorithm on first use.
func (g *group) start(now cc.Time) {
	if g.alg != nil {
		return
	}
	g.mss = cc.DefaultMSS
	for _, m := range g.members {
		if m.last.MSS > 0 {
			g.mss = m.last.MSS
			break
		}
	}
	initial := g.initial
	if initial == 0 {
		initial = cc.InitialCwndPackets * g.mss
	}
	g.started, g.base = now, g.delivered.total
	g.alg = g.spec.New(cc.Config{
		MSS: g.mss, InitialCwnd: initial, Ssthresh: g.ssthresh, Params: g.params,
		Rand: rand.New(rand.NewPCG(g.seed, 0)),
	})
	g.adopt(now)
}

// adopt takes over the algorithm's limits after it has seen an event at now.
func (g *group) adopt(now cc.Time) {
	before := g.ctl
	g.ctl = g.alg.Control()
	if g.ctl.NextTick != 0 {
		g.timers.schedule(g, max(g.ctl.NextTick, now.Add(leastTick)))
	}
	g.cap(now)
	g.changed = g.changed || g.ctl.Cwnd != before.Cwnd || g.ctl.PacingRate != before.PacingRate
}

// state is what the algorithm may know.
func (g *group) state(now cc.Time) cc.State {
	s := cc.State{
		Now:         now,
		MSS:         g.mss,
		Inflight:    g.ownInflight(),
		Delivered:   g.delivered.total - g.base,
		SRTT:        g.rtt.srtt,
		RTTVar:      g.rtt.rttvar,
		MinRTT:      g.rtt.min,
		CwndLimited: g.cwndLimited(),
	}
	if g.caps.hinted {
		s.Hint = &g.caps.hint
	}
	return s
}

// seen is s as the algorithm may see it, which counts from its own start.
func (g *group) seen(s cc.Sent) cc.Sent {
	s.Delivered = max(0, s.Delivered-g.base)
	return s
}

// ownInflight is what the algorithm's window has put in flight. Where only the members'
// floors keep more there, that is not the algorithm's to take back: one that waits for
// it to go (BBR's ProbeRTT) would wait for ever.
func (g *group) ownInflight() cc.Bytes {
	switch {
	case g.inflight <= g.ctl.Cwnd:
		return min(g.inflight+g.lent(false), g.ctl.Cwnd)
	case g.overflow > 0:
		return g.inflight
	}
	return g.ctl.Cwnd
}

// cwndLimited tells whether the window was what held the sender back since the newest
// delivered byte left, a round trip ago. Bytes that pile up in the transport mean that
// it was not; nor was it where a cap leaves less.
func (g *group) cwndLimited() bool {
	return g.cwndFullAt != 0 && !g.heldBelow && !g.caps.bind && g.cwndFullAt >= g.delivered.firstSent
}

// noteAppLimited marks what is in flight as too little to probe the path, when there is
// room in the window and nobody wants it, or a cap does not let it be used.
func (g *group) noteAppLimited() {
	if g.delivered.total > g.delivered.appLimited {
		g.delivered.appLimited = 0
	}
	if !g.caps.bind && (g.wanting > 0 || g.inflight+g.mss > g.window()) {
		return
	}
	g.delivered.appLimited = max(g.delivered.total+g.inflight, 1)
}

// join has m be a member on path p.
func (g *group) join(m *member, p *path) {
	m.place = len(g.members)
	g.members = append(g.members, m)
	p.members++
	m.path = p
	g.caps.add(m)
	g.changed = true
}

// leave has m be a member no more.
func (g *group) leave(m *member, now cc.Time) {
	g.setWant(m, 0)
	m.inflight, m.sampler.blocked = 0, 0
	g.recount(m)
	g.deactivate(m)
	m.path.members--
	m.path.idle = now
	last := g.members[len(g.members)-1]
	g.members[m.place], last.place = last, m.place
	g.members[len(g.members)-1] = nil
	g.members = g.members[:len(g.members)-1]
	g.caps.remove(m)
	g.recap(now)
	g.timers.cancel(m.clock)
	g.changed, g.now = true, true
}

// recount works out anew what m counts in the group's window. Bytes that wait for the
// peer to open its own window load no path, and must not keep the others from theirs.
func (g *group) recount(m *member) {
	before := m.counts
	m.counts = m.path.shrink(m.inflight - m.sampler.blocked)
	g.inflight += m.counts - before
	if overflow := m.counts > m.leastWindow(); overflow != m.overflow {
		m.overflow = overflow
		if overflow {
			g.overflow++
		} else {
			g.overflow--
		}
	}
}

// recountPath does so for all members on p; nil: for all members.
func (g *group) recountPath(p *path) {
	for _, m := range g.members {
		if p == nil || m.path == p {
			g.recount(m)
		}
	}
}

// anchor makes p the reference path.
func (g *group) anchor(p *path) {
	g.paths.anchor(p, g.rtt.srtt)
	g.recountPath(nil)
}

// setWant notes how much m wants beyond what it has.
func (g *group) setWant(m *member, want cc.Bytes) {
	if (want > 0) != (m.want > 0) {
		g.changed = true
		if want > 0 {
			g.wanting++
		} else {
			g.wanting--
		}
	}
	m.want = want
}

// begin notes that m begins to send or to want to, if it did neither. One that comes
// after silence, its own among others that send or the group's, gets up to its share
// over a round trip: what others leave to it they leave over a round trip, and the path
// may have changed (RFC 7661 §4.4.3). A DelaySensitive flow does not wait for others.
func (g *group) begin(m *member, now cc.Time) {
	wasIdle := g.resume(m.path, now)
	g.start(now)
	silent := m.inflight == 0 && (m.lastBusy == 0 || now.Sub(m.lastBusy) > g.rtt.rto())
	others := g.inflight > m.counts || g.wanting > 0 && m.want == 0
	if m.want == 0 && (wasIdle || silent && others && m.terms.Class != DelaySensitive) {
		m.rampEnd = now.Add(g.rtt.srtt)
	}
	if !m.active {
		g.activate(m)
		g.provide(m, now, true)
	}
}

// activate puts m into the list of active members, if it is not there.
func (g *group) activate(m *member) {
	if m.active {
		return
	}
	m.active, m.due, m.share = true, 0, 0
	g.alloc.fresh++
	i, _ := slices.BinarySearchFunc(g.alloc.members, m, compareMembers)
	g.alloc.members = slices.Insert(g.alloc.members, i, m)
	g.changed = true
}

// deactivate takes m out of the list of active members.
func (g *group) deactivate(m *member) {
	if !m.active {
		return
	}
	m.active = false
	if i, ok := slices.BinarySearchFunc(g.alloc.members, m, compareMembers); ok {
		g.alloc.members = slices.Delete(g.alloc.members, i, i+1)
	}
}

// send counts n bytes of m in flight that leave now.
func (g *group) send(m *member, now cc.Time, n cc.Bytes) {
	granule := max(m.mss(), g.ctl.Cwnd/(ledgerChunks/2))
	m.sampler.send(n, roundUp(min(granule, cc.MaxCwnd/ledgerChunks), m.mss()), g.sent(now))
	g.recount(m)
}

// roundUp rounds to whole units.
func roundUp(n, unit cc.Bytes) cc.Bytes { return (n + unit - 1) / unit * unit }

// sent describes the group to the bytes that leave now.
func (g *group) sent(now cc.Time) chunk {
	if g.inflight == 0 {
		g.delivered.idle(now)
	}
	return chunk{
		sent: cc.Sent{
			At:          now,
			DeliveredAt: g.delivered.at,
			Cwnd:        g.ctl.Cwnd,
			Inflight:    g.inflight,
			Delivered:   g.delivered.total,
			AppLimited:  g.delivered.appLimited != 0,
		},
		first: g.delivered.firstSent,
	}
}

// srtt and leastRTT are the round trips of m's own path.
func (g *group) srtt(m *member) time.Duration {
	if m.path.far() && m.rtt.srtt > 0 {
		return m.rtt.srtt
	}
	return g.rtt.srtt
}

func (g *group) leastRTT(m *member) time.Duration {
	if m.path.far() {
		return m.path.base
	}
	return g.rtt.min
}
