package flow

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// window is one congestion window: the algorithm that decides it, what that algorithm is told, and what keeps
// its limits lower. The group's mutex guards it.
type window struct {
	key      string
	name     string // the Terms.Group of all members
	spec     cc.Spec
	params   cc.Params
	receives bool // members' bytes come here; the window is the peers'
	seed     uint64
	timers   *timers
	timer    timer                            // of the group
	onWake   func(number uint64, now cc.Time) // an algorithm was woken, the number-th of the group
	emit     func(Event)                      // sees every event of the algorithm; nil: nobody does

	alg       cc.Algorithm // nil before the first event, when the segment size is known, and once it is forgotten
	ctl       cc.Control   // alg's limits, as far as caps leave them
	mss       cc.Bytes
	members   []*member        // in no order
	weights   cc.Bytes         // sum of theirs
	datagrams []*datagramShare // beside the members
	rtt       rttEstimator
	paths     paths
	delivered delivery
	rate      cc.Rate  // newest delivery-rate sample
	oneWay    bool     // the newest acknowledgement's way back is known
	inflight  cc.Bytes // sum of what the members count
	overflow  int      // members that have more than their floors in flight
	wanting   int      // members that want more than they have
	lossEpoch uint64   // counts loss events
	lossAt    cc.Time
	changed   bool // the window has, or what members want: divide anew

	cwndFullAt   cc.Time  // when the window last cut a grant short, or kept bytes waiting in a transport
	allContent   bool     // at the last division, all that contended had all that their terms allow
	limitedBelow bool     // the transport or the receiver, not the window, holds bytes back
	started      cc.Time  // when alg was built
	starts       uint64   // how many have been
	base         cc.Bytes // what had been delivered then: alg counts from there
	initial      cc.Bytes // window for alg to start from; 0: the usual one
	ssthresh     cc.Bytes // window that the path is known to carry, for alg to start with; 0: not known
	takenAway    float64  // part of the window that members have taken elsewhere, until a round trip after takenAt
	takenAt      cc.Time
	idle         idleness
	caps         caps
	hints        hints
}

// scheduleTick has the group's onTimer called at a time, unless it is called before.
func (w *window) scheduleTick(at cc.Time) { w.timers.scheduleAt(&w.timer, at) }

// idleness is what a group knows of its own silence.
type idleness struct {
	since cc.Time  // when the last byte arrived and nobody wanted to send; 0: somebody sends
	cwnd  cc.Bytes // the window when the algorithm was forgotten; 0: it is not
}

// caps are what keeps a group's limits below what its algorithm asks for: a maximum
// rate that all members have, and their part of the capacity that a fresh hint tells.
type caps struct {
	within bool // a hint is what keeps the window below what the algorithm asks for

	hintCaps map[float64]int // how many members have which Terms.HintCap
	hintCap  float64         // the least of them; 0: none has one
	maxRates map[*rateLimit]int

	bind      bool          // the limits are below what the algorithm asks for
	rateBound bool          // the maximum rate is why: parts of the window are parts of that rate
	burst     time.Duration // sending time that pacers may accumulate; 0: the usual
}

// countInflight works out anew what m counts in the group's window. Bytes that wait for the
// peer to open its own window load no path, and must not keep the others from theirs.
func (w *window) countInflight(m *member) {
	before := m.counts
	m.counts = m.path.toReference(m.inflight - m.sampler.blocked)
	w.inflight += m.counts - before
	if overflow := m.counts > m.leastWindow(); overflow != m.overflow {
		m.overflow = overflow
		if overflow {
			w.overflow++
		} else {
			w.overflow--
		}
	}
}

// countInflightOf does so for each of some members.
func (w *window) countInflightOf(members []*member) {
	for _, m := range members {
		w.countInflight(m)
	}
}

// noteSent counts n bytes of m in flight that leave now.
func (w *window) noteSent(m *member, now cc.Time, n cc.Bytes) {
	granule := max(m.segmentSize(), w.ctl.Cwnd/(ledgerChunks/2))
	m.sampler.addSent(n, roundUp(min(granule, cc.MaxCwnd/ledgerChunks), m.segmentSize()), w.sentState(now))
	w.countInflight(m)
}

