package cc

import (
	"math"
	"time"
)

// Figures of the target; docs/decisions/0004-own-algorithm.md gives the measurement behind each.
const (
	targetReference = 10e6 / 8 // bytes/s at which the target is as set
	// targetPower is the power of 1/rate. Flows with more of the link ask for a shorter queue, so that flows in one
	// queue come to have equal rates.
	targetPower = 0.4
	// targetBasePower lengthens the target on paths longer than targetBase: they show late how the rate has changed.
	targetBasePower = 0.3
	targetBase      = 0.02   // seconds
	targetFloor     = 1. / 8 // bases, at least: a window of less never grows where the rate lags

	// idleWanted is the part of the time in which the link may have nothing of ours. Less idle time shortens the target,
	// more lengthens it. idleGain times the difference, from leastAdaptation to mostAdaptation, is added to the target's
	// logarithm.
	idleWanted      = 0.018
	idleGain        = 26
	leastAdaptation = -0.7
	mostAdaptation  = 0.35
	idleMemory      = time.Minute
	idleSureAfter   = 2.0 // seconds of memory from which on the idle time counts in full

	// A queue is empty up to the longest of these delays.
	emptyQueue         = 4 * time.Millisecond // from the kernel's clock, and between grants of a base station
	emptyQueueBases    = 1. / 32              // bases, because long paths waver by more
	emptyQueueSegments = 0.5                  // times that the link takes for a segment

	mostGap   = 200 * time.Millisecond // between acknowledgements that counts: a longer one is an outage
	gapMemory = time.Second            // what is delivered in it is how many bytes the mean gap is over
)

// queueTarget decides how long a queue to ask for, by how long the link idles.
type queueTarget struct {
	set         float64 // seconds; the setting target_ms
	idle, total float64 // seconds in which the link idled, and of all the time; fading over idleMemory
	gap         float64 // seconds from one acknowledgement to the next, mean over their bytes
	servedAt    Time    // what leaves later and finds no queue has let the link idle from then on
	ackedAt     Time    // when the newest acknowledgement came
	lossGuard   lossGuard
}

// addAck counts an acknowledgement over a path of that base, at rate (bytes/s). A queueing delay up to empty is none.
// counts is false where the idle time says nothing: the window was not filled, or not the target's.
func (t *queueTarget) addAck(a Ack, base time.Duration, rate float64, queue, empty time.Duration, counts bool) {
	idle := 0.0
	if a.RTT > 0 {
		if left := a.sentTime(); t.servedAt != 0 && left > t.servedAt && queue <= empty {
			segment := float64(a.MSS) / rate // seconds in which the link was busy with it
			idle = max(0, min(left.Sub(t.servedAt), mostGap).Seconds()-segment)
		}
		t.servedAt = max(t.servedAt, a.Now.Add(-a.ReverseQueue-base))
	}
	if t.ackedAt != 0 {
		passed := min(a.Now.Sub(t.ackedAt), mostGap).Seconds()
		fade := math.Exp(-passed / idleMemory.Seconds())
		t.idle, t.total = t.idle*fade, t.total*fade
		t.gap += (passed - t.gap) * min(1, float64(a.Acked)/rate/gapMemory.Seconds())
		if counts && a.RTT > 0 {
			t.total += passed
			t.idle += idle
		}
	}
	t.ackedAt = a.Now
}

// idleExcess returns by how much the part of the time in which the link idles exceeds idleWanted.
func (t *queueTarget) idleExcess() float64 {
	if t.total == 0 {
		return 0
	}
	return (t.idle/t.total - idleWanted) * min(1, t.total/idleSureAfter)
}

// targetDelay returns the queueing delay in seconds to ask for at rate (bytes/s) over a path of that base (seconds).
func (t *queueTarget) targetDelay(rate, base float64) float64 {
	adapted := min(max(idleGain*t.idleExcess(), leastAdaptation), mostAdaptation)
	s := t.set * math.Exp(adapted) * math.Pow(rate/targetReference, -targetPower)
	s *= math.Pow(max(base/targetBase, 1), targetBasePower)
	s = min(s, t.lossGuard.bound)
	return max(s, targetFloor*base, t.gap)
}

// emptyQueueThreshold returns the queueing delay up to which the queue counts as empty. rate is in bytes/s.
func emptyQueueThreshold(base time.Duration, rate float64, mss Bytes) time.Duration {
	segment := emptyQueueSegments * float64(mss) / max(rate, 1)
	serialisation := time.Duration(min(segment, 1) * float64(time.Second))
	return max(emptyQueue, time.Duration(emptyQueueBases*float64(base)), serialisation)
}

const (
	guardLoss    = 0.04             // part of the bytes: less loss than that does not cut the bound
	guardPackets = 400              // the loss is measured over this many packets
	guardRTTs    = 2                // and over this many round trips, at least
	guardCut     = 0.7              // factor of a cut
	guardGrowth  = 1.0              // parts of itself that the bound grows by in a second of less loss
	guardTrials  = 3                // cuts in a row after which the loss must be half of the first
	guardRest    = 10 * time.Second // without cuts, after cuts that did not help
	guardFree    = 10.0             // seconds; a bound that never binds
)

// lossGuard bounds the target where a short queue overflows. It cuts the bound while the loss is heavy. If that does
// not help, the loss has another cause, and the bound goes.
type lossGuard struct {
	bound       float64 // seconds
	since       Time
	acked, lost float64 // bytes since then
	trials      int     // cuts in a row
	firstLoss   float64 // part of the bytes that was lost before the first of these cuts
	restUntil   Time    // no cuts before
}

func newLossGuard() lossGuard { return lossGuard{bound: guardFree} }

// onAck takes in an acknowledgement of n bytes. target is the delay in force, in seconds.
func (g *lossGuard) onAck(s State, n, target float64) {
	g.acked += n
	if g.since == 0 {
		g.since = s.Now
	}
	period := s.Now.Sub(g.since)
	total := g.acked + g.lost
	if period < guardRTTs*s.SRTT || total < guardPackets*float64(s.MSS) {
		return
	}
	loss := g.lost / total
	switch {
	case s.Now < g.restUntil:
	case loss < guardLoss:
		g.trials = 0
		g.bound = min(guardFree, g.bound*(1+guardGrowth*period.Seconds()))
	case g.trials == guardTrials && loss > g.firstLoss/2:
		g.bound, g.trials = guardFree, 0
		g.restUntil = s.Now.Add(guardRest)
	default:
		if g.trials == 0 || g.trials == guardTrials {
			g.trials, g.firstLoss = 0, loss
		}
		g.trials++
		g.bound = guardCut * min(g.bound, target)
	}
	g.since, g.acked, g.lost = s.Now, 0, 0
}
