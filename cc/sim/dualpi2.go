package sim

import (
	"math/rand/v2"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// The lanes of a DualPI2 queue.
const (
	classicLane = iota
	l4sLane
)

// DualPI2's parameters (RFC 9332 appendix A.1).
const (
	dualTarget  = 0.015                                        // seconds that classic packets wait
	dualUpdate  = 15 * time.Millisecond                        // between updates of the base probability
	dualLongest = 0.1                                          // seconds of the longest usual round trip
	dualAlpha   = 0.1 * dualTarget / dualLongest / dualLongest // Hz
	dualBeta    = 0.3 / dualLongest                            // Hz
	dualCouple  = 2                                            // k
	// seconds by which packets of the other lane are preferred
	dualShift = 0.05
	// The ramp of the L4S queue: none is marked that waited shorter, each that waited
	// longer, and none behind which the queue holds less than a packet.
	dualRampFrom, dualRampTo = 0.0008, 0.0012 // seconds
	dualMostClassic          = 1.0 / dualCouple / dualCouple
)

// dualPI2 is the coupled queue of RFC 9332 appendix A: a PI controller holds the
// classic queue at its target; packets there signal with the square of its
// probability, those of the L4S queue with its double, or by their own ramp.
type dualPI2 struct {
	passive
	rng     *rand.Rand
	p       float64 // base probability
	before  float64 // waiting time at the last update, in seconds
	updates cc.Time // the next; 0: not begun
}

func (d *dualPI2) lane(_ uint32, ecn Codepoint) int {
	if ecn == ECT1 || ecn == CE {
		return l4sLane
	}
	return classicLane
}

// settle makes the updates that are due by now. Nothing has come or gone since the
// last call, so what had waited at each of them is known.
func (d *dualPI2) settle(now cc.Time, lanes *lanes) {
	if d.updates == 0 {
		d.updates = now.Add(dualUpdate)
	}
	for d.updates <= now {
		if lanes.n == 0 && d.p == 0 && d.before == 0 { // nothing will change
			d.updates = now.Add(dualUpdate)
			return
		}
		waited := max(lanes.waited(classicLane, d.updates), lanes.waited(l4sLane, d.updates))
		d.p += dualAlpha*(waited-dualTarget) + dualBeta*(waited-d.before)
		d.p = min(max(d.p, 0), 1)
		d.before = waited
		d.updates = d.updates.Add(dualUpdate)
	}
}

// pick is a first-come-first-served scheduler that takes L4S packets to have come
// earlier by a fixed time.
func (d *dualPI2) pick(now cc.Time, lanes *lanes) int {
	switch {
	case lanes.each[classicLane].Len() == 0:
		return l4sLane
	case lanes.each[l4sLane].Len() == 0, lanes.waited(l4sLane, now)+dualShift < lanes.waited(classicLane, now):
		return classicLane
	}
	return l4sLane
}

func (d *dualPI2) judge(now cc.Time, lane int, p waitingPacket, lanes *lanes) judgement {
	classic, coupled := d.p*d.p, dualCouple*d.p
	switch {
	case lane == classicLane && draws(d.rng, classic):
		if classic >= dualMostClassic { // marks do not help any more
			return drops
		}
		return signals
	case lane == classicLane:
		return passes
	case coupled >= 1 && draws(d.rng, classic): // nor here: overload
		return drops
	case draws(d.rng, max(coupled, ramp(now.Sub(p.at).Seconds(), lanes.each[lane].bytes))):
		return signals
	}
	return passes
}

// ramp is the L4S queue's own probability of a mark.
func ramp(waited float64, behind cc.Bytes) float64 {
	if behind < OpportunityBytes {
		return 0
	}
	return min(max(0, (waited-dualRampFrom)/(dualRampTo-dualRampFrom)), 1)
}
