package cc

import (
	"math"
	"time"
)

// What the target is made of. The figures were chosen on recorded and generated
// links; docs/decisions/0004-own-algorithm.md tells which, and what came of it.
const (
	targetReference = 10e6 / 8 // bytes/s at which the target is as set
	// targetPower makes flows with more ask for a shorter queue, so that those
	// that share one come to share it evenly.
	targetPower = 0.4
	// targetBasePower lengthens it with a path longer than targetBase: the later a
	// change of the rate is heard of, the more of it the queue must ride out.
	targetBasePower = 0.3
	targetBase      = 0.02 // seconds
	// targetEmpty is the part of the time, as bytes take it at the present rate, that
	// should find the queue as good as empty: less, and the queue is longer than the
	// link needs; more, and the link idles. targetGain is what a difference does to the
	// target's logarithm, within targetLeast and targetMost.
	targetEmpty  = 0.045
	targetGain   = 17
	targetLeast  = -0.7
	targetMost   = 0.25
	targetMemory = time.Minute     // over which the part is counted
	targetPrior  = 4 * time.Second // weight of the first value: whatever the rate is then
	// targetFloor is the part of the base that a window must exceed it by to grow
	// at all where the rate lags behind.
	targetFloor = 1. / 8

	queueEmpty      = 4 * time.Millisecond // and less is no queue: the kernel's clock, and a grant of the base station
	queueEmptyBases = 1. / 32              // of the base, on paths with a round trip that wavers with its length
	queueEmptyParts = 0.5                  // of the time that a segment takes

	gapMemory = time.Second            // of acknowledgements, over which their gaps are averaged
	gapMost   = 200 * time.Millisecond // longer is an outage
)

// queueTarget decides how long a queue to ask for.
type queueTarget struct {
	set        float64 // seconds
	empty, all float64 // seconds' worth of bytes in memory, fading: that found no queue, and of any kind
	gap        float64 // seconds from one acknowledgement to the next, mean over their bytes
	heard      Time
	excess     lossGuard
}

// addAck takes in an acknowledgement of n bytes at rate (bytes/s), and whether
// it found the queue empty. counts is false where that says nothing: the sender
// did not fill its window, or the window was not the target's.
func (t *queueTarget) addAck(now Time, n, rate float64, empty, counts bool) {
	worth := n / rate // in seconds: bytes would count a faster start for longer
	if t.heard == 0 {
		t.all = targetPrior.Seconds()
		t.empty = targetEmpty * t.all
	} else {
		gap := now.Sub(t.heard)
		part := min(1, worth/gapMemory.Seconds())
		t.gap += (min(gap, gapMost).Seconds() - t.gap) * part
		fade := math.Exp(-gap.Seconds() / targetMemory.Seconds())
		t.empty, t.all = t.empty*fade, t.all*fade
	}
	t.heard = now
	if !counts {
		return
	}
	t.all += worth
	if empty {
		t.empty += worth
	}
}

// discountEmpty is called when what found the queue empty did not: the base was too long.
func (t *queueTarget) discountEmpty() { t.empty = min(t.empty, targetEmpty*t.all) }

// emptyShare is the part of the time in which bytes found no queue.
func (t *queueTarget) emptyShare() float64 {
	if t.all <= 0 {
		return targetEmpty
	}
	return t.empty / t.all
}

// targetDelay is the queueing delay asked for at rate (bytes/s) over a path with that
// least round trip.
func (t *queueTarget) targetDelay(rate, base float64) float64 {
	adapted := min(max(targetGain*(t.emptyShare()-targetEmpty), targetLeast), targetMost)
	s := t.set * math.Exp(adapted) * math.Pow(rate/targetReference, -targetPower)
	s *= math.Pow(max(base/targetBase, 1), targetBasePower)
	s = min(s, t.excess.bound)
	return max(s, targetFloor*base, t.gap)
}

// emptyQueueThreshold is the queueing delay up to which there is as good as no queue.
func emptyQueueThreshold(base time.Duration, rate float64, mss Bytes) time.Duration {
	segment := queueEmptyParts * float64(mss) / max(rate, 1)
	serialisation := time.Duration(min(segment, 1) * float64(time.Second))
	return max(queueEmpty, time.Duration(queueEmptyBases*float64(base)), serialisation)
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
