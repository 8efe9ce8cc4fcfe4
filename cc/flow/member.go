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

// pacedAhead is how far ahead of a maximum rate a flow may write if no other flow has that rate and its transport
// paces. A busy machine must not leave the transport without bytes.
const pacedAhead = 50 * time.Millisecond

// member is one flow as its group knows it. The group's mutex guards it.
type member struct {
	sampler    // what became of its bytes
	allocation // what it may have of the window
	gate       // its limit
	id         uint64
	leg        Leg
	timer      timer // of its pacer and its start
	terms      Terms
	path       *path

	counted    cc.Bytes // part of the window that its bytes in flight use, in bytes of the reference path
	aboveFloor bool     // counted exceeds floorSegments
	want       cc.Bytes // wanted and not granted, or waiting in the transport for the window
	askedAt    cc.Time  // when want was last set; 0: never
	lastBusy   cc.Time  // when it last wanted to send, had bytes in flight or was acknowledged; 0: never
	active     bool     // it is in allocator.active
	ramping    bool     // it is paced to its share until an acknowledgement arrives
	follows    bool     // nothing reports its bytes: those of other members that left with them do
	hasLimit   bool     // Leg.Apply has been called; the gate has the newest limit
	isEchoed   bool     // an EchoFlow's: its round trips are those of echo requests
	limits     limitTimes

	maxRate     *rateLimit  // of its group; nil: none
	waiter      waiter      // at maxRate
	needsGrants atomic.Bool // Flow.NeedsGrants, readable without the mutex
	startBytes  cc.Bytes    // over an enforcing leg: bytes that still leave whatever the pacing rate is
	startPacer  pacer       // spreads startBytes by the flow's own rates

	groupIndex int // in window.members
	pathIndex  int // in path.members
}

// leastWindow returns floorSegments in bytes of the group's window.
func (m *member) leastWindow() cc.Bytes { return m.path.toReference(floorSegments * m.segmentSize()) }

// wantsMore reports whether m can use more of the window than it has. A member that was granted bytes and has not
// asked again for a retransmission timeout cannot. A member that has sent ahead of its pacing rate can, until the rate
// has caught up: on a path of microseconds Linux sends up to 64 KiB at once (tcp_tso_autosize), and a slow flow then
// pauses for long. A transport that paces reports nothing while it sends what it holds, so its time counts extra.
func (m *member) wantsMore(now cc.Time, rtt *rttEstimator) bool {
	if m.gate.waiting && !m.enforced || m.pacer.creditBytes(now, m.segmentSize()) <= 0 {
		return true
	}
	silence := rtt.rto()
	if m.enforced && m.limit.PacingRate > 0 {
		silence += m.limit.PacingRate.TimeFor(m.want)
	}
	return m.want > 0 && now.Sub(m.askedAt) <= silence
}

// isSilent reports whether m has neither sent nor wanted to for a retransmission timeout.
func (m *member) isSilent(now cc.Time, rto time.Duration) bool {
	return !m.isBusy() && (m.lastBusy == 0 || now.Sub(max(m.lastBusy, m.pacer.tat)) > rto)
}

// isBusy reports whether m wants to send or has bytes in flight.
func (m *member) isBusy() bool { return m.want > 0 || m.inflight > 0 || m.gate.waiting }

// applyLimit puts a limit into force, and pushes it to the leg if it is a new one.
func (m *member) applyLimit(now cc.Time, l Limit) {
	if m.hasLimit && l.Cwnd == m.limit.Cwnd && l.PacingRate == m.limit.PacingRate {
		return
	}
	m.hasLimit = true
	m.gate.setLimit(now, l)
	if m.leg.Apply != nil {
		m.leg.Apply(l)
	}
}

// wakeRelay makes the relay ask again.
func (m *member) wakeRelay() {
	m.gate.waiting, m.gate.retryAt = false, 0
	if m.leg.Wake != nil {
		m.leg.Wake()
	}
}

