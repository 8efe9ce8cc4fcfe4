package cc

import (
	"math"
	"time"
)

// ProbeBW and ProbeRTT of BBR version 3 (draft-ietf-ccwg-bbr-06 §5.3.3, §5.3.4).

const (
	bbr3LeastWait   = 2 * time.Second
	bbr3SpreadWait  = time.Second
	bbr3MostRounds  = 63 // between probes, so that Reno has time for its share
	bbr3MostDoubles = 30
)

// bbr3Cycle is the place in the cycle of ProbeBW.
type bbr3Cycle struct {
	acks          bbr3Acks
	sample        bool // what is acknowledged left in a probe that has met no heavy loss
	began         Time // the cycle
	wait          time.Duration
	roundsSinceUp int

	acked    float64 // packets, since inflight_longterm grew
	perStep  float64 // packets to acknowledge for each one that it grows by; infinite: it does not
	doubles  int     // of that growth in this probe
	tooHigh  bool    // the last probe lost much
	cautious bool    // it ended where the one before it lost much
}

// bbr3Acks is the part of the cycle in which acknowledged bytes left.
type bbr3Acks uint8

const (
	bbr3NoProbe  bbr3Acks = iota
	bbr3Refills           // sent at the rate known, to fill the pipe
	bbr3Starts            // a probe is under way, and no acknowledgement of it has come
	bbr3Feedback          // of a probe
	bbr3Stops             // of one that has ended
)

// startDown begins the cycle: less is sent than arrives.
func (b *bbr3) startDown(now Time) {
	c := &b.cycle
	b.lossInRound, b.bwLatest, b.inflightLatest = false, 0, 0
	c.perStep = infinite
	c.roundsSinceUp = b.rng.IntN(2)
	c.wait = bbr3LeastWait + time.Duration(b.rng.Float64()*float64(bbr3SpreadWait))
	c.began, c.acks = now, bbr3Stops
	b.round.start = now
	b.state = bbr3Down
}

// startRefill fills the pipe, so that a probe's losses are not those of a short burst.
func (b *bbr3) startRefill(now Time) {
	c := &b.cycle
	b.resetShortTerm()
	c.doubles, c.acked, c.cautious = 0, 0, false
	c.acks = bbr3Refills
	b.round.start = now
	b.state = bbr3Refill
}

func (b *bbr3) startUp(now Time) {
	b.cycle.acks = bbr3Starts
	b.round.start = now
	b.fullBw.setBaseline(b.sample.rate)
	b.state = bbr3Up
	b.steepenLongTerm()
}

// advanceCycle is UpdateProbeBWCyclePhase of §5.3.3.9.
func (b *bbr3) advanceCycle(a Ack) {
	if !b.fullBw.reached || b.adaptLongTerm(a) {
		return
	}
	switch b.state {
	case bbr3Down:
		if !b.probeDue(a.Now) {
			if in := b.toPackets(a.Inflight); in <= b.longTermWithHeadroom() && in <= b.inflightForRate(b.maxBandwidth()) {
				b.state = bbr3Cruise
			}
		}
	case bbr3Cruise:
		b.probeDue(a.Now)
	case bbr3Refill:
		if b.newRound {
			b.cycle.sample = true
			b.startUp(a.Now)
		}
	case bbr3Up:
		if b.wentFarEnough(a) {
			b.cycle.tooHigh = false // so far
			b.startDown(a.Now)
		}
	}
}

// probeDue begins the next probe if it is due: two to three seconds after the last, or after as many round
// trips as Reno needs to recover from a loss.
func (b *bbr3) probeDue(now Time) bool {
	c := &b.cycle
	reno := min(b.targetInflight(), bbr3MostRounds)
	if now <= c.began.Add(c.wait) && float64(c.roundsSinceUp) < reno {
		return false
	}
	b.startRefill(now)
	return true
}

// targetInflight returns how many packets should be in flight: those that fill the path, or fewer if
// congestion has reduced the window.
func (b *bbr3) targetInflight() float64 { return min(b.bdpAt(b.bandwidth()), b.cwnd) }

// wentFarEnough is IsTimeToGoDown.
func (b *bbr3) wentFarEnough(a Ack) bool {
	if b.cycle.tooHigh && b.toPackets(a.Inflight+a.Acked) > b.inflightLong-1 { // less than a packet of room
		b.cycle.cautious = true
		return true
	}
	if a.CwndLimited && b.cwnd >= b.inflightLong { // the bound, not the path, sets the rate
		b.fullBw.setBaseline(b.sample.rate)
		return false
	}
	return b.fullBw.now
}

// adaptLongTerm updates the long-term model from the acknowledgements of a probe, and reports whether it has
// decided the next state (AdaptLongTermModel of §5.3.3.9, HandleInflightTooHigh of §5.5.10.2).
func (b *bbr3) adaptLongTerm(a Ack) (decided bool) {
	c := &b.cycle
	if c.acks == bbr3Starts && b.newRound {
		c.acks = bbr3Feedback
	}
	if c.acks == bbr3Stops && b.newRound {
		c.sample = false
		c.acks = bbr3NoProbe
		if b.state.isProbeBW() && !b.sample.limited && b.maxBw[1] > 0 {
			b.maxBw = [2]Rate{b.maxBw[1], 0}
		}
		if b.state.isProbeBW() && c.cautious && !c.tooHigh {
			b.startRefill(a.Now)
			return true
		}
	}
	switch {
	case b.lossIsTooHigh():
		return c.sample && b.cutLongTerm(a.Now)
	case b.inflightLong == infinite:
	default:
		b.inflightLong = max(b.inflightLong, b.sample.inflight)
		if b.state == bbr3Up {
			b.raiseLongTerm(a)
		}
	}
	return false
}

