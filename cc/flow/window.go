package flow

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// window is the congestion window of a group: the algorithm that decides it, what the algorithm learns, and what keeps
// its control lower. It knows nothing of how the window is shared. The group's mutex guards it.
type window struct {
	key      string                           // of the group, for the manager
	name     string                           // Terms.Group of all members
	spec     cc.Spec                          // of the algorithm
	params   cc.Params                        // of the algorithm
	receives bool                             // the members' bytes come here; the window is the one we advertise
	seed     uint64                           // of the algorithm's randomness
	timers   *timers                          // of the group's shard
	timer    timer                            // of the group
	onWake   func(number uint64, now cc.Time) // called by cc.Config.Wake; number: of the algorithm, as startCount
	emit     func(Event)                      // sees every event of the algorithm, outside all locks; nil: not traced

	algorithm        cc.Algorithm // nil before the first event and after saveWindow
	control          cc.Control   // of the algorithm, lowered by caps
	mss              cc.Bytes     // of the algorithm
	startedAt        cc.Time      // when the algorithm was built
	startCount       uint64       // how many have been built
	deliveredAtStart cc.Bytes     // delivered.total then: the algorithm counts from there
	initialCwnd      cc.Bytes     // for the next algorithm; 0: the usual one
	ssthresh         cc.Bytes     // for the next algorithm: the path is known to carry this window; 0: not known
	idle             idleness
	caps             caps
	hints            hints
	passing          passing

	members     []*member // in no order
	weights     cc.Bytes  // sum over members
	followers   []*member // the part of members that follow
	paths       paths
	inflight    cc.Bytes // sum of member.counted
	aboveFloors int      // number of members with aboveFloor
	wanting     int      // number of members with want > 0
	movedPart   float64  // part of the window that members took to other groups within a timeout after movedAt
	movedAt     cc.Time

	rtt          rttEstimator // as on the reference path
	delivered    delivery
	deliveryRate cc.Rate // newest sample; 0: none
	oneWayKnown  bool    // the newest acknowledgement's queue on the way back is known
	lossEpoch    uint64  // number of loss events so far
	lossEpochAt  cc.Time // when the newest began

	cwndFullAt    cc.Time // when the window last cut a grant short, or kept bytes waiting in a transport; 0: never
	limitedBelow  bool    // the transport or the receiver, not the window, holds bytes back
	allSatisfied  bool    // at the last division, all that contended had all that their terms allow
	needsDivision bool    // the window, or what members want, has changed since the last division
}

// scheduleTick schedules the group's onTimer, unless it is due earlier.
func (w *window) scheduleTick(at cc.Time) { w.timers.scheduleAt(&w.timer, at) }

// countInflight updates what m's bytes count in the window. Bytes that wait for the peer to open its own window load
// no path, so they must not keep other members from sending.
func (w *window) countInflight(m *member) {
	before := m.counted
	m.counted = m.path.toReference(m.inflight - m.sampler.rwndBlocked)
	w.inflight += m.counted - before
	if overflow := m.counted > m.leastWindow(); overflow != m.aboveFloor {
		m.aboveFloor = overflow
		if overflow {
			w.aboveFloors++
		} else {
			w.aboveFloors--
		}
	}
}

// countInflightOf calls countInflight for each of members.
func (w *window) countInflightOf(members []*member) {
	for _, m := range members {
		w.countInflight(m)
	}
}

// countSent counts n bytes of m in flight that leave now.
func (w *window) countSent(m *member, now cc.Time, n cc.Bytes) {
	granule := max(m.segmentSize(), w.control.Cwnd/(ledgerChunks/2))
	m.sampler.addSent(n, roundUp(min(granule, cc.MaxCwnd/ledgerChunks), m.segmentSize()), w.sentState(now))
	w.countInflight(m)
}

