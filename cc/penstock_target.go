package cc

import (
	"math"
	"time"
)

// Figures of the target; docs/decisions/0004-own-algorithm.md gives the measurement behind each.
const (
	targetReference = 10e6 / 8 // bytes/s at which the target is as set
	// targetPower lets flows that have more ask for a shorter queue, so that those that share one come to share it
	// evenly.
	targetPower = 0.4
	// targetBasePower lengthens the target on paths longer than targetBase: a change of the rate is heard of later there.
	targetBasePower = 0.3
	targetBase      = 0.02   // seconds
	targetFloor     = 1. / 8 // of the base: a window must exceed the base by it to grow at all where the rate lags

	// idleSet is the part of the time in which the link may have nothing of ours. Less idle time shortens the target,
	// more lengthens it: idleGain times the difference is the change of the target's logarithm, from idleLeast to
	// idleMost.
	idleSet    = 0.018
	idleGain   = 26
	idleLeast  = -0.7
	idleMost   = 0.35
	idleMemory = time.Minute
	idleUnsure = 2.0 // seconds of memory until it counts in full

	emptyQueue      = 4 * time.Millisecond // is no queue: the kernel's clock, and a grant of the base station
	emptyQueueBases = 1. / 32              // of the base: long paths waver with their length
	emptyQueueParts = 0.5                  // of the time that a segment takes

	gapMost   = 200 * time.Millisecond // between acknowledgements: longer is an outage
	gapMemory = time.Second            // of bytes, over which the gaps between acknowledgements are averaged
)

// queueTarget decides how long a queue to ask for, by how long the link idles.
type queueTarget struct {
	set       float64 // seconds
	idle, all float64 // seconds in memory, fading: link idle, total
	gap       float64 // seconds from one acknowledgement to the next, mean over their bytes
	served    Time    // when the newest byte would have left if it had found no queue: the link idles from then
	heard     Time
	excess    lossGuard
}

// addAck counts an acknowledgement that came over a path of that base, at rate (bytes/s). counts is false where the
// idle time says nothing: the sender did not fill its window, or the window was not the target's.
func (t *queueTarget) addAck(a Ack, base time.Duration, rate float64, queue, empty time.Duration, counts bool) {
	idle := 0.0
	if a.RTT > 0 {
		if left := a.sentTime(); t.served != 0 && left > t.served && queue <= empty {
			idle = max(0, min(left.Sub(t.served), gapMost).Seconds()-float64(a.MSS)/rate) // which the link takes for a segment
		}
		t.served = max(t.served, a.Now.Add(-a.ReverseQueue-base))
	}
	if t.heard != 0 {
		passed := min(a.Now.Sub(t.heard), gapMost).Seconds()
		fade := math.Exp(-passed / idleMemory.Seconds())
		t.idle, t.all = t.idle*fade, t.all*fade
		t.gap += (passed - t.gap) * min(1, float64(a.Acked)/rate/gapMemory.Seconds())
		if counts && a.RTT > 0 {
			t.all += passed
			t.idle += idle
		}
	}
	t.heard = a.Now
}

// idleExcess is by how much the part of the time in which the link idles exceeds the part that is wanted.
func (t *queueTarget) idleExcess() float64 {
	if t.all == 0 {
		return 0
	}
	return (t.idle/t.all - idleSet) * min(1, t.all/idleUnsure)
}

// targetDelay is the queueing delay in seconds to ask for at rate (bytes/s) over a path of that base (seconds).
func (t *queueTarget) targetDelay(rate, base float64) float64 {
	adapted := min(max(idleGain*t.idleExcess(), idleLeast), idleMost)
	s := t.set * math.Exp(adapted) * math.Pow(rate/targetReference, -targetPower)
	s *= math.Pow(max(base/targetBase, 1), targetBasePower)
	s = min(s, t.excess.bound)
	return max(s, targetFloor*base, t.gap)
}

// emptyQueueThreshold is the queueing delay up to which there is as good as no queue.
func emptyQueueThreshold(base time.Duration, rate float64, mss Bytes) time.Duration {
	segment := emptyQueueParts * float64(mss) / max(rate, 1)
	serialisation := time.Duration(min(segment, 1) * float64(time.Second))
	return max(emptyQueue, time.Duration(emptyQueueBases*float64(base)), serialisation)
}

const (
	guardLoss    = 0.04 // of the packets: less is let pass
	guardPackets = 400  // it is judged over, and over two round trips
	guardRTTs    = 2
	guardCut     = 0.7
	guardGrowth  = 1.0 // of the bound, per second without
	guardTrials  = 3   // cuts after which the loss must be half as heavy, or it has another cause
	guardRest    = 10 * time.Second
	guardFree    = 10.0 // seconds: no bound
)

// lossGuard bounds the target where a short queue overflows: it tries whether
// less makes the loss go, and lets it be where it does not.
type lossGuard struct {
	bound       float64 // seconds
	since       Time
	acked, lost float64 // bytes since
	trials      int
	first       float64 // the loss that made it try
	rest        Time    // not to try before
}

func newLossGuard() lossGuard { return lossGuard{bound: guardFree} }

// onAck is called with each acknowledgement of n bytes; target is the delay in
// force, in seconds.
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
	case s.Now < g.rest:
	case loss < guardLoss:
		g.trials = 0
		g.bound = min(guardFree, g.bound*(1+guardGrowth*period.Seconds()))
	case g.trials == guardTrials && loss > g.first/2:
		g.bound, g.trials = guardFree, 0
		g.rest = s.Now.Add(guardRest)
	default:
		if g.trials == 0 || g.trials == guardTrials {
			g.trials, g.first = 0, loss
		}
		g.trials++
		g.bound = guardCut * min(g.bound, target)
	}
	g.since, g.acked, g.lost = s.Now, 0, 0
}
