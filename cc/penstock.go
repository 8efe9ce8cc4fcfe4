package cc

import (
	"math"
	"time"
)

// Penstock's own algorithm, for links with rates that change within a round
// trip. The window is what the path delivers in its least round trip, in
// a target more, and while an acknowledgement waits on its way back:
//
//	cwnd = rate · (base + target + reverse queue)
//
//	slow_start ──(a queue, or a loss)──▶ tracking ◀──▶ draining
//	     ▲                                   │
//	     └────────────(timeout)──────────────┘
//
// The rate is the mean of two windows': a short one follows the link, a long one
// rides out the pauses of its scheduler; both count by when the bytes arrived. The
// target (penstock_target.go) adapts to how long the link idles. Draining (penstock_drain.go)
// empties the queue. That keeps the base right, and shows whether other flows fill the
// queue. Beside those the window is what half of the link has in flight at the present
// round trip (penstock_rivals.go). A loss puts CUBIC's window (rival) in force.

func init() {
	Register(Spec{
		Name: "penstock",
		About: "Penstock's own: as much in flight as the link delivers in the least round trip and a target more, which adapts to " +
			"how long the link idles.",
		Source: "docs/decisions/0004-own-algorithm.md",
		Params: []Param{
			{
				Name: "target_ms", Unit: "ms", Default: 29, Min: 1, Max: 1000,
				About: "queueing delay to ask for at 10 Mbit/s; in force is from half of it to 1.3 times, more at a lower rate and less at a higher",
			},
			{Name: "compete", Default: 1, Choices: []string{"off", "on"}, About: "keep up with flows that fill the queue"},
		},
		New:   func(cfg Config) Algorithm { return newPenstock(cfg) },
		Needs: []Signal{NeedsRTT, NeedsLoss},
		Internals: []Internal{
			{Name: "rate_mbit", About: "delivery rate, the mean of a short and a long window's"},
			{Name: "target_ms", About: "queueing delay asked for"},
			{Name: "queue_ms", About: "queueing delay of the newest sample, on the way there"},
			{Name: "base_ms", About: "least round trip remembered, without the queue on the way back"},
			{Name: "idle_percent", About: "of the last minute, the part in which the link had nothing of ours"},
			{Name: "rival_packets", About: "the CUBIC window that keeps up with others; 0: there is no need for one"},
			{
				Name: "link_mbit",
				About: "what the link is relied on for: half of it is held where others fill its queue; 0: its rate wavers " +
					"too much",
			},
			{Name: "reverse_ms", About: "queueing delay of the newest sample on the way back, as far as it is known"},
		},
	})
}

const (
	ownShort = 50 * time.Millisecond // about: in whole round trips
	ownLong  = 500 * time.Millisecond
	// ownLongBases bases are the long window of a longer path.
	ownLongBases = 4
	ownMinCwnd   = 4.0 // packets: what keeps acknowledgements coming
	ownMinDrain  = 2.0 // packets, while draining

	// ownReverseGain of the rate is the pace while the queue on the way back is more
	// than ownReverseBases of the base: acknowledgements come in trains then.
	ownReverseGain  = 1.2
	ownReverseBases = 1. / 4
	// ownReverseMost seconds of it are covered at most: it may be of our acknowledgements.
	ownReverseMost = 2.0
	ownQueueProof  = 3.0         // targets of queueing delay prove that the link is full
	ownBest        = time.Second // and two round trips: the best rate of them fills the way back
	// ownIdle in one smoothed round trip: a longer silence is the application's.
	ownIdle = 2
	// ownAloneQueue targets of queue are as many as we make by ourselves.
	ownAloneQueue = 1.5
	// ownAlone of what the edge delivers is one flow by itself.
	ownAlone = 0.9
	// ownStartQueue of the base, or half of the target if that is more, is a queue that ends slow start. From a base of
	// ownStartLong on, it does so only where a round trip delivers less than ownStartGrowth times what the one before
	// did, or at ownStartMost times that queue.
	ownStartQueue  = 1. / 4
	ownStartLong   = 200 * time.Millisecond
	ownStartGrowth = 1.3
	ownStartMost   = 2
	// ownPeakSegments at least are what the best rate of slow start is over.
	ownPeakSegments = 4
	// ownObject bytes after a silence may be all that the application has: until they are delivered, the window grows
	// as in slow start to what is left of them, and nothing drains.
	ownObject = Bytes(100e3)
)