// sentState returns the state of the group for the record of bytes that leave now.
func (w *window) sentState(now cc.Time) chunk {
	if w.inflight == 0 {
		w.delivered.restartMeasuring(now)
	}
	return chunk{
		sent: cc.Sent{
			At:          now,
			DeliveredAt: w.delivered.deliveredAt,
			Cwnd:        w.control.Cwnd,
			Inflight:    w.inflight,
			Delivered:   w.delivered.total,
			AppLimited:  w.delivered.appLimitedUntil != 0,
		},
		firstSentAt: w.delivered.firstSentAt,
	}
}

// pathSRTT returns the smoothed round trip on m's own path.
func (w *window) pathSRTT(m *member) time.Duration {
	if m.path.isFar() && m.rtt.srtt > 0 {
		return m.rtt.srtt
	}
	return w.rtt.srtt
}

// pathMinRTT returns the least round trip on m's own path.
func (w *window) pathMinRTT(m *member) time.Duration {
	if m.path.isFar() {
		return m.path.baseRTT
	}
	return w.rtt.min
}

// addRTTSample takes in a round trip of m, and returns what it would have been on the reference path.
func (w *window) addRTTSample(m *member, now cc.Time, rtt time.Duration) time.Duration {
	rtt, changed := w.paths.addPathRTT(now, m.path, rtt, w.rtt.srtt)
	if changed {
		w.countInflightOf(m.path.members)
	}
	before := w.rtt.srtt
	w.rtt.addSample(rtt)
	// Rates and bytes on far paths are now worth more or less of the window.
	w.needsDivision = w.needsDivision || changed || w.rtt.srtt != before
	return rtt
}

// setReferencePath makes p the reference path, and counts bytes in flight accordingly.
func (w *window) setReferencePath(p *path) {
	w.paths.setReference(p, w.rtt.srtt)
	w.countInflightOf(w.members)
}

// changePath moves m to another path of the group.
func (w *window) changePath(m *member, now cc.Time, p *path) {
	m.path.unrouteMember(m, now)
	p.routeMember(m)
	w.countInflight(m)
}

// pathInUse reports whether bytes of the group go along p. A group without members waits for all paths that it
// remembers.
func (w *window) pathInUse(p *path) bool { return len(p.members) > 0 || len(w.members) == 0 }

// startAlgorithm builds the algorithm if there is none. It waits for the first event, because only then the segment
// size is known.
func (w *window) startAlgorithm(now cc.Time) {
	if w.algorithm != nil {
		return
	}
	w.mss = cc.DefaultMSS
	for _, m := range w.members {
		if m.last.MSS > 0 {
			w.mss = m.last.MSS
			break
		}
	}
	initial := w.initialCwnd
	switch {
	case initial > 0:
	case w.receives:
		initial = firstReceive
	default:
		initial = cc.InitialCwndPackets * w.mss
	}
	w.startedAt, w.deliveredAtStart = now, w.delivered.total
	w.startCount++
	number := w.startCount // onWake does nothing once another algorithm is built
	cfg := cc.Config{
		MSS: w.mss, InitialCwnd: initial, Ssthresh: w.ssthresh, Params: w.params, Receives: w.receives,
		Rand: rand.New(rand.NewPCG(w.seed, 0)), Wake: func(now cc.Time) { w.onWake(number, now) },
	}
	if len(w.members) > 0 {
		first := w.members[0]
		cfg.Ends.To = netip.AddrPortFrom(first.path.host, 0)
		if first.terms.Ends != nil {
			cfg.Ends = *first.terms.Ends
		}
	}
	w.algorithm = w.spec.New(cfg)
	w.adoptControl(now)
}

// closeAlgorithm releases the algorithm, if there is one.
func (w *window) closeAlgorithm() {
	if w.algorithm != nil {
		cc.Close(w.algorithm)
		w.algorithm = nil
	}
}

