package flow

import (
	"cmp"
	"math"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// unpacedSegments is how many segments of a connection Linux sends whatever the pacing rate is
// (tcp_output.c, tcp_update_skb_after_send).
const unpacedSegments = 10

// pacedAhead is how far ahead of a maximum rate a flow may write that has the rate for itself, where
// its transport keeps the rate: a busy machine must not leave the transport without bytes.
const pacedAhead = 50 * time.Millisecond

// member is one flow as its group knows it. The group's mutex guards it.
type member struct {
	sampler
	allocation
	gate
	id    uint64
	leg   Leg
	timer timer // of the flow, for when it waits for its pacer
	terms Terms
	path  *path

	counts   cc.Bytes // what inflight counts in the group's window
	overflow bool     // that is more than the floor
	want     cc.Bytes // wanted and not granted, or waiting for the window in the transport
	asked    cc.Time  // when want was last heard of; 0: never
	lastBusy cc.Time  // when the flow last wanted to send, had bytes in flight or was acknowledged; 0: never
	active   bool     // it is in the group's list of active members
	rampEnd  cc.Time  // until then it is paced to its share; 0: it is not
	told     bool     // the leg has been told a limit, the newest of which the gate has
	limits   limitTimes

	maxRate  *rateLimit  // of its group; nil: none
	waiter   waiter      // at maxRate
	asks     atomic.Bool // NeedsGrants, for those who do not hold the group's mutex
	unpaced  cc.Bytes    // over a leg that enforces the window: what it sends yet whatever the pacing rate is
	starting pacer       // spreads these by its own rates

	place int // in the group's list of members
	along int // in the path's
}

// leastWindow is floorSegments as they count in the group's window.
func (m *member) leastWindow() cc.Bytes { return m.path.toReference(floorSegments * m.segmentSize()) }

// wantsMore reports whether m can use more of the window than it has. A member that has sent
// ahead of its pacing rate does, until the rate has caught up: on a path of microseconds the
// kernel sends up to 64 KiB at once (tcp_tso_autosize), and a slow flow then pauses for long.
// One that was granted bytes and has not asked again for a retransmission timeout does not. A
// kernel that paces reports nothing for as long as what waits there takes at the rate.
func (m *member) wantsMore(now cc.Time, rtt *rttEstimator) bool {
	if m.gate.blocked && !m.enforced || m.pacer.creditBytes(now, m.segmentSize()) <= 0 {
		return true
	}
	silence := rtt.rto()
	if m.enforced && m.limit.PacingRate > 0 {
		silence += m.limit.PacingRate.TimeFor(m.want)
	}
	return m.want > 0 && now.Sub(m.asked) <= silence
}

// isSilent reports whether m has neither sent nor wanted to for a retransmission timeout.
func (m *member) isSilent(now cc.Time, rto time.Duration) bool {
	return !m.isBusy() && (m.lastBusy == 0 || now.Sub(max(m.lastBusy, m.pacer.tat)) > rto)
}

// isBusy reports whether m wants to send or has bytes in flight.
func (m *member) isBusy() bool { return m.want > 0 || m.inflight > 0 || m.gate.blocked }

// applyLimit puts a limit into force.
func (m *member) applyLimit(now cc.Time, l Limit) {
	if m.told && l.Cwnd == m.limit.Cwnd && l.PacingRate == m.limit.PacingRate {
		return
	}
	m.told = true
	m.gate.setLimit(now, l)
	if m.leg.Apply != nil {
		m.leg.Apply(l)
	}
}

// wakeRelay has the relay ask again.
func (m *member) wakeRelay() {
	m.gate.blocked, m.gate.retryAt = false, 0
	if m.leg.Wake != nil {
		m.leg.Wake()
	}
}

// noteLimitedBy records what holds m back, as far as its last report shows it.
func (m *member) noteLimitedBy(now cc.Time, below bool) {
	r := &m.last
	m.limits.addElapsed(now)
	switch {
	case r.RwndFull:
		m.limits.enterState(now, LimitedByReceiver)
	case m.enforced && r.Unsent < m.segmentSize():
		m.limits.enterState(now, LimitedByApplication)
	case m.enforced && m.limit.PacingRate > 0 && m.inflight+2*m.segmentSize() <= m.limit.Cwnd:
		m.limits.enterState(now, LimitedByPacing)
	case m.enforced:
		m.limits.enterState(now, LimitedByCwnd)
	case below:
		m.limits.enterState(now, LimitedByTransport)
	case m.want > 0 && (m.limits.by == LimitedByReceiver || m.limits.by == LimitedByTransport):
		m.limits.enterState(now, LimitedByCwnd)
	case m.want == 0:
		m.limits.enterState(now, LimitedByApplication)
	}
}

// setMaxRate has m keep to l; nil: to none. The caller holds the mutex of m's group,
// if it has one.
func (m *member) setMaxRate(l *rateLimit) {
	m.maxRate = l
	if l != nil && m.waiter.wake == nil {
		m.waiter.wake = m.timer.owner.onTimer
	}
	m.notePermits()
}

// notePermits has NeedsGrants say what m's terms and its start ask for. The caller holds the mutex of m's
// group, if it has one.
func (m *member) notePermits() { m.asks.Store(m.maxRate != nil || m.startsPaced()) }

// startsPaced reports whether m's first segments are spread here, over a transport that enforces the window.
func (m *member) startsPaced() bool {
	return m.enforced && m.unpaced > 0 && (m.terms.ConnectionRate > 0 || m.terms.HintCap > 0)
}

// passMaxRate asks the group's maximum rate to let up to want bytes pass, in whole quanta,
// and returns how many may.
func (m *member) passMaxRate(now cc.Time, want, quantum cc.Bytes) (n cc.Bytes) {
	if m.maxRate == nil || want == 0 {
		return want
	}
	ahead := time.Duration(0)
	if m.enforced && m.unpaced == 0 && m.maxRate.users.Load() == 1 {
		ahead = pacedAhead
	}
	m.maxRate.mu.Lock()
	n = m.maxRate.takeBytes(now, &m.waiter, want, quantum, m.segmentSize(), ahead)
	m.maxRate.mu.Unlock()
	if n == 0 {
		m.limits.enterState(now, LimitedByPacing)
	}
	return n
}

// floorSegments is what every member of a group may have in flight however small its
// share: nobody starves, at the price of at most that much per member above the window.
const floorSegments = 2

// ackedTogether segments are acknowledged at once (RFC 9293 §3.8.6.3): one by itself at
// the end of a window waits for tens of milliseconds at the receiver. Its round trip
// would tell of a queue that is not there.
const ackedTogether = 2

// allocation is what a member may have of its group's window. Bytes are as they count there.
type allocation struct {
	weight   cc.Bytes
	priority int     // lower ones come first
	target   cc.Rate // what it has before others of its priority share the rest; 0: nothing
	ceiling  cc.Rate // what it never exceeds; 0: any
	own      cc.Rate // of that, what is not the whole group's: its own pacer keeps it

	// In and out of divide.
	wants    bool     // it contends: it can use more than it has
	used     cc.Bytes // in flight; all that one which does not contend can use
	floor    cc.Bytes // whatever the others want
	least    cc.Bytes // of the floor, what it can use
	goal     cc.Bytes // before others of its priority share the rest; 0: it has none
	bound    cc.Bytes // all it may use
	most     cc.Bytes // all it can use: bound, or used if it does not contend
	unit     cc.Bytes // a segment
	segments cc.Bytes // floorSegments of them
	due      cc.Bytes // what the window gives it
	share    cc.Bytes // what it may have in flight; if it does not contend, as if it did
	cap      cc.Bytes // scratch of fill: most, or goal
	open     bool     // scratch of fill: its level is not settled yet
}

// satisfied is how far above its Target a Guarantee may get (Janus' 1+ε).
const satisfied = 1.1

func satisfiedRate(target cc.Rate) cc.Rate { return cc.Rate(satisfied * float64(target)) }

// newAllocation is what t asks for.
func newAllocation(t Terms) allocation {
	a := allocation{
		weight: cc.Bytes(max(1, t.Weight)), priority: t.Priority, ceiling: t.maxAllowedRate(), own: t.ConnectionRate,
	}
	if t.Class == Guarantee && t.Target > 0 {
		a.target = lesserRate(t.Target, a.ceiling)
		a.ceiling = lesserRate(a.ceiling, satisfiedRate(a.target))
		a.own = lesserRate(a.own, satisfiedRate(a.target))
	}
	return a
}

// wholePairs is what c is due in whole pairs of segments, or what it has at least.
func (c *allocation) wholePairs() cc.Bytes {
	return max(c.due-c.due%(ackedTogether*c.unit), c.least)
}

// roundUp rounds to whole units.
func roundUp(n, unit cc.Bytes) cc.Bytes { return (n + unit - 1) / unit * unit }

// alike is by how much base round trips may differ and still be taken for one.
const alike = 1.2

// learnFor is for how many round trips a path learns its base from others.
const learnFor = 3

// rescale is by how much the ratio of two round trips has to change before what
// is in flight is counted anew.
const rescale = 1.0 / 16

// path is the way to one host of a group. RFC 3124 has one path for each macroflow; a
// group may have several that share the bottleneck, such as an uplink. Where their base
// round trips are unlike, equal windows are not equal rates. Then one path is the
// group's reference, whose round trips the algorithm sees, and bytes in flight on
// another count by how much shorter or longer it is: as many as the same rate keeps in
// flight on the reference.
type path struct {
	host    netip.Addr    // invalid: not known
	members []*member     // in no order
	idle    cc.Time       // when the last member left
	base    time.Duration // least round trip without the queue that others knew of; 0: no sample yet
	learnt  cc.Time       // until when base is the average of samples less that queue
	samples time.Duration // how many of those there have been
	scale   float64       // reference's round trip over this one's; 0: they are alike
	slot    int           // in the manager's index of hosts; its mutex guards it

	queue atomic.Pointer[hostQueue] // of all paths to the host; nil: no group receives from it
}

// addMember has m's bytes go along p.
func (p *path) addMember(m *member) {
	m.path, m.along = p, len(p.members)
	p.members = append(p.members, m)
}

// removeMember undoes join.
func (p *path) removeMember(m *member, now cc.Time) {
	last := len(p.members) - 1
	p.members[m.along] = p.members[last]
	p.members[m.along].along = m.along
	p.members[last] = nil
	p.members = p.members[:last]
	p.idle = now
}

// isFar reports whether p's round trips are unlike the reference's.
func (p *path) isFar() bool { return p.scale != 0 }

// toReference is what n bytes on p count in the group's window, rounded up.
func (p *path) toReference(n cc.Bytes) cc.Bytes {
	if !p.isFar() {
		return n
	}
	return cc.Bytes(math.Ceil(float64(n) * p.scale))
}

// fromReference is how many bytes on p count for n; it errs by less than one of those,
// upwards, so that a whole segment that has room keeps it.
func (p *path) fromReference(n cc.Bytes) cc.Bytes {
	if !p.isFar() || n <= 0 {
		return n
	}
	return cc.Bytes(min(float64(n+1)/p.scale, float64(cc.MaxCwnd)))
}

// paths are those of a group.
type paths struct {
	all []*path
	ref *path         // whose round trips the algorithm sees; nil: no sample since it started
	q   time.Duration // newest queueing delay that a member has seen
	qAt cc.Time
}

// addRTTSample takes in a round trip on p and returns what it would have been on the
// reference. changed says whether bytes on p count otherwise from now on; srtt is the
// reference's.
func (s *paths) addRTTSample(now cc.Time, p *path, rtt, srtt time.Duration) (seen time.Duration, changed bool) {
	rtt = max(rtt, time.Microsecond) // clocks are coarse; nothing may divide by zero
	switch {
	case s.ref == nil:
		s.ref, p.base = p, cmp.Or(min(p.base, rtt), rtt)
	case p.base == 0 || now < p.learnt:
		s.learnBase(now, p, rtt)
	default:
		p.base = min(p.base, rtt)
	}
	if now >= p.learnt {
		s.q, s.qAt = rtt-p.base, now
	}
	changed = s.updateScale(p, srtt)
	if p.isFar() {
		rtt = max(rtt-p.base+s.ref.base, time.Microsecond)
	}
	return rtt, changed
}

// learnBase takes in one of p's first round trips. Others may know how much of it is the
// queue: the base is what the samples are longer than that queue, on average, since
// neither sees it at the same moment. Where the others are silent, there is only the sample.
func (s *paths) learnBase(now cc.Time, p *path, rtt time.Duration) {
	if p.base == 0 {
		p.learnt = now.Add(learnFor * rtt)
	}
	base := max(rtt-s.q, rtt/8)
	if now.Sub(s.qAt) > max(rtt, s.q) {
		base, p.learnt = rtt, now
	}
	p.samples++
	p.base = min(p.base+(base-p.base)/p.samples, rtt)
}

// updateScale works out anew how bytes on p count, and reports whether that has changed.
func (s *paths) updateScale(p *path, srtt time.Duration) bool {
	if p == s.ref || p.base == 0 {
		return false
	}
	scale := 0.0
	if ratio := float64(p.base) / float64(s.ref.base); ratio > alike || ratio < 1/alike {
		queue := max(0, srtt-s.ref.base)
		scale = float64(s.ref.base+queue) / float64(p.base+queue)
	}
	if scale == p.scale || scale != 0 && math.Abs(scale-p.scale) <= rescale*p.scale {
		return false
	}
	p.scale = scale
	return true
}

// setReference makes p the reference, as it is whenever an algorithm starts that will see
// nothing of what was before.
func (s *paths) setReference(p *path, srtt time.Duration) {
	s.ref = nil
	if p.base > 0 {
		s.ref = p
	}
	for _, each := range s.all {
		each.scale = 0
		if s.ref != nil {
			s.updateScale(each, srtt)
		}
	}
}

// pathTo returns the path to a host; nil: there is none.
func (s *paths) pathTo(host netip.Addr) *path {
	for _, p := range s.all {
		if p.host == host {
			return p
		}
	}
	return nil
}

// plainAddr is a host's address as paths and hints are told apart by it.
func plainAddr(host netip.Addr) netip.Addr { return host.Unmap().WithZone("") }

// hostQueue is the queue on the way to a host, as the flows see it that send there and know
// their ways apart. For those that receive from the host it is on the way back: their
// acknowledgements wait in it, and the kernel tells them nothing of the peer's clock.
type hostQueue struct {
	mu    sync.Mutex // taken with a group's
	at    cc.Time    // of the newest
	from  cc.Time    // when the present span began
	least [2]time.Duration
}

// queueSpan is the span of which a hostQueue keeps the least, and of the one before: what a
// receiver's kernel says of round trips lags a little behind a queue that grows, and to take
// off more than they hold would hide a queue on the way from the host. With longer spans
// uploads lose half of their rate whenever the download lets its queue run empty.
const queueSpan = 15 * time.Millisecond

// addDelay takes in a queueing delay.
func (q *hostQueue) addDelay(now cc.Time, delay time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.at = now
	switch passed := now.Sub(q.from); {
	case passed >= 2*queueSpan:
		q.from, q.least = now, [2]time.Duration{delay, delay}
	case passed >= queueSpan:
		q.from, q.least = now, [2]time.Duration{delay, q.least[0]}
	default:
		q.least[0] = min(q.least[0], delay)
	}
}

// recentLeast returns the queueing delay that was there at least; false: none was noted within
// a time.
func (q *hostQueue) recentLeast(now cc.Time, within time.Duration) (time.Duration, bool) {
	if q == nil {
		return 0, false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return min(q.least[0], q.least[1]), q.at > 0 && now.Sub(q.at) <= within
}
