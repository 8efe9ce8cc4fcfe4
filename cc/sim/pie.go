package sim

import (
	"math/rand/v2"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// PIE's parameters (RFC 8033 §4 and §5).
const (
	pieTarget  = 0.015                 // QDELAY_REF, seconds that packets wait
	pieUpdate  = 15 * time.Millisecond // T_UPDATE
	pieAlpha   = 0.125                 // Hz
	pieBeta    = 1.25                  // Hz
	pieBurst   = 150 * time.Millisecond
	pieMark    = 0.1  // above that probability marks do not help any more
	pieLargest = 0.25 // seconds: such a wait has the probability rise faster
)

// pie is RFC 8033 with the waiting time of the packet at the head: what comes is dropped, or
// marked, with a probability that a PI controller sets.
type pie struct {
	passive
	rng     *rand.Rand
	p       float64
	before  float64       // waiting time at the last update, in seconds
	allowed time.Duration // burst that passes yet
	updates cc.Time       // the next; 0: not begun
}

// admit is RFC 8033 §4.1.
func (d *pie) admit(_ cc.Time, lane int, _ waitingPacket, lanes *lanes) judgement {
	switch {
	case d.allowed > 0,
		d.before < pieTarget/2 && d.p < 0.2,
		lanes.each[lane].bytes <= 2*OpportunityBytes,
		d.rng.Float64() >= d.p:
		return passes
	case d.p > pieMark:
		return drops
	}
	return signals
}

// settle makes the updates that are due by now (RFC 8033 §4.2 and §4.4).
func (d *pie) settle(now cc.Time, lanes *lanes) {
	if d.updates == 0 {
		d.updates, d.allowed = now.Add(pieUpdate), pieBurst
	}
	for d.updates <= now {
		if lanes.n == 0 && d.p < 1e-6 && d.before == 0 { // nothing will change
			d.p, d.allowed = 0, pieBurst
			d.updates = now.Add(pieUpdate)
			return
		}
		waited := lanes.waited(0, d.updates)
		step := (pieAlpha*(waited-pieTarget) + pieBeta*(waited-d.before)) * d.scale()
		if d.p >= 0.1 {
			step = min(step, 0.02) // §5.5
		}
		if d.p += step; waited > pieLargest {
			d.p += 0.02 // as Linux does
		}
		if waited == 0 && d.before == 0 {
			d.p *= 0.98
		}
		d.p = min(max(d.p, 0), 1)
		if d.allowed -= pieUpdate; d.p == 0 && waited < pieTarget/2 && d.before < pieTarget/2 {
			d.allowed = pieBurst
		}
		d.before = waited
		d.updates = d.updates.Add(pieUpdate)
	}
}

// scale has small probabilities change in small steps.
func (d *pie) scale() float64 {
	bound, scale := 0.1, 1.0/2
	if d.p >= bound {
		return 1
	}
	for _, next := range [...]float64{0.01, 0.001, 0.0001, 0.00001, 0.000001} {
		if d.p >= next {
			return scale
		}
		scale /= 4
	}
	return scale
}