// updateLimitedBy records what holds m back according to its last report. below: the transport or the receiver does.
func (m *member) updateLimitedBy(now cc.Time, below bool) {
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

// setMaxRate makes m keep to l; nil: to no maximum. The caller holds the mutex of m's group, if m is in one.
func (m *member) setMaxRate(l *rateLimit) {
	m.maxRate = l
	if l != nil && m.waiter.wake == nil {
		m.waiter.wake = m.timer.owner.onTimer
	}
	m.updateNeedsGrants()
}

// updateNeedsGrants sets what NeedsGrants returns, after m's terms or startBytes have changed. The caller holds the
// mutex of m's group, if m is in one.
func (m *member) updateNeedsGrants() { m.needsGrants.Store(m.maxRate != nil || m.isStartPaced()) }

// isStartPaced reports whether m's first segments are spread here although its leg enforces the window.
func (m *member) isStartPaced() bool {
	return m.enforced && m.startBytes > 0 && (m.terms.ConnectionRate > 0 || m.terms.HintCap > 0)
}

// passMaxRate asks the group's maximum rate to let up to want bytes pass, in whole quanta, and returns how many may.
func (m *member) passMaxRate(now cc.Time, want, quantum cc.Bytes) (n cc.Bytes) {
	if m.maxRate == nil || want == 0 {
		return want
	}
	ahead := time.Duration(0)
	if m.enforced && m.startBytes == 0 && m.maxRate.users.Load() == 1 {
		ahead = pacedAhead
	}
	m.maxRate.mu.Lock()
	n = m.maxRate.passBytes(now, &m.waiter, want, quantum, m.segmentSize(), ahead)
	m.maxRate.mu.Unlock()
	if n == 0 {
		m.limits.enterState(now, LimitedByPacing)
	}
	return n
}

// floorSegments is what every member of a group may have in flight however small its share is. So no member starves.
// The price is that the window may be exceeded by as much for each member.
const floorSegments = 2

// ackedTogether is how many segments a receiver acknowledges at once (RFC 9293 §3.8.6.3). A single one at the end of a
// window waits for tens of milliseconds at the receiver. Its round trip would show a queue that is not there.
const ackedTogether = 2

// allocation is what a member may have of its group's window. Bytes are those of the reference path.
type allocation struct {
	weight      cc.Bytes
	priority    int     // lower ones come first
	targetRate  cc.Rate // it gets this before others of its priority share the rest; 0: no target
	ceilingRate cc.Rate // it never exceeds this; 0: no ceiling
	ownRate     cc.Rate // the part of ceilingRate that is not the group's maximum; its own pacer keeps it; 0: none

	// Set by setBounds before a division.
	contends    bool     // it can use more than it has
	used        cc.Bytes // in flight; a member that does not contend can use no more
	floor       cc.Bytes // it gets this whatever the others want
	usableFloor cc.Bytes // the part of floor that it can use
	targetBytes cc.Bytes // targetRate as a window; 0: no target
	allowed     cc.Bytes // all that its terms allow
	usable      cc.Bytes // allowed, or used if it does not contend
	segment     cc.Bytes // payload of a segment
	minimum     cc.Bytes // floorSegments of them

	// Set by a division.
	allotted      cc.Bytes // what the window gives it; the sum over all members is the window
	inflightLimit cc.Bytes // what it may have in flight; if it does not contend, what it could have if it did
	fillCap       cc.Bytes // scratch of fillUpTo: up to what allotted is raised
	fillOpen      bool     // scratch of fillUpTo: allotted is not final yet
}

// guaranteeHeadroom is how far a Guarantee may exceed its Target, as a factor (1+ε in Janus, TMC 2018).
const guaranteeHeadroom = 1.1

// guaranteeCeiling returns the most that a Guarantee with a target gets.
func guaranteeCeiling(target cc.Rate) cc.Rate { return cc.Rate(guaranteeHeadroom * float64(target)) }

// newAllocation returns the allocation that t asks for.
func newAllocation(t Terms) allocation {
	a := allocation{
		weight: cc.Bytes(max(1, t.Weight)), priority: t.Priority, ceilingRate: t.maxAllowedRate(), ownRate: t.ConnectionRate,
	}
	if t.Class == Guarantee && t.Target > 0 {
		a.targetRate = lesserRate(t.Target, a.ceilingRate)
		a.ceilingRate = lesserRate(a.ceilingRate, guaranteeCeiling(a.targetRate))
		a.ownRate = lesserRate(a.ownRate, guaranteeCeiling(a.targetRate))
	}
	return a
}

// roundToPairs returns what is allotted in whole pairs of segments, but at least the usable floor.
func (c *allocation) roundToPairs() cc.Bytes {
	return max(c.allotted-c.allotted%(ackedTogether*c.segment), c.usableFloor)
}

// roundUp rounds n up to whole units.
func roundUp(n, unit cc.Bytes) cc.Bytes { return (n + unit - 1) / unit * unit }

// alikeRatio is the ratio up to which two base round trips count as equal.
const alikeRatio = 1.2

// learnRTTs is for how many round trips a new path learns its base round trip.
const learnRTTs = 3

// rescaleStep is by how much the scale of a path has to change before its bytes in flight are counted anew.
const rescaleStep = 1.0 / 16

// path is the way to one host of a group. RFC 3124 has one path for each macroflow. A group may have several that
// share a bottleneck, such as an uplink. Where their base round trips differ, equal windows are not equal rates. So
// one path is the group's reference. Bytes in flight on another path are scaled to what the same rate keeps in flight
// on the reference.
type path struct {
	host         netip.Addr    // invalid: not known
	members      []*member     // in no order
	emptySince   cc.Time       // when the last member left
	baseRTT      time.Duration // least round trip, without the queue that other paths saw at first; 0: no sample
	learnUntil   cc.Time       // until then baseRTT is the average of samples without the queue
	learnSamples time.Duration // number of these samples
	scale        float64       // round trip of the reference over this one's; 0: they are alike
	hostIndex    int           // in Manager.hosts; the manager's mutex guards it

	queue atomic.Pointer[hostQueue] // shared by all paths to the host; nil: no group receives from it
}

// routeMember makes p the path of m's bytes.
func (p *path) routeMember(m *member) {
	m.path, m.pathIndex = p, len(p.members)
	p.members = append(p.members, m)
}

// unrouteMember takes m off p.
func (p *path) unrouteMember(m *member, now cc.Time) {
	last := len(p.members) - 1
	p.members[m.pathIndex] = p.members[last]
	p.members[m.pathIndex].pathIndex = m.pathIndex
	p.members[last] = nil
	p.members = p.members[:last]
	p.emptySince = now
}

// isFar reports whether p's round trips differ from those of the reference.
func (p *path) isFar() bool { return p.scale != 0 }

// toReference returns what n bytes on p count in the group's window, rounded up.
func (p *path) toReference(n cc.Bytes) cc.Bytes {
	if !p.isFar() {
		return n
	}
	return cc.Bytes(math.Ceil(float64(n) * p.scale))
}

// fromReference returns how many bytes on p count as n in the group's window. It may be one too many, so that a whole
// segment that fits still does.
func (p *path) fromReference(n cc.Bytes) cc.Bytes {
	if !p.isFar() || n <= 0 {
		return n
	}
	return cc.Bytes(min(float64(n+1)/p.scale, float64(cc.MaxCwnd)))
}

// paths are the paths of a group.
type paths struct {
	all          []*path
	reference    *path         // the algorithm sees its round trips; nil: no sample since the algorithm started
	queueDelay   time.Duration // newest queueing delay of a member
	queueDelayAt cc.Time       // when that was seen
}

// addPathRTT takes in a round trip on p and returns what it would have been on the reference. changed reports whether
// bytes on p count differently from now on. srtt is that of the reference.
func (s *paths) addPathRTT(now cc.Time, p *path, rtt, srtt time.Duration) (seen time.Duration, changed bool) {
	rtt = max(rtt, time.Microsecond) // clocks are coarse, and the result is a divisor
	switch {
	case s.reference == nil:
		s.reference, p.baseRTT = p, cmp.Or(min(p.baseRTT, rtt), rtt)
	case p.baseRTT == 0 || now < p.learnUntil:
		s.learnBase(now, p, rtt)
	default:
		p.baseRTT = min(p.baseRTT, rtt)
	}
	if now >= p.learnUntil {
		s.queueDelay, s.queueDelayAt = rtt-p.baseRTT, now
	}
	changed = s.updateScale(p, srtt)
	if p.isFar() {
		rtt = max(rtt-p.baseRTT+s.reference.baseRTT, time.Microsecond)
	}
	return rtt, changed
}

// learnBase takes in one of p's first round trips. Members on other paths may know the queue in it: the base is the
// average of what samples exceed that queue by, because they see it at another moment. If the others are silent,
// the sample itself is the base.
func (s *paths) learnBase(now cc.Time, p *path, rtt time.Duration) {
	if p.baseRTT == 0 {
		p.learnUntil = now.Add(learnRTTs * rtt)
	}
	base := max(rtt-s.queueDelay, rtt/8)
	if now.Sub(s.queueDelayAt) > max(rtt, s.queueDelay) {
		base, p.learnUntil = rtt, now
	}
	p.learnSamples++
	p.baseRTT = min(p.baseRTT+(base-p.baseRTT)/p.learnSamples, rtt)
}

// updateScale computes how bytes on p count and reports whether that has changed.
func (s *paths) updateScale(p *path, srtt time.Duration) bool {
	if p == s.reference || p.baseRTT == 0 {
		return false
	}
	scale := 0.0
	if ratio := float64(p.baseRTT) / float64(s.reference.baseRTT); ratio > alikeRatio || ratio < 1/alikeRatio {
		queue := max(0, srtt-s.reference.baseRTT)
		scale = float64(s.reference.baseRTT+queue) / float64(p.baseRTT+queue)
	}
	if scale == p.scale || scale != 0 && math.Abs(scale-p.scale) <= rescaleStep*p.scale {
		return false
	}
	p.scale = scale
	return true
}

// setReference makes p the reference. It is called when an algorithm starts that has seen nothing of the other paths.
func (s *paths) setReference(p *path, srtt time.Duration) {
	s.reference = nil
	if p.baseRTT > 0 {
		s.reference = p
	}
	for _, each := range s.all {
		each.scale = 0
		if s.reference != nil {
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

// plainAddr returns a host's address in the form in which paths and hints are compared.
func plainAddr(host netip.Addr) netip.Addr { return host.Unmap().WithZone("") }

// hostQueue is the queue on the way to a host, as seen by the flows that send there and know the queue on the way
// back. Flows that receive from the host have it on their way back: their acknowledgements wait in it, and the kernel
// shows them nothing of the peer's clock.
type hostQueue struct {
	mu         sync.Mutex       // taken after a group's
	newestAt   cc.Time          // of the newest delay; 0: there was none
	spanStart  cc.Time          // when the present span began
	leastDelay [2]time.Duration // in the present span and in the one before
}

// queueSpan is the span over which a hostQueue keeps the least delay, and the one before it. Round trips that a
// receiver's kernel reports lag a little behind a queue that grows. Subtracting more than they contain would hide a
// queue on the way from the host. With longer spans uploads lose half of their rate when the download's queue runs
// empty.
const queueSpan = 15 * time.Millisecond

// addDelay takes in a queueing delay.
func (q *hostQueue) addDelay(now cc.Time, delay time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.newestAt = now
	switch passed := now.Sub(q.spanStart); {
	case passed >= 2*queueSpan:
		q.spanStart, q.leastDelay = now, [2]time.Duration{delay, delay}
	case passed >= queueSpan:
		q.spanStart, q.leastDelay = now, [2]time.Duration{delay, q.leastDelay[0]}
	default:
		q.leastDelay[0] = min(q.leastDelay[0], delay)
	}
}

// recentLeast returns the least queueing delay of the last two spans; false: none was seen within a time. A nil queue
// has none.
func (q *hostQueue) recentLeast(now cc.Time, within time.Duration) (time.Duration, bool) {
	if q == nil {
		return 0, false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return min(q.leastDelay[0], q.leastDelay[1]), q.newestAt > 0 && now.Sub(q.newestAt) <= within
}
