package cc

import (
	"math"
	"time"
)

// Constants of the window of a scalable sender (draft-briscoe-iccrg-prague-congestion-control §2.4.2 and
// §2.4.4; RFC 8257 §3.3).
const (
	scalableGain  = 1.0 / 16              // of the newest fraction in their average
	scalableRound = 25 * time.Millisecond // shorter round trips count as this

	scalablePatience = 2.0      // times that marks take to come at the latest
	scalableHaste    = 1.0 / 16 // windows per round trip, where there are none
)

// The sign of a classic queue are marks, round trip after round trip, while the queueing delay stays above
// that of any L4S queue (RFC 9331 §4.3).
const (
	classicQueue  = 3 * time.Millisecond // CoDel lets 5 ms stand, PI2 15 ms
	classicSize   = 1.5                  // packets: what stands at an L4S queue of any rate
	classicRounds = 4                    // this many more of them than rounds with a short queue
	classicMost   = 8                    // rounds that are remembered
	classicBase   = 30 * time.Second     // for how long the least round trip is believed
)

// scalable is a window that answers marks on ECT(1) packets in proportion (RFC 9331 §4.3). It shrinks by half
// of alpha, the average fraction of marks, once per round trip. At a classic queue marks halve it, as losses
// do everywhere. Round trips below 25 ms count as 25 ms, so that senders nearby do not get more than others.
type scalable struct {
	lossWindow
	alpha         float64 // average fraction of marked bytes
	acked, marked Bytes   // since the round began
	round         Time    // when it did
	cut           Time    // when the window last shrank
	base          windowedFilter
	least         time.Duration // round trip in this round; 0: no sample
	first         Time          // acknowledgement; 0: none yet
	heard         Time          // when the last mark came, or the first acknowledgement
	classic       int           // rounds with marks on a standing queue, less those on a short one
}

// newScalable returns a window with an alpha of 1, because the first mark does not show how many follow.
func newScalable(w lossWindow) scalable {
	return scalable{lossWindow: w, alpha: 1, base: newMinFilter()}
}

// onAck handles an acknowledgement of bytes that left as ECT(1).
func (s *scalable) onAck(a Ack) {
	s.setMSS(a.MSS)
	s.acked += a.Acked
	s.marked += a.Marked
	if forward := a.RTT - a.ReverseQueue; a.RTT > 0 {
		s.base.addSample(a.Now, forward, classicBase)
		if s.least == 0 || forward < s.least {
			s.least = forward
		}
	}
	if s.first == 0 {
		s.first, s.round = a.Now, a.Now
	}
	if s.heard == 0 || a.Marked > 0 {
		s.heard = a.Now
	}
	if a.Now.Sub(s.round) < virtualRound(a.SRTT) || s.acked == 0 {
		return
	}
	s.alpha += scalableGain * (float64(s.marked)/float64(s.acked) - s.alpha)
	if s.marked > 0 && s.least > 0 {
		if s.queueIsStanding(a.SRTT) {
			s.classic = min(s.classic+1, classicMost)
		} else {
			s.classic = max(s.classic-1, 0)
		}
	}
	s.round, s.acked, s.marked, s.least = a.Now, 0, 0, 0
}

// queueIsStanding reports whether the queue was never short in the round that ends.
func (s *scalable) queueIsStanding(srtt time.Duration) bool {
	packets := time.Duration(classicSize / s.cwnd * float64(srtt))
	return s.least-s.base.extreme() >= max(classicQueue, packets)
}

// isClassic reports whether marks count as losses.
func (s *scalable) isClassic() bool { return s.classic >= classicRounds }

// virtualRound returns the round trip, or 25 ms if that is longer.
func virtualRound(rtt time.Duration) time.Duration { return max(rtt, scalableRound) }

// answerMark shrinks the window if a has a mark, at most once in a round trip.
func (s *scalable) answerMark(a Ack) {
	switch {
	case a.Marked == 0 || a.sentTime() <= s.first: // nothing is paced before there is a round trip
	case s.isClassic():
		s.cutWindow(Loss{State: a.State, SentAt: a.sentTime()}, renoBeta)
	case s.cut == 0 || a.Now.Sub(s.cut) >= virtualRound(a.SRTT):
		s.cut = a.Now
		s.cwnd = s.clampWindow(s.cwnd*(1-s.alpha/2), minLossWindow)
		s.ssthresh = s.cwnd
	}
}

// growUnmarked grows the window for unmarked bytes: by a packet per round trip of 25 ms or more, and by
// proportionally less per shorter ones.
func (s *scalable) growUnmarked(a Ack) {
	if s.isClassic() {
		s.growWindow(s.growthCredit(a))
		return
	}
	a.Acked -= min(a.Marked, a.Acked)
	n := s.growthCredit(a)
	if s.inSlowStart() {
		n = s.growInSlowStart(n)
	}
	s.growLinearly(n * scalableGrowth(a.SRTT))
}

// growFaster grows a window without recent marks by a sixteenth per round trip. A sender alone at a queue that
// marks above a threshold gets a mark every sqrt(cwnd / 2) round trips (RFC 8257 §1; Alizadeh et al.,
// SIGMETRICS 2011). Twice that time without a mark shows that the link has room.
func (s *scalable) growFaster(a Ack) {
	period := math.Sqrt(s.cwnd/2/scalableGrowth(a.SRTT)) * a.SRTT.Seconds()
	if !s.isClassic() && a.Marked == 0 && a.Now.Sub(s.heard).Seconds() > scalablePatience*period {
		s.cwnd = s.clampWindow(s.cwnd+s.growthCredit(a)*scalableHaste, minLossWindow)
	}
}

// scalableGrowth returns by how many packets per round trip the window grows.
func scalableGrowth(rtt time.Duration) float64 {
	part := float64(max(rtt, minDivisor)) / float64(virtualRound(rtt))
	return part * part
}

// pacingGain returns how many windows are paced out in a round trip, because an L4S queue has no room for bursts.
func (s *scalable) pacingGain() float64 {
	if s.cwnd < s.ssthresh/2 {
		return slowStartGain
	}
	return 1
}
