package cc

import "time"

// janusMeter measures throughput and round trip, once per round trip.
type janusMeter struct {
	xi    float64
	round round
	idle  Time // since when nothing was in flight; 0: something is

	// Of the round trip under way.
	acked  Bytes
	paused time.Duration
	least  time.Duration // least sample; 0: none
	unused bool          // part of it was the application's to fill

	// Of the last one.
	smp     float64       // bytes/s
	rtt     time.Duration // least sample; where there was none, the one before's
	limited bool          // it understates the path

	avg  float64       // smp, smoothed; bytes/s
	base time.Duration // least sample of all; 0: none
}

// addAck adds an acknowledgement to the current round trip.
func (m *janusMeter) addAck(a Ack) {
	m.acked += a.Acked
	if left := a.sentTime(); m.idle != 0 && left > m.idle {
		m.paused += left.Sub(m.idle)
	}
	m.idle = 0
	if a.Inflight <= 0 {
		m.idle = a.Now
	}
	m.unused = m.unused || !a.CwndLimited || a.Sent.AppLimited
	if a.RTT <= 0 {
		return
	}
	rtt := max(a.RTT, minDivisor)
	if m.least == 0 || rtt < m.least {
		m.least = rtt
	}
	if m.base == 0 || rtt < m.base {
		m.base = rtt
	}
}

// endsRound reports whether a ends the round trip, and updates the measurements of the last one.
func (m *janusMeter) endsRound(a Ack) bool {
	from := m.round.start
	if !m.round.endsWith(a) {
		return false
	}
	acked, took := m.acked, a.Now.Sub(from)-m.paused
	if m.least > 0 {
		m.rtt = m.least
	}
	m.limited = m.unused
	m.acked, m.paused, m.least, m.unused = 0, 0, 0, false
	if from == 0 || m.rtt == 0 {
		return false
	}
	m.smp = float64(acked) / max(took, minDivisor).Seconds()
	return true
}

// updateAverage smooths the throughput. A round trip that the application did not fill counts only if it
// raises the average.
func (m *janusMeter) updateAverage() {
	if !m.limited || m.smp > m.avg {
		m.avg += m.xi * (m.smp - m.avg)
	}
}

// janusTarget is the rate a flow aims at (TMC 2018, Algorithm 1); rates are in bytes/s.
type janusTarget struct {
	gamma, tau float64
	original   float64 // R; 0: none was given
	floor      float64 // R_min
	now        float64 // R'; 0: not known yet

	since    Time          // the last cut, or the start of the aggressive stage
	sinceRTT time.Duration // round trip then
	cuts     int           // in this aggressive stage
}

// janusCutEvery is how many round trips lie between two cuts, but for the first
// (TMC 2018 §5.2).
const janusCutEvery = 2

// janusMinSigma is the least rise of the round trip that counts as one: clocks
// and schedulers make as much.
const janusMinSigma = time.Millisecond

// setOriginal sets the requested rate; 0: measureTarget sets the target.
func (t *janusTarget) setOriginal(original, floor float64) {
	t.original, t.now, t.floor = original, original, floor
	if original > 0 {
		t.floor = min(floor, original)
	}
}

// unmetBelow returns the throughput below which the target is not met.
func (t *janusTarget) unmetBelow() float64 { return (1 - t.gamma) * t.now }

// beginAggressive starts an aggressive stage.
func (t *janusTarget) beginAggressive(now Time, rtt time.Duration) {
	t.since, t.sinceRTT, t.cuts = now, rtt, 0
}

// cutInterval returns the time until the next cut: at first as long as it takes to regain the target on a
// link with room, and later as long as the effect of the last cut takes.
func (t *janusTarget) cutInterval(rtt time.Duration) time.Duration {
	if t.cuts == 0 {
		return time.Duration(t.tau * t.gamma / (1 - t.gamma) * float64(rtt))
	}
	return janusCutEvery * rtt
}

// lowerTarget cuts the target in an aggressive stage when the queue has grown and
// the target was not met: the link is full. It never falls below floor and least.
func (t *janusTarget) lowerTarget(now Time, rtt, rttvar time.Duration, least float64) {
	if t.since == 0 { // the stage began with the flow
		t.beginAggressive(now, rtt)
	}
	// The mean deviation of a normal distribution is 4/5 of the standard one.
	sigma := max(rttvar+rttvar/4, janusMinSigma)
	if now.Sub(t.since) <= t.cutInterval(rtt) || rtt-t.sinceRTT <= sigma {
		return
	}
	t.now = min(t.now, max(t.unmetBelow(), t.floor, least))
	t.since, t.sinceRTT = now, rtt
	t.cuts++
}

// noteDrainedQueue measures the growth of the queue from rtt, if that is less, after a loss has shortened
// the queue. Since the last cut the buffer may have been full, and then the round trip cannot grow. By the
// paper's rule alone the flow would compete for ever for a rate that the link does not have.
func (t *janusTarget) noteDrainedQueue(rtt time.Duration) { t.sinceRTT = min(t.sinceRTT, rtt) }

// raiseTarget undoes a cut once the flow, in a conservative stage, has more than the target before the cut.
// It never exceeds the requested rate.
func (t *janusTarget) raiseTarget(avg float64) {
	before := t.now / (1 - t.gamma)
	if t.original > 0 {
		before = min(before, t.original)
	}
	if avg > before {
		t.now = before
	}
}
