package cc

import "time"

// Copa's mode switching (NSDI 2018 §2.2). Beside flows that fill the queue, 1/delta grows by one per round
// trip and halves at a loss, as Reno's window does. The sign of such flows is a queue that is never nearly
// empty.

type copaMode int

const (
	copaConstant copaMode = iota // delta as set
	copaAuto                     // competitive while the queue is not emptied
	copaCoop                     // always competitive; genericCC's do_ss:tcp_coop
)

const (
	copaMinDelta = 0.004 // 1/packet; with 1/delta of 250 at most, the queue of a wrong guess drains soon
	copaEmpty    = 0.1   // of the highest queueing delay; NSDI 2018 §2.2

	copaEmptyRTTs = 5 // in which the queue is emptied at least once; NSDI 2018 §2.2
	copaMaxRTTs   = 4 // over which the highest delay is taken; genericCC

	// Copa's own oscillation takes up to five round trips. So one window of five
	// without an empty queue proves nothing, but two in a row do. The first one is
	// over at the first round that finds no empty queue in its window.
	copaBusyRounds = 1 + copaEmptyRTTs
	// copaSettleRounds is how long a flow's start keeps the queue filled.
	copaSettleRounds = 10
	// A low delta that meets no loss may be filling the queue by itself:
	// above copaProbeScale times the usual 1/delta, after copaProbeAfter rounds
	// without a loss, the default mode gets copaProbeRounds to empty it.
	copaProbeScale  = 4
	copaProbeAfter  = 20
	copaProbeRounds = 10
)

// copaCompete chooses delta.
type copaCompete struct {
	mode        copaMode
	base, delta float64 // 1/packet: as set, and in force
	competitive bool

	high, low windowedFilter // extremes of the last 4 and 5 round trips
	peak      time.Duration  // highest queueing delay so far
	roundAt   Time           // start of this round trip

	loss     epoch
	lossy    bool // a loss in this round trip
	busy     int  // rounds since the queue was last seen nearly empty
	settle   int  // rounds left in which a flow's start may fill the queue
	lossFree int  // rounds far above the usual 1/delta and without a loss
	probe    int  // rounds left in which the default mode is kept to see whether the queue empties
}

func newCopaCompete(mode copaMode, delta float64) copaCompete {
	return copaCompete{mode: mode, base: delta, high: newMaxFilter(), low: newMinFilter()}
}

func (c *copaCompete) reset() {
	c.competitive = c.mode == copaCoop
	c.delta = c.base
	c.high.reset()
	c.low.reset()
	c.peak, c.roundAt = 0, 0
	c.loss, c.lossy = epoch{}, false
	c.busy, c.settle, c.lossFree, c.probe = 0, 0, 0, 0
}

// beginSettling is called at the end of slow start, which may have left a queue.
func (c *copaCompete) beginSettling() { c.settle = copaSettleRounds }

func (c *copaCompete) addRTTSample(s State, rtt time.Duration) {
	if c.mode != copaAuto {
		return
	}
	c.high.addSample(s.Now, rtt, copaMaxRTTs*s.SRTT)
	c.low.addSample(s.Now, rtt, copaEmptyRTTs*s.SRTT)
}

// onAck acts once per round trip.
func (c *copaCompete) onAck(s State, minRTT time.Duration) {
	if c.mode == copaConstant || c.roundAt != 0 && s.Now.Sub(c.roundAt) < s.SRTT {
		return
	}
	c.roundAt = s.Now
	lossy := c.lossy
	c.lossy = false
	was := c.competitive
	if c.mode == copaAuto {
		c.detectMode(minRTT)
	}
	if was && c.competitive && !lossy {
		c.delta = max(1/(1/c.delta+1), min(copaMinDelta, c.base))
	}
	c.maybeProbe(lossy)
}

// onLoss doubles delta, once per round trip.
func (c *copaCompete) onLoss(l Loss) {
	c.lossy = true
	if c.competitive && c.loss.beginEpoch(l) {
		c.delta = min(2*c.delta, c.base)
	}
}

// detectMode switches between the modes.
func (c *copaCompete) detectMode(minRTT time.Duration) {
	high := c.high.extreme()
	queue := high - minRTT
	if c.peak != 0 && queue > 2*c.peak {
		c.beginSettling() // as when another flow is in its slow start
	}
	c.peak = max(c.peak, queue)
	c.probe = max(0, c.probe-1)
	switch {
	case c.settle > 0:
		c.settle--
		c.busy = 0
	case queueIsNearlyEmpty(minRTT, c.low.extreme(), high):
		c.busy = 0
		c.enterDefaultMode()
	default:
		c.busy++
		if c.busy >= copaBusyRounds && c.probe == 0 {
			c.competitive = true
		}
	}
}

// queueIsNearlyEmpty reports whether the lowest of the recent round trips is within a
// tenth of the way from the least ever to the highest of the recent ones.
func queueIsNearlyEmpty(minRTT, low, high time.Duration) bool {
	return low <= minRTT+noQueue || float64(low) < float64(minRTT)+copaEmpty*float64(high-minRTT)
}

func (c *copaCompete) enterDefaultMode() {
	c.competitive = false
	c.delta = c.base
}

// maybeProbe starts a probe when our own flow may be what fills the queue.
func (c *copaCompete) maybeProbe(lossy bool) {
	if c.mode != copaAuto || !c.competitive || lossy || 1/c.delta <= copaProbeScale/c.base {
		c.lossFree = 0
		return
	}
	c.lossFree++
	if c.lossFree >= copaProbeAfter {
		c.lossFree = 0
		c.probe = copaProbeRounds
		c.enterDefaultMode()
	}
}

func (c *copaCompete) phaseName() string {
	switch {
	case c.competitive:
		return "competitive"
	case c.probe > 0:
		return "probe"
	}
	return "default"
}