type ownPhase uint8

const (
	ownStarting ownPhase = iota
	ownTracking
	ownDraining
)

type penstock struct {
	NoTick
	segments
	initial  float64 // packets
	resumed  bool    // initial was in force elsewhere until now, and slow start only measures the rate
	began    Time    // the first acknowledgement of that
	competes bool

	phase       ownPhase
	cwnd        float64 // packets
	pace        Rate    // of a window that the rate asks to be less than ownMinCwnd; 0: none
	back        float64 // packets of it, which cover the queue on the way back
	short, long history
	rate        float64 // bytes/s
	held        float64 // bytes/s that the rate is held at after draining
	until       Time    // then
	target      float64 // seconds, in force
	aim         queueTarget

	base    windowedFilter
	srtt    time.Duration
	queue   time.Duration  // of the newest sample, on the way there
	reverse time.Duration  // and on the way back
	best    windowedFilter // of the rate; bytes/s for nanoseconds
	arrived Time           // when the receiver had what the newest acknowledgement told of
	heard   Time           // when that came
	idle    time.Duration  // of silences so far, in which nothing was in flight: no rate is over them
	object  Bytes          // delivered once the first ownObject bytes after a silence are
	empty   Time           // when the queue was last seen empty, or was to be emptied

	receives   bool // as in Config
	next       Time // when to drain, unless the queue is seen empty before
	drainDepth float64
	drainFrom  Time          // what left after this finds the queue drained
	drainEnd   Time          // by then it is over, whatever an outage has made of the round trip
	drained    Time          // what left before this found the queue as draining left it
	drainLeft  time.Duration // least round trip of that; 0: none yet
	doubted    time.Duration // that of the draining before, where it did not come down to the base
	rivalry    rivalry
	ours, edge float64 // bytes that this window and all of the edge have delivered, fading over edgeMemory
	edgeTotal  Bytes

	path       pathWatch
	besideSeen bool // the edge counts rivals that want more than the window without them

	rival  cubic
	losses epoch
	expiry epoch // what left before the last timeout counts as lost by it, even if it is reported later
}

func newPenstock(cfg Config) *penstock {
	p := &penstock{
		segments: segments{cfg.MSS},
		competes: cfg.Params["compete"] == 1,
		receives: cfg.Receives,
		base:     newMinFilter(),
		best:     newMaxFilter(),
		aim:      queueTarget{set: cfg.Params["target_ms"] / 1e3, excess: newLossGuard()},
		rival:    cubic{lossWindow: newLossWindow(cfg)},
		path:     pathWatch{most: -1},
	}
	p.initial = p.toPackets(cfg.InitialCwnd)
	p.restart()
	p.resumed = cfg.Ssthresh > 0 && cfg.InitialCwnd >= cfg.Ssthresh
	return p
}

// restart looks for the rate anew; what the path's length is, and how its queue behaves, is still known. What
// is sent again shows no round trip: until one comes the newest queue counts, and a long one ends slow start.
func (p *penstock) restart() {
	p.phase, p.resumed = ownStarting, false
	p.rivalry.release(p.rivalry.rest)
	p.cwnd, p.pace, p.back = p.clampWindow(p.initial, ownMinCwnd), 0, 0
	p.short.reset()
	p.long.reset()
	p.rate, p.held = 0, 0
	p.target = p.aim.set
}