// sentState describes the group to the bytes that leave now.
func (w *window) sentState(now cc.Time) chunk {
	if w.inflight == 0 {
		w.delivered.restartMeasuring(now)
	}
	return chunk{
		sent: cc.Sent{
			At:          now,
			DeliveredAt: w.delivered.at,
			Cwnd:        w.ctl.Cwnd,
			Inflight:    w.inflight,
			Delivered:   w.delivered.total,
			AppLimited:  w.delivered.appLimited != 0,
		},
		first: w.delivered.firstSent,
	}
}

// srtt and leastRTT are the round trips of m's own path.
func (w *window) srtt(m *member) time.Duration {
	if m.path.isFar() && m.rtt.srtt > 0 {
		return m.rtt.srtt
	}
	return w.rtt.srtt
}

func (w *window) leastRTT(m *member) time.Duration {
	if m.path.isFar() {
		return m.path.base
	}
	return w.rtt.min
}

// addRTTSample takes in a round trip of m, and returns what it would have been on the group's
// reference path.
func (w *window) addRTTSample(m *member, now cc.Time, rtt time.Duration) time.Duration {
	rtt, changed := w.paths.addRTTSample(now, m.path, rtt, w.rtt.srtt)
	if changed {
		w.countInflightOf(m.path.members)
	}
	before := w.rtt.srtt
	w.rtt.addSample(rtt)
	w.changed = w.changed || changed || w.rtt.srtt != before // what rates and paths are worth in the window
	return rtt
}

// setReferencePath makes p the reference path.
func (w *window) setReferencePath(p *path) {
	w.paths.setReference(p, w.rtt.srtt)
	w.countInflightOf(w.members)
}

// changePath has m's bytes go along another path of the group.
func (w *window) changePath(m *member, now cc.Time, p *path) {
	m.path.removeMember(m, now)
	p.addMember(m)
	w.countInflight(m)
}

// pathInUse reports whether w's bytes go along p: as long as w has members, theirs do; one
// without members waits for all that it remembers.
func (w *window) pathInUse(p *path) bool { return len(p.members) > 0 || len(w.members) == 0 }

// startAlgorithm builds the algorithm on first use.
func (w *window) startAlgorithm(now cc.Time) {
	if w.alg != nil {
		return
	}
	w.mss = cc.DefaultMSS
	for _, m := range w.members {
		if m.last.MSS > 0 {
			w.mss = m.last.MSS
			break
		}
	}
	initial := w.initial
	switch {
	case initial > 0:
	case w.receives:
		initial = firstReceive
	default:
		initial = cc.InitialCwndPackets * w.mss
	}
	w.started, w.base = now, w.delivered.total
	w.starts++
	cfg := cc.Config{
		MSS: w.mss, InitialCwnd: initial, Ssthresh: w.ssthresh, Params: w.params, Receives: w.receives,
		Rand: rand.New(rand.NewPCG(w.seed, 0)), Wake: w.wakeFunc(),
	}
	if len(w.members) > 0 {
		first := w.members[0]
		cfg.Ends.To = netip.AddrPortFrom(first.path.host, 0)
		if first.terms.Ends != nil {
			cfg.Ends = *first.terms.Ends
		}
	}
	w.alg = w.spec.New(cfg)
	w.adoptControl(now)
}

// wakeFunc has the algorithm that is about to be built look at what has changed outside it.
func (w *window) wakeFunc() func(cc.Time) {
	number := w.starts
	return func(now cc.Time) { w.onWake(number, now) }
}

// closeAlgorithm drops the algorithm, if there is one.
func (w *window) closeAlgorithm() {
	if w.alg != nil {
		cc.Close(w.alg)
		w.alg = nil
	}
}

// tickAlgorithm has the algorithm's OnTick called.
func (w *window) tickAlgorithm(now cc.Time) Event {
	state := w.algorithmState(now)
	w.alg.OnTick(state)
	w.adoptControl(now)
	return w.makeEvent(nil, KindTick, state, 0, 0)
}