// tickAlgorithm calls OnTick and adopts the control.
func (w *window) tickAlgorithm(now cc.Time) Event {
	state := w.algorithmState(now)
	w.algorithm.OnTick(state)
	w.adoptControl(now)
	return w.makeEvent(nil, KindTick, state, 0, 0)
}

// adoptControl takes over the algorithm's control after an event at now, and lowers it by caps.
func (w *window) adoptControl(now cc.Time) {
	before := w.control
	w.control = w.algorithm.Control()
	if w.control.NextTick != 0 {
		w.scheduleTick(max(w.control.NextTick, now.Add(leastTick)))
	}
	w.applyCaps(now)
	w.needsDivision = w.needsDivision || w.control.Cwnd != before.Cwnd || w.control.PacingRate != before.PacingRate
}

// reapplyCaps applies caps again, because hints grow old between the algorithm's events. It reports whether it had to:
// false if nothing caps the control.
func (w *window) reapplyCaps(now cc.Time) bool {
	if w.algorithm == nil || !w.caps.binds && w.caps.hintCap == 0 {
		return false
	}
	w.adoptControl(now)
	return true
}

// algorithmState returns what the algorithm may know.
func (w *window) algorithmState(now cc.Time) cc.State {
	s := cc.State{
		Now:           now,
		MSS:           w.mss,
		Inflight:      w.ownInflight(),
		Delivered:     w.delivered.total - w.deliveredAtStart,
		EdgeDelivered: cc.Bytes(w.delivered.edgeTotal.Load()),
		SRTT:          w.rtt.srtt,
		RTTVar:        w.rtt.rttvar,
		MinRTT:        w.rtt.min,
		CwndLimited:   w.cwndLimited(),
		OneWay:        w.oneWayKnown,
		RivalRate:     w.passing.rateAt(now),
	}
	if w.hints.known {
		s.Hint = &w.hints.believed
	}
	return s
}

// ownInflight returns what the window has put in flight. Bytes that only the members' floors keep in flight are left
// out: an algorithm cannot take them back, and one that waits for them to go (BBR's ProbeRTT) would wait forever.
func (w *window) ownInflight() cc.Bytes {
	switch {
	case w.inflight <= w.control.Cwnd:
		return w.inflight
	case w.aboveFloors > 0:
		return w.inflight
	}
	return w.control.Cwnd
}

// cwndLimited reports whether the window held the sender back when the newest delivered byte left, a round trip ago.
// It did not if bytes pile up in the transport, if a cap left less, or if all members now have all that their terms
// allow. Otherwise the window would go on growing for a round trip, and swing once it meets the end of the path.
func (w *window) cwndLimited() bool {
	return w.cwndFullAt != 0 && !w.limitedBelow && !w.caps.binds && !w.allSatisfied &&
		w.cwndFullAt >= w.delivered.firstSentAt
}

// updateAppLimited makes rate samples count as app-limited until what is in flight has arrived, if the window has room
// that no member wants, or that a cap does not let them use.
func (w *window) updateAppLimited() {
	if w.delivered.total > w.delivered.appLimitedUntil {
		w.delivered.appLimitedUntil = 0
	}
	if !w.caps.binds && (w.wanting > 0 || w.inflight+w.mss > w.control.Cwnd) {
		return
	}
	w.delivered.appLimitedUntil = max(w.delivered.total+w.inflight, 1)
}

// sinceStart returns s with Delivered counted from the start of the algorithm.
func (w *window) sinceStart(s cc.Sent) cc.Sent {
	s.Delivered = max(0, s.Delivered-w.deliveredAtStart)
	return s
}

