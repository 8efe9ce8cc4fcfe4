package cc

import (
	"math"
	"math/rand/v2"
	"time"
)

// bbrBwRounds is how many round trips the bottleneck's rate is remembered: a
// cycle of ProbeBW and two more (Linux bbr_bw_rtts).
const bbrBwRounds = 10

// maxBbrRate bounds what gains make of a rate.
const maxBbrRate Rate = 1 << 60

// scaleBy scales a rate.
func (r Rate) scaleBy(gain float64) Rate {
	if v := float64(r) * gain; v < float64(maxBbrRate) {
		return Rate(v)
	}
	return maxBbrRate
}

// roundMax is the largest of the samples of the last bbrBwRounds round trips.
// Only a sample makes others expire, so that a pause leaves something usable.
type roundMax struct {
	slots [bbrBwRounds]Rate // the largest of each round trip
	round int64             // of the newest sample
}

func (f *roundMax) addRate(round int64, v Rate) {
	for r := max(f.round+1, round-bbrBwRounds+1); r <= round; r++ {
		f.slots[r%bbrBwRounds] = 0
	}
	f.round = round
	s := &f.slots[round%bbrBwRounds]
	*s = max(*s, v)
}

// maxRate is 0 before the first sample.
func (f *roundMax) maxRate() Rate {
	var most Rate
	for _, v := range f.slots {
		most = max(most, v)
	}
	return most
}

// bbrModel is what BBR, version 1 and 3, knows about a path beside its rate: how
// long its round trip is without a queue (RTprop, min_rtt), and how far
// acknowledgements run ahead of the rate because something bunches them.
type bbrModel struct {
	segments
	round    round
	rounds   int64         // round trips so far
	newRound bool          // the newest acknowledgement began one
	rtprop   time.Duration // 0: no sample
	rtpropAt Time          // when it was last seen
	bunched  bunching
	drained  drained
}

// countRound counts round trips.
func (m *bbrModel) countRound(a Ack) {
	m.newRound = m.round.endsWith(a)
	if m.newRound {
		m.rounds++
	}
}

// sampleRate takes a's delivery rate. One that understates the path counts only
// where it says more than is known.
func (b *bbr) sampleRate(a Ack, understates bool) {
	if b.newRound && b.rated {
		b.bwRounds, b.rated = b.bwRounds+1, false
	}
	b.rated = b.rated || a.DeliveryRate > 0
	if a.DeliveryRate > 0 && (!understates || a.DeliveryRate >= b.bw.maxRate()) {
		b.bw.addRate(b.bwRounds, a.DeliveryRate)
	}
}

// sampleRTT takes a's round trip and reports whether what was known is older
// than window; then any sample replaces it.
func (b *bbr) sampleRTT(a Ack, window time.Duration) (expired bool) {
	expired = b.rtprop != 0 && a.Now.Sub(b.rtpropAt) > window
	if a.RTT <= 0 {
		return expired
	}
	switch rtt := max(a.RTT, minDivisor); {
	case b.rtprop == 0:
		b.rtprop, b.rtpropAt = leastAtFirst(a.State, rtt), a.Now
	case rtt <= b.rtprop || expired:
		b.rtprop, b.rtpropAt = rtt, a.Now
	}
	return expired
}

// bdpAt is what fills the path at rate bw without a queue, in packets; 0 while
// one of the two is unknown.
func (m *bbrModel) bdpAt(bw Rate) float64 { return m.toPackets(bw.BytesIn(m.rtprop)) }

// drained is when a sender kept little in flight to see the round trip of the path:
// the delivery rates of what left in that time understate it.
type drained struct {
	from, to Time  // 0: never
	until    Bytes // what must be delivered before that ends; 0: it has
}

func (d *drained) beginDrain(now Time) { d.from = now }

// noteInflight is as long as little is in flight.
func (d *drained) noteInflight(s State) { d.until = max(s.Delivered+s.Inflight, 1) }

// understatesRate reports whether a's delivery rate says nothing; lasts: little is in flight still.
func (d *drained) understatesRate(a Ack, lasts bool) bool {
	if d.until != 0 && !lasts && a.Delivered > d.until {
		d.until, d.to = 0, a.Now
	}
	return d.from != 0 && a.sentTime() >= d.from && (d.until != 0 || a.sentTime() < d.to)
}

const (
	bunchRounds = 5 // round trips to a slot; Linux bbr_extra_acked_win_rtts
	// maxBunch bounds what is allowed for bunching, as time at the bottleneck's
	// rate; Linux bbr_extra_acked_max_us.
	maxBunch = 100 * time.Millisecond
)

// bunching measures by how many packets acknowledgements run ahead of the
// bottleneck's rate, at most, over the last 5 to 10 round trips: links that
// aggregate let nothing through for a while and then all at once.
type bunching struct {
	most   [2]float64 // packets, in this slot and the other
	slot   int
	rounds int   // in this slot
	since  Time  // start of the epoch in which acks are compared with the rate
	acked  Bytes // in it
}