// adoptControl takes over the algorithm's limits after it has seen an event at now.
func (w *window) adoptControl(now cc.Time) {
	before := w.ctl
	w.ctl = w.alg.Control()
	if w.ctl.NextTick != 0 {
		w.scheduleTick(max(w.ctl.NextTick, now.Add(leastTick)))
	}
	w.applyCaps(now)
	w.changed = w.changed || w.ctl.Cwnd != before.Cwnd || w.ctl.PacingRate != before.PacingRate
}

// reapplyCaps applies what has become of the caps since the algorithm's last event, and
// reports whether there may be any.
func (w *window) reapplyCaps(now cc.Time) bool {
	if w.alg == nil || !w.caps.bind && w.caps.hintCap == 0 {
		return false
	}
	w.adoptControl(now)
	return true
}

// algorithmState is what the algorithm may know.
func (w *window) algorithmState(now cc.Time) cc.State {
	s := cc.State{
		Now:           now,
		MSS:           w.mss,
		Inflight:      w.ownInflight(),
		Delivered:     w.delivered.total - w.base,
		EdgeDelivered: cc.Bytes(w.delivered.edge.Load()),
		SRTT:          w.rtt.srtt,
		RTTVar:        w.rtt.rttvar,
		MinRTT:        w.rtt.min,
		CwndLimited:   w.cwndLimited(),
		OneWay:        w.oneWay,
	}
	if w.hints.known {
		s.Hint = &w.hints.believed
	}
	return s
}

// ownInflight is what the algorithm's window has put in flight. Where only the members'
// floors keep more there, that is not the algorithm's to take back: one that waits for
// it to go (BBR's ProbeRTT) would wait for ever.
func (w *window) ownInflight() cc.Bytes {
	switch {
	case w.inflight <= w.ctl.Cwnd:
		return min(w.inflight+w.datagramBytes(false), w.ctl.Cwnd)
	case w.overflow > 0:
		return w.inflight
	}
	return w.ctl.Cwnd
}

// cwndLimited tells whether the window was what held the sender back since the newest
// delivered byte left, a round trip ago. Bytes that pile up in the transport mean that
// it was not; nor was it where a cap leaves less, or where by now all members have all
// that their terms allow: the window would go on growing for a round trip, and fall into
// swings where it then meets the end of the path.
func (w *window) cwndLimited() bool {
	return w.cwndFullAt != 0 && !w.limitedBelow && !w.caps.bind && !w.allContent &&
		w.cwndFullAt >= w.delivered.firstSent
}

// noteAppLimited marks what is in flight as too little to probe the path, when there is
// room in the window and nobody wants it, or a cap does not let it be used.
func (w *window) noteAppLimited() {
	if w.delivered.total > w.delivered.appLimited {
		w.delivered.appLimited = 0
	}
	if !w.caps.bind && (w.wanting > 0 || w.inflight+w.mss > w.memberWindow()) {
		return
	}
	w.delivered.appLimited = max(w.delivered.total+w.inflight, 1)
}

// sinceStart is s as the algorithm may see it, which counts from its own start.
func (w *window) sinceStart(s cc.Sent) cc.Sent {
	s.Delivered = max(0, s.Delivered-w.base)
	return s
}

// lossEpochStart says when the newest lost byte left. The transport hides it: a round trip
// ago, unless the hole of an earlier loss is still open. Then it is one event until all
// that had been sent when it began has arrived; and one for all members, whose packets
// the same full queue drops, though the last of them learns of it more than a round trip
// later than the first. A timeout has all that was sent until then sent again (RFC 6582
// §3.2): it begins the event anew for its flow.
func (w *window) lossEpochStart(m *member, n news) cc.Time {
	now := m.last.At
	if m.isRecovering() {
		since := m.lossAt
		if n.timeouts > 0 {
			m.recover, m.lossAt = m.sentOffset(), now
		}
		return since
	}
	w.lossEpoch++
	w.lossAt = now
	m.noteLossEpoch(w.lossEpoch, now)
	return max(1, now.Add(-w.srtt(m)))
}