// lossEpochStart returns when the newest lost byte left, and begins a loss event if this is a new one. The transport
// hides that time: it is a round trip ago, unless the hole of an earlier loss is still open. Until all that had been
// sent when an event began has arrived, losses belong to that event. It is one event for all members: the same full
// queue drops their packets, though the last of them may learn of it more than a round trip after the first. A timeout
// makes the transport send everything again (RFC 6582 §3.2), so it begins the event anew for its flow.
func (w *window) lossEpochStart(m *member, delta reportDelta) cc.Time {
	now := m.last.At
	if m.isRecovering() {
		since := m.lossEpochAt
		if delta.timeouts > 0 {
			m.recoveryPoint, m.lossEpochAt = m.sentOffset(), now
		}
		return since
	}
	w.lossEpoch++
	w.lossEpochAt = now
	m.joinLossEpoch(w.lossEpoch, now)
	return max(1, now.Add(-w.pathSRTT(m)))
}

// makeAck returns the event for newly delivered bytes of m. followed is the number of followers' bytes delivered along
// with them. The event includes those: otherwise the rate would be too low for the path, and the window would shrink.
func (w *window) makeAck(m *member, delta reportDelta) (ev cc.Ack, followed cc.Bytes) {
	now := m.last.At
	sent, rtt, rate := m.takeDelivered(delta, &w.delivered, w.pathMinRTT(m))
	followed = w.acknowledgeFollowers(now, sent.At)
	reverse, oneWay := m.oneWayDelays.addReading(m.last.Peer, now, rtt, m.rtt.min)
	if rtt > 0 {
		rtt = w.addRTTSample(m, now, rtt)
		reverse, oneWay = w.findReverseQueue(m, now, max(0, rtt-w.rtt.min), reverse, oneWay)
		m.reverseQueue, m.oneWayKnown = reverse, oneWay
	}
	w.oneWayKnown = oneWay
	if rate > 0 {
		w.deliveryRate = rate
	}
	ev = cc.Ack{
		Acked: delta.acked + followed, Marked: min(delta.marked, delta.acked), RTT: rtt, DeliveryRate: rate,
		Sent: w.sinceStart(sent), L4S: m.last.L4S, ReverseQueue: reverse,
	}
	ev.State = w.algorithmState(now)
	w.checkHint(&ev)
	return ev, followed
}

// findReverseQueue returns how much of queueing, a round trip's delay above the least, was on the way back, and
// whether that is known. reverse is what the peer's clock says of the way from the peer. That is the way of
// acknowledgements for a flow that sends, and of data for a flow that receives.
func (w *window) findReverseQueue(
	m *member, now cc.Time, queueing, reverse time.Duration, oneWay bool,
) (back time.Duration, known bool) {
	reverse = min(reverse, queueing)
	shared := m.path.queue.Load()
	switch {
	case w.receives && oneWay: // data comes from the peer, and our acknowledgements go to it
		return queueing - reverse, true
	case w.receives:
		there, known := shared.recentLeast(now, 2*m.rtt.srtt)
		return min(there, queueing), known
	case oneWay && shared != nil:
		shared.addDelay(now, queueing-reverse)
	}
	return reverse, oneWay
}

// algorithmInternals returns the internals that the algorithm shows; zeros: none.
func (w *window) algorithmInternals() cc.Internals {
	if a, ok := w.algorithm.(cc.Inspector); ok {
		return a.Inspect()
	}
	return cc.Internals{}
}

// makeEvent describes what the algorithm has just learnt; m is nil for a tick. It returns the zero Event if not
// traced.
func (w *window) makeEvent(m *member, kind Kind, s cc.State, rtt time.Duration, n cc.Bytes) Event {
	if w.emit == nil {
		return Event{}
	}
	e := Event{
		Kind: kind, Algorithm: w.spec.Name, State: s, RTT: rtt, Bytes: n, Control: w.control,
		Internals: w.algorithmInternals(),
	}
	e.State.Hint = nil // the group will change it
	if m != nil {
		e.Flow, e.Group = m.id, m.terms.Group
	}
	return e
}

// Kind is the kind of an Event.
type Kind string

// The kinds of events that an algorithm sees.
const (
	KindAck  Kind = "ack"
	KindLoss Kind = "loss"
	KindTick Kind = "tick"
)