func (p *penstock) OnAck(a Ack) {
	p.setMSS(a.MSS)
	p.rival.OnAck(a)
	idle := p.silenceBefore(a)
	if idle > 0 || p.heard == 0 {
		p.object = a.Delivered - a.Acked + ownObject
	}
	p.addRTTSample(a)
	p.updateDeliveryRate(a, idle)
	p.aim.excess.onAck(a.State, float64(a.Acked), p.target)
	base := p.base.extreme()
	if base == 0 || p.rate == 0 {
		p.growInSlowStart(a)
		return
	}
	if p.phase == ownStarting {
		// Others leave less of a longer time. Of a few segments the rate would be twice the link's.
		few := time.Duration(ownPeakSegments * float64(p.mss) / p.rate * float64(time.Second))
		p.rivalry.link.peak = max(p.rivalry.link.peak, p.short.rateOver(max(ownShort, few)))
		p.growInSlowStart(a)
		if p.isLinkFull() || p.resumed && a.Now >= p.began.Add(p.srtt) {
			p.leaveSlowStart(a.Now)
		}
		return
	}
	counts := p.phase == ownTracking && a.CwndLimited && a.sentTime() >= p.drained.Add(p.srtt)
	p.aim.addAck(a, base, p.rate, p.queue, p.emptyThreshold(), counts)
	switch p.phase {
	case ownTracking:
		if p.isDrainDue(a.Now) && a.Delivered > p.object {
			p.beginDraining(a.State, ownDrainDepth)
		}
	case ownDraining:
		p.checkDrainEnd(a)
	}
	p.setWindowFromRate(a)
	if p.phase == ownTracking && a.RTT > 0 {
		p.watchForRivals(a, a.RTT-p.reverse)
		p.followLongerPath(a)
	}
}

// addRTTSample takes in a round trip.
func (p *penstock) addRTTSample(a Ack) {
	if a.RTT <= 0 {
		return
	}
	p.reverse = a.ReverseQueue
	rtt := max(a.RTT-p.reverse, minDivisor)
	p.srtt = max(a.SRTT, minDivisor)
	if p.phase == ownTracking && a.Delivered > p.object && rtt < p.base.extreme()-ownBaseSeen &&
		a.Now.Sub(p.drainFrom) > ownRejoin {
		p.beginDraining(a.State, ownDrainDepth) // another flow drains, and the base was never the path's
	}
	if rtt < p.base.extreme()-p.emptyThreshold() { // what found no queue had found one
		p.aim.idle, p.aim.all = 0, 0
	}
	least := rtt
	switch base := p.base.extreme(); {
	case base == 0:
		least = leastAtFirst(a.State, rtt)
	case p.rivalry.holds || p.besideSeen: // the base is not to become the others' queue
		least = min(rtt, base)
	}
	p.base.addSample(a.Now, least, 2*p.drainInterval())
	p.queue = rtt - p.base.extreme()
	paused := p.phase == ownTracking && a.Sent.At > p.drained && p.toPackets(a.Sent.Inflight) <= ownMinDrain
	if p.queue <= ownBaseSeen || paused { // what leaves after a pause finds none of ours
		p.empty = a.Now
	}
	if r := &p.rivalry; p.queue <= p.emptyThreshold() && a.sentTime() >= r.from && (r.holds || r.bound) {
		r.release(r.rest)
	}
}

// silenceBefore returns how long nothing was in flight before what is acknowledged; 0: not for long.
func (p *penstock) silenceBefore(a Ack) time.Duration {
	idle := a.Sent.At.Sub(p.heard)
	if p.heard == 0 || a.Sent.Inflight != 0 || idle <= a.SRTT/ownIdle {
		return 0
	}
	return idle
}