// lossIsTooHigh reports whether the flight of the newest byte has lost more than is tolerated.
func (b *bbr3) lossIsTooHigh() bool { return b.sample.lost > b.tolerated*b.sample.inflight }

// cutLongTerm lowers inflight_longterm to the packets in flight at which the losses of a probe have exceeded
// the threshold, once in each probe, and ends the probe.
func (b *bbr3) cutLongTerm(now Time) (decided bool) {
	s := &b.sample
	size := min(s.newlyLost, s.inflight)
	before := s.inflight - size
	prefix := (b.tolerated*before - max(s.lost-size, 0)) / (1 - b.tolerated)
	return b.endProbeAt(now, before+min(max(prefix, 0), size))
}

// endProbeAt ends a probe that found inflight packets to be too many.
func (b *bbr3) endProbeAt(now Time, inflight float64) (decided bool) {
	b.cycle.tooHigh, b.cycle.sample = true, false
	if !b.sample.limited {
		b.inflightLong = max(inflight, bbr3Beta*b.targetInflight(), bbrMinCwnd)
	}
	if b.state == bbr3Up {
		b.startDown(now)
		return true
	}
	return false
}

// steepenLongTerm doubles the number of packets by which inflight_longterm grows in a round trip.
func (b *bbr3) steepenLongTerm() {
	c := &b.cycle
	c.perStep = max(b.cwnd/math.Exp2(float64(c.doubles)), 1)
	c.doubles = min(c.doubles+1, bbr3MostDoubles)
}

// raiseLongTerm raises inflight_longterm while it bounds the flow.
func (b *bbr3) raiseLongTerm(a Ack) {
	c := &b.cycle
	if !a.CwndLimited || b.cwnd < b.inflightLong {
		return
	}
	c.acked += b.toPackets(a.Acked)
	if steps := math.Floor(c.acked / c.perStep); steps >= 1 {
		c.acked -= steps * c.perStep
		b.inflightLong = b.clampWindow(b.inflightLong+steps, bbrMinCwnd)
	}
	if b.newRound {
		b.steepenLongTerm()
	}
}

// longTermWithHeadroom returns inflight_longterm less some room for other flows.
func (b *bbr3) longTermWithHeadroom() float64 {
	if b.inflightLong == infinite {
		return infinite
	}
	return max(b.inflightLong-max(1, bbr3Headroom*b.inflightLong), bbrMinCwnd)
}

// checkMinRTT updates the least round trips of five and of ten seconds, and drains the path to measure them
// again (§5.3.4.3).
func (b *bbr3) checkMinRTT(a Ack, restarted bool) {
	expired := b.shortest != 0 && a.Now.Sub(b.shortestAt) > bbr3RTTInterval
	if rtt := max(a.RTT, minDivisor); a.RTT > 0 && (b.shortest == 0 || rtt < b.shortest || expired) {
		b.shortest, b.shortestAt = rtt, a.Now
	}
	if b.shortest < b.rtprop || b.rtprop == 0 || a.Now.Sub(b.rtpropAt) > bbr3RTTWindow {
		b.rtprop, b.rtpropAt = b.shortest, b.shortestAt
	}
	if expired && !restarted && b.state != bbr3ProbeRTT {
		b.saveCwnd()
		b.state = bbr3ProbeRTT
		b.rttDone = 0
		b.cycle.acks = bbr3Stops
		b.round.start = a.Now
		b.drained.beginDrain(a.Now)
	}
	if b.state != bbr3ProbeRTT {
		return
	}
	b.drained.noteInflight(a.State)
	switch {
	case b.rttDone == 0 && b.toPackets(a.Inflight) <= b.probeRTTCwnd():
		b.rttDone, b.rttRound = a.Now.Add(bbrProbeRTT), false
		b.round.start = a.Now
	case b.rttDone != 0:
		if b.rttRound = b.rttRound || b.newRound; b.rttRound {
			b.endProbeRTT(a.Now)
		}
	}
}

func (b *bbr3) probeRTTCwnd() float64 {
	return max(b.bdpPackets(b.bandwidth(), bbr3ProbeRTTCwnd), bbrMinCwnd)
}

// endProbeRTT continues with the cycle, or with Startup, once ProbeRTT may end.
func (b *bbr3) endProbeRTT(now Time) {
	if b.rttDone == 0 || now <= b.rttDone {
		return
	}
	b.shortestAt = now
	b.cwnd = max(b.cwnd, b.priorCwnd)
	b.resetShortTerm()
	if !b.fullBw.reached {
		b.state = bbr3Startup
		return
	}
	b.startDown(now)
	b.state = bbr3Cruise
}