// Event is one thing that an algorithm learnt, and what it answered.
type Event struct {
	Kind      Kind
	Flow      uint64 // Snapshot.ID; 0: the whole group
	Group     string // Terms.Group; empty: a tick
	Algorithm string
	State     cc.State      // without Hint
	RTT       time.Duration // sample of the acknowledgement; 0: none
	Reverse   time.Duration // part of RTT: the queue on the way back; 0: none, or not known
	Bytes     cc.Bytes      // newly acknowledged or lost
	Control   cc.Control
	Internals cc.Internals // in the order of the algorithm's Spec; all 0 if it shows none
}

// caps are what keeps a group's control below what its algorithm asks for: a maximum rate that all members have, and a
// part (Terms.HintCap) of the capacity that a fresh hint states.
type caps struct {
	hintCaps map[float64]int    // number of members with each Terms.HintCap
	hintCap  float64            // the least of them; 0: no member has one
	maxRates map[*rateLimit]int // number of members with each maximum rate

	binds     bool          // the control is below what the algorithm asks for
	rateBinds bool          // because of the maximum rate: parts of the window are parts of that rate
	hintBinds bool          // because of a hint
	burstTime time.Duration // sending time that pacers may accumulate; 0: the usual
}

// countCaps counts the caps in m's terms.
func (c *caps) countCaps(m *member) {
	if m.terms.HintCap > 0 {
		if c.hintCaps == nil {
			c.hintCaps = map[float64]int{}
		}
		c.hintCaps[m.terms.HintCap]++
	}
	if m.maxRate != nil {
		if c.maxRates == nil {
			c.maxRates = map[*rateLimit]int{}
		}
		c.maxRates[m.maxRate]++
	}
	c.updateLeastHintCap()
}

// uncountCaps undoes countCaps. Call it before the terms of m change.
func (c *caps) uncountCaps(m *member) {
	decrementCount(c.hintCaps, m.terms.HintCap)
	decrementCount(c.maxRates, m.maxRate)
	c.updateLeastHintCap()
}

// decrementCount takes one off the count of key, if it is counted.
func decrementCount[K comparable](counts map[K]int, key K) {
	if n := counts[key]; n > 1 {
		counts[key] = n - 1
	} else if n == 1 {
		delete(counts, key)
	}
}

// updateLeastHintCap sets hintCap to the least of hintCaps.
func (c *caps) updateLeastHintCap() {
	c.hintCap = 0
	for each := range c.hintCaps {
		if c.hintCap == 0 || each < c.hintCap {
			c.hintCap = each
		}
	}
}

// commonMaxRate returns the maximum rate that all members have; nil: they have none, or different ones.
func (w *window) commonMaxRate() *rateLimit {
	for l, n := range w.caps.maxRates {
		if n == len(w.members) {
			return l
		}
	}
	return nil
}

// applyCaps lowers the control to a maximum rate that all members have, and to their part of the capacity that a fresh
// hint states. The algorithm learns that its window did not bind.
func (w *window) applyCaps(now cc.Time) {
	w.capToMaxRate()
	w.caps.binds = w.caps.rateBinds
	w.capToHint(now)
}

// capToMaxRate keeps the control to the maximum rate that all members have. The rate binds once the window exceeds
// what the rate has in flight between two visits of a busy pacer, plus what waits to be acknowledged together. The
// window then only serves to divide the rate.
func (w *window) capToMaxRate() {
	w.caps.rateBinds, w.caps.burstTime = false, 0
	limit := w.commonMaxRate()
	if limit == nil {
		return
	}
	asked, rate := w.control, limit.rate()
	slack := w.segmentsOfEach(floorSegments + ackedTogether)
	w.caps.rateBinds = w.rtt.srtt > 0 && asked.Cwnd > rate.BytesIn(w.rtt.srtt+pacerBurst)+slack
	// A window that allows less than the rate would only be slowed down by pacing.
	if !w.caps.rateBinds && asked.PacingRate == 0 {
		return
	}
	if w.capToRate(rate, w.rtt.srtt+spareWindow, slack); asked.PacingRate != w.control.PacingRate {
		w.caps.burstTime = limitBurst
	}
}