// updateDeliveryRate updates the delivery rate, after a silence of idle.
func (p *penstock) updateDeliveryRate(a Ack, idle time.Duration) {
	short, long := p.rateWindows()
	if idle > 0 {
		p.idle += idle
		if p.phase == ownTracking { // in the first round trip there is nothing to come
			p.held, p.until = p.rate, a.Now.Add(short)
		}
	}
	gap := a.Now.Sub(p.heard).Seconds()
	if p.heard != 0 {
		fade := math.Exp(-gap / edgeMemory.Seconds())
		p.ours = p.ours*fade + float64(a.Acked)
		p.edge = p.edge*fade + float64(a.EdgeDelivered-p.edgeTotal)
	}
	p.edgeTotal = a.EdgeDelivered
	p.heard = a.Now
	p.arrived = max(p.arrived, a.Now.Add(-p.reverse))
	at := p.arrived.Add(-p.idle)
	if p.long.n == 0 {
		began := at.Add(-max(a.RTT, a.SRTT))
		p.short.addMark(began, a.Delivered-a.Acked, short)
		p.long.addMark(began, a.Delivered-a.Acked, long)
	}
	p.short.addMark(at, a.Delivered, short)
	p.long.addMark(at, a.Delivered, long)
	p.rate = (p.short.rateOver(short) + p.long.rateOver(long)) / 2
	switch {
	case p.phase == ownDraining: // which sends less, not the link
		p.rate, p.until = p.held, a.Now.Add(long)
	case a.Now < p.until:
		p.rate = max(p.rate, p.held)
	}
	if p.phase == ownTracking && p.rate > 0 && p.rivalry.isQuiet() {
		p.rivalry.link.add(a.Now, p.rate, gap)
	}
}

// growInSlowStart grows the window by what is delivered.
func (p *penstock) growInSlowStart(a Ack) {
	if p.began == 0 {
		p.began = a.Now
	}
	if a.CwndLimited && !p.resumed {
		p.cwnd = p.clampWindow(p.cwnd+min(p.toPackets(a.Acked), p.cwnd), ownMinCwnd)
	}
}

// isLinkFull reports whether slow start has filled the link: there is a queue and, on a long path, deliveries hardly
// grow from round trip to round trip (draft-chung-ccwg-search, section 3). A window that doubles sends
// bursts, which queue before the link is full.
func (p *penstock) isLinkFull() bool {
	base := p.base.extreme()
	queue := max(time.Duration(p.target*float64(time.Second)/2), time.Duration(ownStartQueue*float64(base)))
	if p.queue <= queue || base < ownStartLong || p.queue > ownStartMost*queue {
		return p.queue > queue
	}
	return p.long.growth(p.srtt) < ownStartGrowth
}

// leaveSlowStart ends slow start: the rates before it are those of smaller windows.
func (p *penstock) leaveSlowStart(now Time) {
	p.phase, p.empty = ownTracking, now.Add(-ownDrainEvery)
	p.rivalry.link.peak = max(p.rivalry.link.peak, p.rate)
	p.next = p.nextDrainTime(now, ownDrainEvery)
	short, _ := p.rateWindows()
	p.long.keepLast(short)
}

// rateWindows are those that the rate is measured over. What is in flight comes back as
// a train of acknowledgements, so that the short one is whole round trips: over a
// part of one the rate would swing with the train, the window with the rate, and of
// several connections that share it each would always meet the same part of the
// swing. Where others fill the queue the swing is let be: it holds our place.
func (p *penstock) rateWindows() (short, long time.Duration) {
	base := p.base.extreme()
	rtt := max(p.srtt, base+p.reverse, minDivisor).Seconds()
	whole := max(1, math.Round(ownShort.Seconds()/rtt)) * rtt
	short = time.Duration(whole * float64(time.Second))
	long = max(ownLong, ownLongBases*base)
	return short, max(short, long)
}

func (p *penstock) emptyThreshold() time.Duration {
	return emptyQueueThreshold(p.base.extreme(), p.rate, p.mss)
}