// makeAck composes the event for newly delivered bytes, and for those of datagrams beside them.
func (w *window) makeAck(m *member, n news) (ev cc.Ack, beside cc.Bytes) {
	now := m.last.At
	beside = w.datagramsDelivered(now, n.acked)
	sent, rtt, rate := m.takeDelivered(n, &w.delivered, beside, w.leastRTT(m))
	reverse, oneWay := m.ways.addReading(m.last.Peer, now, rtt, m.rtt.min)
	if rtt > 0 {
		rtt = w.addRTTSample(m, now, rtt)
		reverse, oneWay = w.reverseQueue(m, now, max(0, rtt-w.rtt.min), reverse, oneWay)
		m.reverse, m.oneWay = reverse, oneWay
	}
	w.oneWay = oneWay
	if rate > 0 {
		w.rate = rate
	}
	ev = cc.Ack{
		Acked: n.acked + beside, Marked: min(n.marked, n.acked), RTT: rtt, DeliveryRate: rate, Sent: w.sinceStart(sent),
		L4S: m.last.L4S, ReverseQueue: reverse,
	}
	ev.State = w.algorithmState(now)
	w.checkHint(&ev)
	return ev, beside
}

// reverseQueue is how much of queueing, a round trip's delay beyond the least, was on the way back,
// if that is known: from the peer's clock, which says that reverse was on the way from it.
func (w *window) reverseQueue(
	m *member, now cc.Time, queueing, reverse time.Duration, oneWay bool,
) (back time.Duration, known bool) {
	reverse = min(reverse, queueing)
	shared := m.path.queue.Load()
	switch {
	case w.receives && oneWay: // data takes the way from it, and our acknowledgements the other
		return queueing - reverse, true
	case w.receives:
		there, known := shared.recentLeast(now, 2*m.rtt.srtt)
		return min(there, queueing), known
	case oneWay && shared != nil:
		shared.addDelay(now, queueing-reverse)
	}
	return reverse, oneWay
}

// algorithmInternals is what w's algorithm shows.
func (w *window) algorithmInternals() cc.Internals {
	if a, ok := w.alg.(cc.Inspector); ok {
		return a.Inspect()
	}
	return cc.Internals{}
}

// makeEvent describes what w's algorithm has just been told.
func (w *window) makeEvent(m *member, kind Kind, s cc.State, rtt time.Duration, n cc.Bytes) Event {
	if w.emit == nil {
		return Event{}
	}
	e := Event{
		Kind: kind, Algorithm: w.spec.Name, State: s, RTT: rtt, Bytes: n, Control: w.ctl,
		Internals: w.algorithmInternals(),
	}
	e.State.Hint = nil // which is the group's to change
	if m != nil {
		e.Flow, e.Group = m.id, m.terms.Group
	}
	return e
}

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
	Reverse   time.Duration // of it, the queue on the way back; 0: none, or not known
	Bytes     cc.Bytes      // newly acknowledged or lost
	Control   cc.Control
	Internals cc.Internals // in the order of the algorithm's Spec; all 0 for one that shows none
}