// spareWindow is for how long beyond a round trip the maximum rate may be sent before the window binds. It makes up
// for late acknowledgements.
const spareWindow = 100 * time.Millisecond

// capToRate keeps the control to a rate: the rate itself and, once a round trip is known, what it has in flight in d
// plus slack as a window.
func (w *window) capToRate(rate cc.Rate, d time.Duration, slack cc.Bytes) {
	w.control.PacingRate = lesserRate(w.control.PacingRate, rate)
	if w.rtt.srtt > 0 {
		w.control.Cwnd = min(w.control.Cwnd, rate.BytesIn(d)+slack)
	}
}

// segmentsOfEach returns the bytes of a number of segments for each member.
func (w *window) segmentsOfEach(each cc.Bytes) cc.Bytes {
	return each * w.mss * cc.Bytes(max(1, len(w.members)))
}

// capToHint keeps the control below the part of a fresh hint's capacity, in a window without a queue. Two segments of
// each member may leave while the hint is fresh, even if it states no capacity. Without them a late acknowledgement
// would leave the path idle, and a flow paced at next to nothing would not notice new capacity. The timer ends the
// cap.
func (w *window) capToHint(now cc.Time) {
	w.caps.hintBinds = false
	if w.caps.hintCap == 0 || w.hints.believed.Capacity == 0 || !w.hints.isFresh(now, w.rtt.srtt) {
		return
	}
	asked := w.control
	slack := w.segmentsOfEach(floorSegments)
	rate := max(cc.Rate(w.caps.hintCap*float64(w.hints.believed.Capacity)), cc.RateOf(slack, w.hints.lifetime(w.rtt.srtt)))
	w.capToRate(rate, w.rtt.min, slack)
	// If the window itself is small enough, pacing only spreads what it allows.
	w.caps.hintBinds = asked.Cwnd > w.control.Cwnd
	w.caps.binds = w.caps.binds || w.caps.hintBinds || w.rtt.srtt == 0 && asked.PacingRate != w.control.PacingRate
	w.scheduleTick(w.hints.newest.At.Add(w.hints.lifetime(w.rtt.srtt) + 1))
}

// addHint takes in a hint, unless the group knows a newer one. others is the rate delivered to the same host by other
// groups.
func (w *window) addHint(h cc.Hint, others cc.Rate) {
	if w.hints.keepHint(h, others) && w.caps.hintCap > 0 { // the cap must not wait for an event
		w.scheduleTick(h.At)
	}
}

// checkHint checks the newest hint against an acknowledgement, without the queue on the way back.
func (w *window) checkHint(a *cc.Ack) {
	if !w.hints.isFresh(a.Now, w.rtt.srtt) {
		w.hints.check.intervalStart = 0
		return
	}
	changed := w.hints.check.onAck(hintEvidence{
		now: a.Now, forwardRTT: a.RTT - a.ReverseQueue, srtt: a.SRTT, usedPart: w.hintPart(),
		delivered: w.delivered.total, unbound: w.isUnboundByHint(),
	})
	if changed {
		w.hints.believed = w.hints.check.correctedHint(w.hints.newest)
		a.State.Hint = &w.hints.believed
	}
}

// isUnboundByHint reports whether something other than hints keeps the group from sending more: the application, the
// receiver, the transport, or an algorithm that knows of no hints.
func (w *window) isUnboundByHint() bool {
	idle := w.wanting == 0 && w.inflight+w.mss <= w.control.Cwnd
	return idle || w.limitedBelow || !w.caps.hintBinds && !slices.Contains(w.spec.Needs, cc.NeedsHints)
}