// onAck compares with the rate bw what was acknowledged; cwnd bounds the excess. A
// slot lasts rounds round trips.
func (b *bunching) onAck(a Ack, m *bbrModel, bw Rate, cwnd float64, rounds int) {
	if m.newRound {
		if b.rounds++; b.rounds >= rounds {
			b.rounds = 0
			b.slot ^= 1
			b.most[b.slot] = 0
		}
	}
	expected := bw.BytesIn(a.Now.Sub(b.since))
	if b.acked <= expected {
		b.restartEpoch(a.Now)
		expected = 0
	}
	b.acked = min(b.acked+a.Acked, MaxCwnd)
	b.most[b.slot] = max(b.most[b.slot], min(m.toPackets(b.acked-expected), cwnd))
}

func (b *bunching) restartEpoch(now Time) { b.since, b.acked = now, 0 }

// allowance is what to keep in flight for it, at rate bw.
func (b *bunching) allowance(m *bbrModel, bw Rate) float64 {
	return min(max(b.most[0], b.most[1]), m.toPackets(bw.BytesIn(maxBunch)))
}

// bbrGains is the cycle of ProbeBW: ask for more, drain what that queued,
// cruise. Its mean is 1 (Linux bbr_pacing_gain).
var bbrGains = [8]float64{1.25, 0.75, 1, 1, 1, 1, 1, 1}

// bbrCycle is the place in it.
type bbrCycle struct {
	phase int
	since Time
}

// startCycle begins anywhere but with the draining phase: there is nothing to drain.
func (c *bbrCycle) startCycle(now Time, rng *rand.Rand) {
	c.phase = len(bbrGains) - 1 - rng.IntN(len(bbrGains)-1)
	c.nextPhase(now)
}

func (c *bbrCycle) nextPhase(now Time) { c.phase, c.since = (c.phase+1)%len(bbrGains), now }

func (c *bbrCycle) pacingGain() float64 { return bbrGains[c.phase] }

// phaseIsOver reports whether the phase has done its work: each lasts a round trip,
// but asking goes on until it fills the path, and draining ends as soon as the
// queue has. High and low are the packets in flight that say so.
func (c *bbrCycle) phaseIsOver(now Time, rtprop time.Duration, inflight, high, low float64, lossy bool) bool {
	full := now.Sub(c.since) > rtprop
	switch g := c.pacingGain(); {
	case g > 1:
		return full && (lossy || inflight >= high)
	case g < 1:
		return full || inflight <= low
	default:
		return full
	}
}

// The policer detection of Linux.
const (
	policerMinRounds = 4          // of an interval; bbr_lt_intvl_min_rtts
	policerMaxRounds = 16         // beyond, start anew
	policerLoss      = 50. / 256  // lost over delivered; bbr_lt_loss_thresh
	policerRatio     = 1. / 8     // two rates agree within this part; bbr_lt_bw_ratio
	policerDiff      = Rate(4000) // or this; bbr_lt_bw_diff
	policerUse       = 48         // round trips for which the rate is believed; bbr_lt_bw_max_rtts
)

// policer finds a token bucket on the path: the same rate over two intervals
// that both lose much.
type policer struct {
	bw       Rate // of the last interval, or as found; 0: none
	found    bool
	sampling bool
	rounds   int
	lost     Bytes // of the flow so far

	since         Time // start of the interval; below: as of then
	lostThen      Bytes
	deliveredThen Bytes
}

func (p *policer) restartSampling(s State) {
	p.bw, p.found, p.sampling = 0, false, false
	p.beginInterval(s)
}

func (p *policer) beginInterval(s State) {
	p.since, p.lostThen, p.deliveredThen, p.rounds = s.Now, p.lost, s.Delivered, 0
}

// checkInterval watches for lossy intervals, after each acknowledgement and timeout.
func (p *policer) checkInterval(s State, newRound, lossy, appLimited bool) {
	if !p.sampling {
		if !lossy {
			return
		}
		p.beginInterval(s)
		p.sampling = true
	}
	if appLimited {
		p.restartSampling(s)
		return
	}
	if newRound {
		p.rounds++
	}
	switch {
	case p.rounds < policerMinRounds:
		return
	case p.rounds > policerMaxRounds:
		p.restartSampling(s)
		return
	case !lossy: // an interval ends with a loss, so that the tokens are spent
		return
	}
	lost, delivered := p.lost-p.lostThen, s.Delivered-p.deliveredThen
	took := s.Now.Sub(p.since)
	if delivered <= 0 || float64(lost) < policerLoss*float64(delivered) || took < time.Millisecond {
		return
	}
	p.endInterval(RateOf(delivered, took), s)
}

// endInterval ends an interval that delivered at rate bw.
func (p *policer) endInterval(bw Rate, s State) {
	if p.bw > 0 {
		diff := math.Abs(float64(bw - p.bw))
		if diff <= policerRatio*float64(p.bw) || diff <= float64(policerDiff) {
			p.bw, p.found, p.rounds = p.bw/2+bw/2, true, 0
			return
		}
	}
	p.bw = bw
	p.beginInterval(s)
}