// addMember counts m's caps.
func (c *caps) addMember(m *member) {
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

// removeMember undoes add. Call it before the terms of m change.
func (c *caps) removeMember(m *member) {
	decrementCount(c.hintCaps, m.terms.HintCap)
	decrementCount(c.maxRates, m.maxRate)
	c.updateLeastHintCap()
}

// decrementCount takes one off the count of key, if there is one.
func decrementCount[K comparable](counts map[K]int, key K) {
	if n := counts[key]; n > 1 {
		counts[key] = n - 1
	} else if n == 1 {
		delete(counts, key)
	}
}

// updateLeastHintCap finds the least HintCap.
func (c *caps) updateLeastHintCap() {
	c.hintCap = 0
	for each := range c.hintCaps {
		if c.hintCap == 0 || each < c.hintCap {
			c.hintCap = each
		}
	}
}

// commonMaxRate is what all members have; nil: they have none, or not the same.
func (w *window) commonMaxRate() *rateLimit {
	for l, n := range w.caps.maxRates {
		if n == len(w.members) {
			return l
		}
	}
	return nil
}

// applyCaps keeps the limits below a maximum rate that all members have, and below their part
// of the capacity that a fresh hint tells, whatever the algorithm asks for. The
// algorithm is told that its window did not bind.
func (w *window) applyCaps(now cc.Time) {
	w.capToMaxRate()
	w.caps.bind = w.caps.rateBound
	w.capToHint(now)
}

// capToMaxRate keeps the limits to the maximum rate that all members have. The rate
// binds once the window is more than the rate has in flight between two visits of a
// busy pacer, with what waits to be acknowledged together. Then the window only serves
// to divide the rate.
func (w *window) capToMaxRate() {
	w.caps.rateBound, w.caps.burst = false, 0
	limit := w.commonMaxRate()
	if limit == nil {
		return
	}
	own, rate := w.ctl, limit.key.rate
	slack := w.segmentsOfEach(floorSegments + ackedTogether)
	w.caps.rateBound = w.rtt.srtt > 0 && own.Cwnd > rate.BytesIn(w.rtt.srtt+pacerBurst)+slack
	if !w.caps.rateBound && own.PacingRate == 0 { // the window is the lesser: pacing would only hold it back
		return
	}
	if w.capToRate(rate, w.rtt.srtt+spareWindow, slack); own.PacingRate != w.ctl.PacingRate {
		w.caps.burst = limitBurst
	}
}

// spareWindow is for how long the rate may be sent beyond a round trip before the
// window binds, where acknowledgements come late.
const spareWindow = 100 * time.Millisecond

// capToRate keeps the limits to a rate: the rate itself, and as a window what it has in
// flight in d, once a round trip is known, and some slack.
func (w *window) capToRate(rate cc.Rate, d time.Duration, slack cc.Bytes) {
	w.ctl.PacingRate = lesserRate(w.ctl.PacingRate, rate)
	if w.rtt.srtt > 0 {
		w.ctl.Cwnd = min(w.ctl.Cwnd, rate.BytesIn(d)+slack)
	}
}

// segmentsOfEach is so many segments of each member.
func (w *window) segmentsOfEach(each cc.Bytes) cc.Bytes {
	return each * w.mss * cc.Bytes(max(1, len(w.members)))
}

// capToHint keeps the limits below the part of a fresh hint's capacity, in a window
// without a queue. Two segments of each member may leave while the hint holds even
// where there is no capacity: without them a late acknowledgement would leave the path
// idle, and a flow paced by next to nothing would not notice when there is some
// capacity again. A hint that grows old frees both by itself.
func (w *window) capToHint(now cc.Time) {
	w.caps.within = false
	if w.caps.hintCap == 0 || w.hints.believed.Capacity == 0 || !w.hints.isFresh(now, w.rtt.srtt) {
		return
	}
	own := w.ctl
	slack := w.segmentsOfEach(floorSegments)
	rate := max(cc.Rate(w.caps.hintCap*float64(w.hints.believed.Capacity)), cc.RateOf(slack, w.hints.lifetime(w.rtt.srtt)))
	w.capToRate(rate, w.rtt.min, slack)
	// A window that is within it has no more in flight than the rate: pacing only spreads that.
	w.caps.within = own.Cwnd > w.ctl.Cwnd
	w.caps.bind = w.caps.bind || w.caps.within || w.rtt.srtt == 0 && own.PacingRate != w.ctl.PacingRate
	w.scheduleTick(w.hints.newest.At.Add(w.hints.lifetime(w.rtt.srtt) + 1))
}

// addHint takes note of a hint, unless g knows a newer one. So much is delivered to other
// groups of its host.
func (w *window) addHint(h cc.Hint, others cc.Rate) {
	if w.hints.addHint(h, others) && w.caps.hintCap > 0 { // which does not wait for an event
		w.scheduleTick(h.At)
	}
}

// checkHint holds the newest hint against an acknowledgement, of which the queue on the
// way back is taken off.
func (w *window) checkHint(a *cc.Ack) {
	if !w.hints.isFresh(a.Now, w.rtt.srtt) {
		w.hints.check.since = 0
		return
	}
	changed := w.hints.check.onAck(acked{
		now: a.Now, forward: a.RTT - a.ReverseQueue, srtt: a.SRTT, uses: w.hintPart(),
		delivered: w.delivered.total, free: w.isUnboundByHint(),
	})
	if changed {
		w.hints.believed = w.hints.check.correctedHint(w.hints.newest)
		a.State.Hint = &w.hints.believed
	}
}

// isUnboundByHint reports whether something other than hints keeps w from sending more: the
// application, the receiver, the transport, or an algorithm that knows of no hints.
func (w *window) isUnboundByHint() bool {
	idle := w.wanting == 0 && w.inflight+w.mss <= w.memberWindow()
	return idle || w.limitedBelow || !w.caps.within && !slices.Contains(w.spec.Needs, cc.NeedsHints)
}

// hintPart is the part of what hints say for which w goes.
func (w *window) hintPart() float64 {
	if w.caps.within {
		return w.caps.hintCap
	}
	if part := w.params["usable_fraction"]; part > 0 { // NACC's
		return part
	}
	return 1
}

// takeHintNews is what is to be told of w's hints, and whether there is anything.
func (w *window) takeHintNews() (news HintNews, is bool) {
	k := &w.hints.check
	doubt := k.certainDoubt()
	if doubt == k.reported {
		return HintNews{}, false
	}
	k.reported = doubt
	return HintNews{w.name, w.spec.Name, doubt, k.told, k.got, k.believedRate(k.told)}, true
}

// memberWindow is what the members may have in flight together: what datagrams use, or wait
// for, of their share is not theirs.
func (w *window) memberWindow() cc.Bytes { return w.ctl.Cwnd - w.datagramBytes(true) }

// unpacedWindow is the part of the window that the pacing rate does not let anybody fill.
func (w *window) unpacedWindow() cc.Bytes {
	if w.ctl.PacingRate == 0 || w.rtt.srtt == 0 {
		return 0
	}
	return max(0, w.ctl.Cwnd-w.ctl.PacingRate.BytesIn(w.rtt.srtt))
}

// datagramBytes is what datagrams have in flight of the window, with those that wait or not.
func (w *window) datagramBytes(waiting bool) cc.Bytes {
	if len(w.datagrams) == 0 {
		return 0
	}
	view := w.datagramWindow()
	var loose, most cc.Bytes
	for _, d := range w.datagrams {
		loose += d.loose
		if waiting {
			loose += d.waiting
		}
		most = max(most, d.shareOfWindow(&view))
	}
	return min(loose, most)
}

// datagramWindow is what the window is to the datagrams beside the members: a pacer may not let these fill it.
func (w *window) datagramWindow() datagramWindow {
	lasts := unknownRTT
	if w.rtt.srtt > 0 {
		lasts = w.rtt.srtt
	}
	return datagramWindow{
		known: w.alg != nil, usable: w.ctl.Cwnd - w.unpacedWindow(), mss: w.mss, lasts: lasts, all: w.datagrams,
	}
}

// retireDatagrams takes datagrams that left a round trip ago as gone.
func (w *window) retireDatagrams(now cc.Time) {
	view := w.datagramWindow()
	for _, d := range w.datagrams {
		if d.retireOld(now, &view) {
			w.changed = true // the members have the window back
		}
	}
}

// scheduleRetiring has the group's tick come when what d sent first is gone.
func (w *window) scheduleRetiring(d *datagramShare, view *datagramWindow) {
	if at, ok := d.nextRetirement(view); ok {
		w.scheduleTick(at)
	}
}

// datagramsDelivered is how many bytes of datagrams in the window have been delivered
// while acked bytes of the members were: on one path both fare alike. An algorithm
// that took the members' rate for the path's would give the datagrams their share
// of that, and then of what is left; and one that grows by what is acknowledged
// would hardly do so beside many of them.
func (w *window) datagramsDelivered(now cc.Time, acked cc.Bytes) cc.Bytes {
	if len(w.datagrams) == 0 {
		return 0
	}
	w.retireDatagrams(now)
	return cc.Bytes(float64(acked) / float64(w.inflight+acked) * float64(w.datagramBytes(false)))
}

// A group keeps its window for linger after the last byte arrived, or for three
// retransmission timeouts if those are longer, whether it has members or not: what
// begins then is paced over a round trip (RFC 7661 §4.4.3 preserves a window that may
// not have been validated, and wants its bursts mitigated). From then on the window
// halves with every timeout, down to the initial one (RFC 2861), and the algorithm's
// state is given back; with Terms.Restarts it does so from the first timeout on. After
// memoryLasts nothing is known of a group without members. An algorithm that somebody
// outside knows of goes with the last member.
const (
	linger      = 10 * time.Second
	memoryLasts = 5 * time.Minute
)

// endIdle ends an idle time for a member on path p, and reports whether it was longer
// than a retransmission timeout.
func (w *window) endIdle(p *path, now cc.Time) bool {
	if w.idle.since == 0 {
		return false
	}
	long := now.Sub(w.idle.since) > w.rtt.rto() && w.rtt.srtt > 0
	w.restartFromMemory(p, now)
	w.idle.since = 0
	return long
}

// forgetAfterIdle drops the algorithm of a group that has been idle for so long that it would not
// go on from where it was, and reports whether it has been.
func (w *window) forgetAfterIdle(now cc.Time) bool {
	if w.idle.since == 0 || now.Sub(w.idle.since) <= w.lingerTime() {
		return false
	}
	w.saveWindow()
	return true
}

// saveWindow drops the algorithm, if there is one, and keeps its window.
func (w *window) saveWindow() {
	if w.alg == nil {
		return
	}
	w.idle.cwnd = w.alg.Control().Cwnd
	w.closeAlgorithm()
	w.initial, w.ssthresh, w.takenAway = 0, 0, 0
	w.ctl = cc.Control{}
}

// lingerTime is how long an idle group stays as it is.
func (w *window) lingerTime() time.Duration {
	if w.restartsAfterIdle() {
		return w.rtt.rto()
	}
	return max(linger, 3*w.rtt.rto())
}

// restartsAfterIdle is Terms.Restarts.
func (w *window) restartsAfterIdle() bool { return len(w.members) > 0 && w.members[0].terms.Restarts }

// rememberedWindow is the window with which a group would start at now whose algorithm is
// forgotten: at least the usual first one, unless it was less.
func (w *window) rememberedWindow(now cc.Time) cc.Bytes {
	idle := now.Sub(w.idle.since) - w.lingerTime()
	halvings := min(max(0, idle/w.rtt.rto()), 62)
	if w.restartsAfterIdle() {
		halvings++ // for the timeout that it lingered
	}
	return max(w.idle.cwnd>>halvings, min(w.idle.cwnd, cc.InitialCwndPackets*w.mss))
}

// restartFromMemory readies a group that has forgotten its algorithm for a member on path p: it
// starts anew from what is left of the window, up to which the path is known, and with
// p's base round trip. Of a path that is new nothing is known.
func (w *window) restartFromMemory(p *path, now cc.Time) {
	w.forgetAfterIdle(now)
	if w.idle.cwnd == 0 {
		return
	}
	initial, ssthresh := p.fromReference(w.rememberedWindow(now)), p.fromReference(w.idle.cwnd)
	if p.base == 0 {
		initial, ssthresh = 0, 0
	}
	w.initial, w.ssthresh, w.idle.cwnd = initial, ssthresh, 0
	w.rtt = rttEstimator{srtt: p.base, rttvar: p.base / 2, min: p.base}
	w.cwndFullAt = 0
	w.setReferencePath(p)
}