// hintPart returns the part of what hints state that the group tries to use.
func (w *window) hintPart() float64 {
	if w.caps.hintBinds {
		return w.caps.hintCap
	}
	if part := w.params["usable_fraction"]; part > 0 { // a parameter of NACC
		return part
	}
	return 1
}

// takeHintNews returns a change in the doubt of hints that has not been reported yet; false: there is none.
func (w *window) takeHintNews() (news HintNews, ok bool) {
	k := &w.hints.check
	doubt := k.certainDoubt()
	if doubt == k.reported {
		return HintNews{}, false
	}
	k.reported = doubt
	return HintNews{w.name, w.spec.Name, doubt, k.claimed, k.deliveredRate, k.believedRate(k.claimed)}, true
}

// unpacedWindow returns the part of the window that the pacing rate lets no member fill.
func (w *window) unpacedWindow() cc.Bytes {
	if w.control.PacingRate == 0 || w.rtt.srtt == 0 {
		return 0
	}
	return max(0, w.control.Cwnd-w.control.PacingRate.BytesIn(w.rtt.srtt))
}

// acknowledgeFollowers counts what followers had sent by sentBy as arrived, because a byte of another member that left
// then has arrived, and both wait in one queue. It returns the number of the followers' bytes.
func (w *window) acknowledgeFollowers(now, sentBy cc.Time) (n cc.Bytes) {
	for _, m := range w.followers {
		arrived := m.ackSentBy(now, sentBy)
		w.delivered.addDelivered(arrived)
		w.countInflight(m)
		n += arrived
	}
	return n
}

// idleness is how long a group has been idle, and what it remembers once its algorithm is gone.
type idleness struct {
	since cc.Time // when the last byte arrived with no member wanting to send; 0: a member is sending
	saved Dormant // the window when the algorithm was released; Cwnd is 0: nothing is saved
}

// Dormant is a window without its algorithm: what a group remembers after a long idle period, and what another process
// needs to go on with a flow. The next algorithm starts from it. The zero value is nothing.
type Dormant struct {
	Cwnd    cc.Bytes      // of the whole group; the next algorithm has it as ssthresh, too
	BaseRTT time.Duration // least round trip of the path that Cwnd counts on; 0: no sample
	Rate    cc.Rate       // newest delivery rate; 0: none
	MSS     cc.Bytes      // payload of a full segment
}

// Memory is the window of a group towards one host, for another edge to start from.
type Memory struct {
	Terms  Terms // Group, Host, Algorithm and Params
	Window Dormant
}

// A group keeps its window for linger after the last byte arrived, or for three retransmission timeouts if those are
// longer, with members or without. What starts then is paced over a round trip: RFC 7661 §4.4.3 keeps a window that
// may not be validated, and wants its bursts mitigated. After that the window halves with each timeout, down to the
// initial one (RFC 2861), and the algorithm is released. With Terms.Restarts this begins at the first timeout. After
// memoryLasts a group without members is forgotten. An algorithm that others know of (cc.Closer) goes with the last
// member.
const (
	linger      = 10 * time.Second
	memoryLasts = 5 * time.Minute
)

// endIdle ends an idle period because a member on path p sends. It reports whether the period was longer than a
// retransmission timeout.
func (w *window) endIdle(p *path, now cc.Time) bool {
	if w.idle.since == 0 {
		return false
	}
	long := now.Sub(w.idle.since) > w.rtt.rto() && w.rtt.srtt > 0
	w.restartFromMemory(p, now)
	w.idle.since = 0
	return long
}

// forgetAfterIdle releases the algorithm of a group that has been idle for longer than lingerTime, and reports whether
// it is released.
func (w *window) forgetAfterIdle(now cc.Time) bool {
	if w.idle.since == 0 || now.Sub(w.idle.since) <= w.lingerTime() {
		return false
	}
	w.saveWindow()
	return true
}

