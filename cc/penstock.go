package cc

import (
	"math"
	"time"
)

// Penstock's own algorithm is for links with rates that change within a round trip. The window is what the path
// delivers in its least round trip and in a target more, and while acknowledgements wait on their way back:
//
//	cwnd = rate · (base + target + reverse queue)
//
//	slow_start ──(a queue, or a loss)──▶ tracking ◀──▶ draining
//	     ▲                                   │
//	     └────────────(timeout)──────────────┘
//
// The rate is the mean of two windows of time. The short one follows the link. The long one rides out the pauses of
// its scheduler. Both count bytes by when they arrived, not by when their acknowledgements did. The target
// (penstock_target.go) adapts to how long the link idles. Draining (penstock_drain.go) empties the queue: so the base
// stays right, and a queue of other flows shows. Beside those the window is what half of the link has in flight at the
// present round trip (penstock_rivals.go). A loss puts CUBIC's window in force while it is the larger one.
// docs/decisions/0004-own-algorithm.md has the measurements behind the constants.

func init() {
	Register(Spec{
		Name: "penstock",
		About: "Penstock's own: as much in flight as the link delivers in the least round trip and a target more, which " +
			"adapts to how long the link idles.",
		Source: "docs/decisions/0004-own-algorithm.md",
		Params: []Param{
			{
				Name: "target_ms", Unit: "ms", Default: 29, Min: 1, Max: 1000,
				About: "queueing delay to ask for at 10 Mbit/s; in force is from half of it to 1.3 times, more at a lower rate " +
					"and less at a higher",
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
			{Name: "link_mbit", About: "what the link is relied on for: half of it is held where others fill its queue; " +
				"0: its rate wavers too much"},
			{Name: "reverse_ms", About: "queueing delay of the newest sample on the way back, as far as it is known"},
		},
	})
}

const (
	shortRateWindow   = 50 * time.Millisecond // rounded to whole round trips (rateWindows)
	longRateWindow    = 500 * time.Millisecond
	longRateBases     = 4           // bases that the long window has at least
	bestRateWindow    = time.Second // and at least two round trips: the memory of bestRate
	leastTrackingCwnd = 4.0         // packets, so that acknowledgements keep coming
	leastDrainingCwnd = 2.0         // packets
	// With a queue on the way back of more than reversePacingBases bases, acknowledgements come in trains. The window
	// is then paced, at reversePacingGain times what it is per round trip.
	reversePacingGain  = 1.2
	reversePacingBases = 1. / 4
	// maxReverseCovered is in seconds. The window covers no longer queue on the way back, because our own
	// acknowledgements may be what fills that.
	maxReverseCovered = 2.0
	linkFullTargets   = 3.0 // a queueing delay of this many targets proves that the link is full
	silencesPerRTT    = 2   // a silence of more than a smoothed round trip over this is the application's
	aloneQueueTargets = 1.5 // targets of queueing delay that our flows make at most, if no others send
	aloneEdgePart     = 0.9 // part of the edge's bytes from which on a window counts as the edge's only one

	// Slow start ends at a queue of slowStartQueueBases bases, or of half of the target if that is more. From a base of
	// slowStartLongBase on, the queue must be slowStartMostQueues times that, or a round trip must deliver less than
	// slowStartGrowth times what the one before it did.
	slowStartQueueBases = 1. / 4
	slowStartLongBase   = 200 * time.Millisecond
	slowStartGrowth     = 1.3
	slowStartMostQueues = 2
	peakRateSegments    = 4 // least segments that the best rate of slow start is measured over

	// The first objectBytes after a silence may be all that the application has. Until they are delivered, the window
	// grows as in slow start, up to what is left of them, and nothing drains.
	objectBytes = Bytes(100e3)
)

type penstockPhase uint8

const (
	penstockSlowStart penstockPhase = iota
	penstockTracking
	penstockDraining
)

type penstock struct {
	NoTick
	segments
	competes    bool    // Spec.Params has it
	receives    bool    // Config.Receives
	initialCwnd float64 // packets
	resumed     bool    // initialCwnd was in force elsewhere until now: slow start only measures the rate
	startedAt   Time    // of the first acknowledgement

	phase        penstockPhase
	cwnd         float64 // packets
	reverseCwnd  float64 // packets, the part of cwnd that covers the queue on the way back
	squeezedPace Rate    // pacing rate, where the rate asks for less than leastTrackingCwnd; 0: not paced

	short, long history // of delivered bytes, for rate
	rate        float64 // bytes/s, delivered
	heldRate    float64 // bytes/s: rate while draining, and the least that rate is until heldUntil
	heldUntil   Time
	bestRate    windowedFilter // greatest rate; its durations stand for bytes/s
	silences    time.Duration  // all times in which nothing was in flight; rates are not measured over them
	ackedAt     Time           // when the newest acknowledgement came
	arrivedAt   Time           // when the receiver had what that told of

	base         windowedFilter // least round trip without the queue on the way back
	srtt         time.Duration
	queueDelay   time.Duration // of the newest sample, on the way there
	reverseQueue time.Duration // of the newest sample, on the way back
	target       float64       // seconds of queueing delay, in force
	queueTarget  queueTarget
	objectEnd    Bytes // Delivered once the first objectBytes after the newest silence have arrived

	emptyAt       Time          // when the queue was last seen empty, or a draining began or ended
	nextDrain     Time          // when to drain, unless the queue is seen empty before
	drainDepth    float64       // bases that the window covers at least while draining
	drainedFrom   Time          // what leaves after this finds the queue drained
	drainDeadline Time          // a draining ends then at the latest, because an outage may lengthen round trips
	drainEndedAt  Time          // of the last draining
	drainedRTT    time.Duration // least round trip with the queue drained; 0: none yet
	doubtedRTT    time.Duration // drainedRTT of the last draining, if that was above the base; 0: it was not

	rivalry       rivalry
	besideCounted bool    // rivals that the edge counts widen the window
	recentBytes   float64 // delivered by this window, fading over edgeMemory
	recentEdge    float64 // bytes delivered by all windows of the edge, fading over edgeMemory
	edgeDelivered Bytes   // State.EdgeDelivered at the newest acknowledgement
	pathWatch     pathWatch

	cubic        cubic // the window that a loss puts in force
	lossEpoch    epoch
	timeoutEpoch epoch // what left before the last timeout counts as lost by it, even if it is reported later
}

func newPenstock(cfg Config) *penstock {
	p := &penstock{
		segments:    segments{cfg.MSS},
		competes:    cfg.Params["compete"] == 1,
		receives:    cfg.Receives,
		base:        newMinFilter(),
		bestRate:    newMaxFilter(),
		queueTarget: queueTarget{set: cfg.Params["target_ms"] / 1e3, lossGuard: newLossGuard()},
		cubic:       cubic{lossWindow: newLossWindow(cfg)},
		pathWatch:   pathWatch{mostThere: -1},
	}
	p.initialCwnd = p.toPackets(cfg.InitialCwnd)
	p.restart()
	p.resumed = cfg.Ssthresh > 0 && cfg.InitialCwnd >= cfg.Ssthresh
	return p
}

// restart begins slow start. The base, the target's idle time and the rate of the link stay known. What is sent again
// shows no round trip. Until one comes the newest queueDelay counts, and a long one ends slow start.
func (p *penstock) restart() {
	p.phase, p.resumed = penstockSlowStart, false
	p.rivalry.release(p.rivalry.restUntil)
	p.cwnd, p.squeezedPace, p.reverseCwnd = p.clampWindow(p.initialCwnd, leastTrackingCwnd), 0, 0
	p.short.reset()
	p.long.reset()
	p.rate, p.heldRate = 0, 0
	p.target = p.queueTarget.set
}

func (p *penstock) OnAck(a Ack) {
	p.setMSS(a.MSS)
	p.cubic.OnAck(a)
	silence := p.silenceBefore(a)
	if silence > 0 || p.ackedAt == 0 {
		p.objectEnd = a.Delivered - a.Acked + objectBytes
	}
	p.addRTTSample(a)
	p.updateDeliveryRate(a, silence)
	p.queueTarget.lossGuard.onAck(a.State, float64(a.Acked), p.target)
	base := p.base.extreme()
	if base == 0 || p.rate == 0 {
		p.growInSlowStart(a)
		return
	}
	if p.phase == penstockSlowStart {
		// Over a long time others leave less. Over a few segments the rate would be twice the link's.
		few := time.Duration(peakRateSegments * float64(p.mss) / p.rate * float64(time.Second))
		p.rivalry.link.peak = max(p.rivalry.link.peak, p.short.rateOver(max(shortRateWindow, few)))
		p.growInSlowStart(a)
		if p.isLinkFull() || p.resumed && a.Now >= p.startedAt.Add(p.srtt) {
			p.leaveSlowStart(a.Now)
		}
		return
	}
	counts := p.phase == penstockTracking && a.CwndLimited && a.sentTime() >= p.drainEndedAt.Add(p.srtt)
	p.queueTarget.addAck(a, base, p.rate, p.queueDelay, p.emptyThreshold(), counts)
	switch p.phase {
	case penstockTracking:
		if p.checkDrainTime(a.Now) && a.Delivered > p.objectEnd {
			p.beginDraining(a.State, drainDepth)
		}
	case penstockDraining:
		p.checkDrainEnd(a)
	}
	p.setWindowFromRate(a)
	if p.phase == penstockTracking && a.RTT > 0 {
		p.watchForRivals(a, a.RTT-p.reverseQueue)
		p.followLongerPath(a)
	}
}

// addRTTSample takes in a round trip. It updates the base and the queueing delays.
func (p *penstock) addRTTSample(a Ack) {
	if a.RTT <= 0 {
		return
	}
	p.reverseQueue = a.ReverseQueue
	forwardRTT := max(a.RTT-p.reverseQueue, minDivisor)
	p.srtt = max(a.SRTT, minDivisor)
	p.noteShorterPath(a, forwardRTT)
	least := forwardRTT
	switch base := p.base.extreme(); {
	case base == 0:
		least = leastAtFirst(a.State, forwardRTT)
	case p.rivalry.holds || p.besideCounted: // the base must not become the queue of others
		least = min(forwardRTT, base)
	}
	p.base.addSample(a.Now, least, 2*p.drainInterval())
	p.queueDelay = forwardRTT - p.base.extreme()
	p.noteEmptyQueue(a)
}

// silenceBefore returns how long nothing was in flight before the acknowledged bytes left; 0: not for long.
func (p *penstock) silenceBefore(a Ack) time.Duration {
	silence := a.Sent.At.Sub(p.ackedAt)
	if p.ackedAt == 0 || a.Sent.Inflight != 0 || silence <= a.SRTT/silencesPerRTT {
		return 0
	}
	return silence
}

// updateDeliveryRate updates the delivery rates of this window, of the edge and of the link. The acknowledged bytes
// left after a silence.
func (p *penstock) updateDeliveryRate(a Ack, silence time.Duration) {
	short, long := p.rateWindows()
	if silence > 0 {
		p.silences += silence
		if p.phase == penstockTracking { // the short window has nothing of the first round trip after it
			p.heldRate, p.heldUntil = p.rate, a.Now.Add(short)
		}
	}
	gap := a.Now.Sub(p.ackedAt).Seconds()
	if p.ackedAt != 0 {
		fade := math.Exp(-gap / edgeMemory.Seconds())
		p.recentBytes = p.recentBytes*fade + float64(a.Acked)
		p.recentEdge = p.recentEdge*fade + float64(a.EdgeDelivered-p.edgeDelivered)
	}
	p.edgeDelivered = a.EdgeDelivered
	p.ackedAt = a.Now
	p.arrivedAt = max(p.arrivedAt, a.Now.Add(-p.reverseQueue))
	at := p.arrivedAt.Add(-p.silences)
	if p.long.n == 0 {
		began := at.Add(-max(a.RTT, a.SRTT))
		p.short.addMark(began, a.Delivered-a.Acked, short)
		p.long.addMark(began, a.Delivered-a.Acked, long)
	}
	p.short.addMark(at, a.Delivered, short)
	p.long.addMark(at, a.Delivered, long)
	p.rate = (p.short.rateOver(short) + p.long.rateOver(long)) / 2
	switch {
	case p.phase == penstockDraining: // less is sent; the link carries what it did
		p.rate, p.heldUntil = p.heldRate, a.Now.Add(long)
	case a.Now < p.heldUntil:
		p.rate = max(p.rate, p.heldRate)
	}
	if p.phase == penstockTracking && p.rate > 0 && p.rivalry.isQuiet() {
		p.rivalry.link.add(a.Now, p.rate, gap)
	}
}

// growInSlowStart grows the window by what is delivered.
func (p *penstock) growInSlowStart(a Ack) {
	if p.startedAt == 0 {
		p.startedAt = a.Now
	}
	if a.CwndLimited && !p.resumed {
		p.cwnd = p.clampWindow(p.cwnd+min(p.toPackets(a.Acked), p.cwnd), leastTrackingCwnd)
	}
}

// isLinkFull reports whether slow start has filled the link. There is a queue then. On a long path deliveries hardly
// grow from round trip to round trip as well (draft-chung-ccwg-search, section 3): a window that doubles sends bursts,
// which queue before the link is full.
func (p *penstock) isLinkFull() bool {
	base := p.base.extreme()
	queue := max(time.Duration(p.target*float64(time.Second)/2), time.Duration(slowStartQueueBases*float64(base)))
	if p.queueDelay <= queue || base < slowStartLongBase || p.queueDelay > slowStartMostQueues*queue {
		return p.queueDelay > queue
	}
	return p.long.growth(p.srtt) < slowStartGrowth
}

// leaveSlowStart begins to track. It forgets older rates, which are those of smaller windows.
func (p *penstock) leaveSlowStart(now Time) {
	p.phase, p.emptyAt = penstockTracking, now.Add(-drainEvery)
	p.rivalry.link.peak = max(p.rivalry.link.peak, p.rate)
	p.nextDrain = p.nextDrainTime(now, drainEvery)
	short, _ := p.rateWindows()
	p.long.keepLast(short)
}

// rateWindows returns the times that the rate is measured over. What is in flight comes back as a train of
// acknowledgements, so the short one is whole round trips. Over parts of one the rate would swing with the train, and
// the window with the rate. Of several connections that share the window each would always meet the same part of it.
func (p *penstock) rateWindows() (short, long time.Duration) {
	base := p.base.extreme()
	rtt := max(p.srtt, base+p.reverseQueue, minDivisor).Seconds()
	whole := max(1, math.Round(shortRateWindow.Seconds()/rtt)) * rtt
	short = time.Duration(whole * float64(time.Second))
	long = max(longRateWindow, longRateBases*base)
	return short, max(short, long)
}

// emptyThreshold returns the queueing delay up to which the queue counts as empty.
func (p *penstock) emptyThreshold() time.Duration {
	return emptyQueueThreshold(p.base.extreme(), p.rate, p.mss)
}

// setWindowFromRate sets the target, the window and squeezedPace.
func (p *penstock) setWindowFromRate(a Ack) {
	base := p.base.extreme().Seconds()
	p.target = p.queueTarget.targetDelay(p.rate, base)
	p.bestRate.addSample(a.Now, time.Duration(p.rate), max(bestRateWindow, 2*p.srtt))
	cwnd, least := p.rate*(base+p.target), leastTrackingCwnd
	if p.phase == penstockDraining {
		cwnd, least = p.rate*max(p.drainDepth*base, base-drainTargets*p.target), leastDrainingCwnd
	}
	reverse := p.windowOnWayBack()
	n := cwnd/float64(p.mss) + reverse
	n = p.widenForRivals(n)
	n = p.widenForCountedRivals(a, n)
	n = p.keepUnusedWindow(a, n, p.cwnd-p.reverseCwnd+reverse)
	p.cwnd, p.reverseCwnd, p.squeezedPace = p.clampWindow(n, least), reverse, 0
	// Of many flows on a slow link each has less than leastTrackingCwnd: they are paced, at a segment per round trip at
	// least. They are not in a queue that our flows make: a flow that the others squeeze there would not grow again.
	shared := p.recentBytes < aloneEdgePart*p.recentEdge
	if shared && n < least && p.phase == penstockTracking && p.queueDelay.Seconds() > aloneQueueTargets*p.target {
		p.squeezedPace = p.pacingRate(1, n, p.base.extreme()+p.queueDelay+p.reverseQueue)
	}
}

// windowOnWayBack returns how many packets cover the queue on the way back. While the way there has no queue, the best
// rate counts: behind the queue on the way back the rate shows late what the link carries.
func (p *penstock) windowOnWayBack() float64 {
	rate := p.rate
	if p.phase != penstockDraining && p.queueDelay.Seconds() < p.target {
		rate = float64(p.bestRate.extreme())
	}
	return rate * (min(p.reverseQueue.Seconds(), maxReverseCovered) / float64(p.mss))
}

// keepUnusedWindow returns a window of n packets, or more where the rate is the application's and not the link's. kept
// is the old window with the present reverseCwnd. Behind a long queue the rate is the link's, whoever limits the
// sender, and an old window would let more stand there.
func (p *penstock) keepUnusedWindow(a Ack, n, kept float64) float64 {
	left := p.toPackets(p.objectEnd - a.Delivered)
	switch object := a.Delivered <= p.objectEnd && p.phase == penstockTracking; {
	case object && a.CwndLimited:
		return max(n, min(kept+p.toPackets(a.Acked), left))
	case object: // the window that slow start would have, for the next object
		return max(n, kept, p.initialCwnd+p.toPackets(objectBytes)-left)
	case !a.CwndLimited && p.squeezedPace == 0 && p.queueDelay.Seconds() <= linkFullTargets*p.target:
		return max(n, kept)
	}
	return n
}

func (p *penstock) OnLoss(l Loss) {
	p.setMSS(l.MSS)
	if l.Timeout {
		p.cubic.OnLoss(l)
		p.timeoutEpoch.reacted = l.Now
		p.restart()
		return
	}
	if p.timeoutEpoch.covers(l.SentAt) {
		return
	}
	p.queueTarget.lossGuard.lost += float64(l.Lost)
	if p.phase == penstockSlowStart && p.rate > 0 {
		p.leaveSlowStart(l.Now)
	}
	if p.competes && p.lossEpoch.beginEpoch(l) {
		p.answerLoss(l)
	}
	p.cubic.OnLoss(l)
}

// Inspect shows what Spec.Internals lists.
func (p *penstock) Inspect() Internals {
	i := Internals{
		bytesToMbit(p.rate), p.target * 1e3, toMillis(p.queueDelay), toMillis(p.base.extreme()),
		100 * p.queueTarget.idle / max(p.queueTarget.total, 1),
	}
	if p.rivalry.cubicActive {
		i[5] = p.cubic.cwnd
	}
	i[6] = bytesToMbit(p.rivalry.link.rate())
	i[7] = toMillis(p.reverseQueue)
	return i
}

func (p *penstock) Control() Control {
	c := Control{Cwnd: p.toBytes(p.cwnd), PacingRate: p.squeezedPace, Phase: p.phaseName()}
	base := p.base.extreme()
	trains := p.reverseQueue > time.Duration(reversePacingBases*float64(base))
	if trains && p.squeezedPace == 0 && p.phase != penstockSlowStart {
		rtt := base + p.reverseQueue + time.Duration(p.target*float64(time.Second))
		c.PacingRate = p.pacingRate(reversePacingGain, p.cwnd, rtt)
	}
	return c
}

func (p *penstock) phaseName() string {
	switch {
	case p.phase == penstockSlowStart:
		return "slow_start"
	case p.phase == penstockDraining:
		return "draining"
	case p.rivalry.holds || p.rivalry.cubicActive && p.cubic.cwnd >= p.cwnd:
		return "competing"
	}
	return "tracking"
}