// setWindowFromRate sets the window by the rate.
func (p *penstock) setWindowFromRate(a Ack) {
	base := p.base.extreme().Seconds()
	p.target = p.aim.targetDelay(p.rate, base)
	p.best.addSample(a.Now, time.Duration(p.rate), max(ownBest, 2*p.srtt))
	back := p.rate
	if p.phase != ownDraining && p.queue.Seconds() < p.target { // the way back tells late what the link carries
		back = float64(p.best.extreme())
	}
	back *= min(p.reverse.Seconds(), ownReverseMost) / float64(p.mss)
	cwnd := p.rate * (base + p.target)
	if p.phase == ownDraining {
		cwnd = p.rate * max(p.drainDepth*base, base-ownDrainTargets*p.target)
	}
	n := cwnd/float64(p.mss) + back
	n = p.widenForRivals(n)
	n = p.widenForSeenRivals(a, n)
	// The rate is the application's, but the queue on the way back is what it is now. Behind a long queue the rate is
	// the link's, whoever limits the sender: an old window would let more stand there.
	kept, left := p.cwnd-p.back+back, p.toPackets(p.object-a.Delivered)
	switch object := a.Delivered <= p.object && p.phase == ownTracking; {
	case object && a.CwndLimited:
		n = max(n, min(kept+p.toPackets(a.Acked), left))
	case object: // the window that slow start would have, for the next object
		n = max(n, kept, p.initial+p.toPackets(ownObject)-left)
	case !a.CwndLimited && p.pace == 0 && p.queue.Seconds() <= ownQueueProof*p.target:
		n = max(n, kept)
	}
	p.back = back
	least := ownMinCwnd
	if p.phase == ownDraining {
		least = ownMinDrain
	}
	p.cwnd, p.pace = p.clampWindow(n, least), 0
	// Of many flows on a slow link each has less than ownMinCwnd: they are paced, a segment in a round trip at least.
	// Paced in a queue of our own, a flow that the others squeeze for a moment would not come back.
	shared := p.ours < ownAlone*p.edge
	if shared && n < least && p.phase == ownTracking && p.queue.Seconds() > ownAloneQueue*p.target {
		p.pace = p.pacingRate(1, n, p.base.extreme()+p.queue+p.reverse)
	}
}

func (p *penstock) OnLoss(l Loss) {
	p.setMSS(l.MSS)
	if l.Timeout {
		p.rival.OnLoss(l)
		p.expiry.reacted = l.Now
		p.restart()
		return
	}
	if p.expiry.covers(l.SentAt) {
		return
	}
	p.aim.excess.lost += float64(l.Lost)
	if p.phase == ownStarting && p.rate > 0 {
		p.leaveSlowStart(l.Now)
	}
	if p.competes && p.losses.beginEpoch(l) {
		p.answerLoss(l)
	}
	p.rival.OnLoss(l)
}

// Inspect shows what Spec.Internals lists.
func (p *penstock) Inspect() Internals {
	i := Internals{
		bytesToMbit(p.rate), p.target * 1e3, toMillis(p.queue), toMillis(p.base.extreme()),
		100 * p.aim.idle / max(p.aim.all, 1),
	}
	if p.rivalry.bound {
		i[5] = p.rival.cwnd
	}
	i[6] = bytesToMbit(p.rivalry.link.rate())
	i[7] = toMillis(p.reverse)
	return i
}

func (p *penstock) Control() Control {
	c := Control{Cwnd: p.toBytes(p.cwnd), PacingRate: p.pace, Phase: p.phaseName()}
	base := p.base.extreme()
	if p.pace == 0 && p.phase != ownStarting && p.reverse > time.Duration(ownReverseBases*float64(base)) {
		rtt := base + p.reverse + time.Duration(p.target*float64(time.Second))
		c.PacingRate = p.pacingRate(ownReverseGain, p.cwnd, rtt)
	}
	return c
}

func (p *penstock) phaseName() string {
	switch {
	case p.phase == ownStarting:
		return "slow_start"
	case p.phase == ownDraining:
		return "draining"
	case p.rivalry.holds || p.rivalry.bound && p.rival.cwnd >= p.cwnd:
		return "competing"
	default:
		return "tracking"
	}
}