// saveWindow releases the algorithm, if there is one, and remembers its window.
func (w *window) saveWindow() {
	if w.algorithm == nil {
		return
	}
	w.idle.saved = w.currentWindow()
	w.closeAlgorithm()
	w.initialCwnd, w.ssthresh, w.movedPart = 0, 0, 0
	w.control = cc.Control{}
}

// currentWindow returns what would be saved if the algorithm were released now; Cwnd is 0: there is no algorithm. The
// base round trip is the reference path's.
func (w *window) currentWindow() Dormant {
	d := Dormant{Rate: w.deliveryRate, MSS: w.mss}
	if w.algorithm != nil {
		d.Cwnd = w.algorithm.Control().Cwnd
	}
	if w.paths.reference != nil {
		d.BaseRTT = w.paths.reference.baseRTT
	}
	return d
}

// savedWindowOn returns what a flow on path p needs to go on elsewhere at now.
func (w *window) savedWindowOn(p *path, now cc.Time) Dormant {
	d := w.currentWindow()
	if w.idle.saved.Cwnd > 0 {
		d = w.idle.saved
		d.Cwnd = w.rememberedWindow(now)
	}
	d.Cwnd, d.BaseRTT = p.fromReference(d.Cwnd), p.baseRTT
	return d
}

// resumeFrom remembers d, which was in force elsewhere until now, for a member on path p. A window that has an
// algorithm, or a memory of its own, knows more.
func (w *window) resumeFrom(d Dormant, p *path, now cc.Time) {
	if d.Cwnd <= 0 || d.BaseRTT <= 0 || w.algorithm != nil || w.idle.saved.Cwnd > 0 {
		return
	}
	d.Cwnd = min(d.Cwnd, cc.MaxCwnd)
	w.idle = idleness{since: max(now, 1), saved: d}
	w.mss, w.deliveryRate = d.MSS, d.Rate
	if p.baseRTT == 0 {
		p.baseRTT = d.BaseRTT
	}
}

// lingerTime returns how long an idle group keeps its algorithm.
func (w *window) lingerTime() time.Duration {
	if w.restartsAfterIdle() {
		return w.rtt.rto()
	}
	return max(linger, 3*w.rtt.rto())
}

// restartsAfterIdle returns Terms.Restarts of the members.
func (w *window) restartsAfterIdle() bool { return len(w.members) > 0 && w.members[0].terms.Restarts }

// rememberedWindow returns the window with which a group without algorithm would start at now: at least the usual
// initial one, unless the saved window is less.
func (w *window) rememberedWindow(now cc.Time) cc.Bytes {
	idle := now.Sub(w.idle.since) - w.lingerTime()
	halvings := min(max(0, idle/w.rtt.rto()), 62)
	if w.restartsAfterIdle() {
		halvings++ // for the timeout of lingerTime
	}
	return max(w.idle.saved.Cwnd>>halvings, min(w.idle.saved.Cwnd, cc.InitialCwndPackets*w.mss))
}

// restartFromMemory prepares a group without algorithm for a member on path p. The next algorithm starts from what is
// left of the saved window, with the saved window as ssthresh and p's base round trip. A new path starts from nothing.
func (w *window) restartFromMemory(p *path, now cc.Time) {
	w.forgetAfterIdle(now)
	if w.idle.saved.Cwnd == 0 {
		return
	}
	initial, ssthresh := p.fromReference(w.rememberedWindow(now)), p.fromReference(w.idle.saved.Cwnd)
	if p.baseRTT == 0 {
		initial, ssthresh = 0, 0
	}
	w.initialCwnd, w.ssthresh, w.idle.saved = initial, ssthresh, Dormant{}
	w.rtt = rttEstimator{srtt: p.baseRTT, rttvar: p.baseRTT / 2, min: p.baseRTT}
	w.cwndFullAt = 0
	w.setReferencePath(p)
}
