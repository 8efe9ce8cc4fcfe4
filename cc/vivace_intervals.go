package cc

import (
	"math"
	"time"
)

const (
	// vivaceIntervalPackets is how many packets an interval sends at least, so that
	// one loss does not decide; PCC-Uspace's code.
	vivaceIntervalPackets = 20
	// vivaceMinSamples of the round trip make a slope.
	vivaceMinSamples = 5
	// vivaceGapsPerInterval keeps an interval long enough for them, where
	// acknowledgements come in bunches.
	vivaceGapsPerInterval = 6
	// vivaceGuardPackets have to arrive from behind an interval before all its
	// losses are known: a transport takes three to call one lost (RFC 6675).
	vivaceGuardPackets = 4
	// vivaceMinSent is the part of its rate that an interval must have sent to be
	// judged. Where less than this part comes through, the rate was an overrun.
	vivaceMinSent = 0.75
	// vivaceSignificance is how many standard errors a slope of the round trip must
	// have to count. The utility has it times 900 times the rate, so noise would
	// outweigh all else.
	vivaceSignificance = 2.0
	vivaceGapWeight    = 8 // of the mean time between samples, as in SRTT
	vivacePlan         = 4 // intervals judged together, at most
)

// interval is a time in which the sender keeps one rate. The utility of the rate follows from the bytes
// that left in it.
type interval struct {
	rate          float64 // Mbit/s
	from, due, to Time    // to 0: it has not ended
	acked, lost   Bytes
	before, heard Time // of the last acknowledgement before those of its bytes, and of the last of them
	limited       bool // the application held the sender back
	paused        bool // nothing left for a round trip
	newest        Time // when the newest acknowledged byte left
	slope         slope
}

// containsSent reports whether what left then belongs to it.
func (i *interval) containsSent(left Time) bool {
	return i.from != 0 && left >= i.from && (i.to == 0 || left < i.to)
}

// sentEnough reports whether enough bytes for the rate have left, or some of them were lost. Otherwise a
// policy, the receiver or the transport held the sender back.
func (i *interval) sentEnough(mbit float64) bool {
	wanted := i.rate * mbit / 8 * i.to.Sub(i.from).Seconds()
	return !i.limited && (i.lost > 0 || float64(i.acked) >= vivaceMinSent*wanted)
}

// isUsable reports whether the interval shows the effect of its rate. After a loss few samples are enough.
func (i *interval) isUsable(mbit float64) bool {
	return i.sentEnough(mbit) && !i.paused && (i.lost > 0 || i.slope.n >= vivaceMinSamples)
}

// deliveredRate returns the rate at which the interval's bytes arrived, in Mbit/s.
func (i *interval) deliveredRate(mbit float64) float64 {
	return float64(RateOf(i.acked, max(i.heard.Sub(i.before), i.to.Sub(i.from)))) / mbit
}

// overruns reports whether far fewer bytes arrived than were sent.
func (i *interval) overruns(mbit float64) bool {
	return i.sentEnough(mbit) && i.acked > 0 && i.deliveredRate(mbit) < vivaceMinSent*i.rate
}

// lossRate returns the part of the bytes that was lost.
func (i *interval) lossRate() float64 {
	if i.lost <= 0 {
		return 0
	}
	return float64(i.lost) / float64(i.lost+i.acked)
}

// rttSlope returns the growth of the round trip in seconds per second. It is 0 below noise, and for a
// shrinking round trip, because otherwise draining would add utility. Bytes behind a hole give no samples.
func (i *interval) rttSlope(noise float64) float64 {
	if g := i.slope.slopeValue(); g >= noise {
		return g
	}
	return 0
}

// slope is that of the least-squares line through points that come one by one.
type slope struct {
	n             float64
	x, y          float64 // means
	sxx, sxy, syy float64 // sums of squared deviations, and of products
}

func (s *slope) addPoint(x, y float64) {
	s.n++
	dx, dy := x-s.x, y-s.y
	s.x += dx / s.n
	s.y += dy / s.n
	s.sxx += dx * (x - s.x)
	s.sxy += dx * (y - s.y)
	s.syy += dy * (y - s.y)
}

// slopeValue returns the slope; 0: the points have no extent, or are too far off their line for a slope.
func (s *slope) slopeValue() float64 {
	if s.sxx <= 0 || s.n < 3 {
		return 0
	}
	b := s.sxy / s.sxx
	residual := max(0, s.syy-b*s.sxy) / (s.n - 2)
	if math.Abs(b) < vivaceSignificance*math.Sqrt(residual/s.sxx) {
		return 0
	}
	return b
}

// monitor runs a plan of intervals, one after the other, and collects the results of each. After the last
// one the sender sends at the rate decided last until all bytes are acknowledged or lost.
type monitor struct {
	segments
	unit      float64 // bit/s in a Mbit/s
	intervals [vivacePlan]interval
	planned   int
	sending   int           // index of the current interval; planned: all have ended
	known     int           // number of intervals with complete results
	srtt      time.Duration // 0: unknown
	gap       time.Duration // smoothed, between samples
	sampled   Time          // the newest
	heard     Time          // the newest acknowledgement
	overrun   int           // intervals in a row that overran the path
	through   float64       // delivered rate of the last of them, Mbit/s
}

// packetTime returns how long n packets take at a rate in Mbit/s.
func (m *monitor) packetTime(n, rate float64) time.Duration {
	return time.Duration(n * float64(m.mss) * 8 / (rate * m.unit) * float64(time.Second))
}

// beginPlan begins the intervals with the given rates.
func (m *monitor) beginPlan(now Time, rates ...float64) {
	m.planned, m.sending, m.known = len(rates), 0, 0
	for i, r := range rates {
		m.intervals[i] = interval{rate: r}
	}
	m.openInterval(now)
}

func (m *monitor) openInterval(now Time) {
	i := &m.intervals[m.sending]
	i.from, i.newest = now, now
	i.due = now.Add(max(m.srtt, m.packetTime(vivaceIntervalPackets, i.rate), vivaceGapsPerInterval*m.gap))
}

// intervalEnd returns when the current interval is due to end; 0: there is none.
func (m *monitor) intervalEnd() Time {
	if m.sending >= m.planned {
		return 0
	}
	return m.intervals[m.sending].due
}

// endInterval ends the interval that is due, if one is.
func (m *monitor) endInterval(now Time) {
	if due := m.intervalEnd(); due == 0 || now < due {
		return
	}
	m.intervals[m.sending].to = now
	if m.sending++; m.sending < m.planned {
		m.openInterval(now)
	}
}

// onAck adds a to the interval in which its bytes left, and reports whether it
// completes the plan.
func (m *monitor) onAck(a Ack) (complete bool) {
	if a.RTT > 0 {
		if m.sampled != 0 {
			m.gap += (min(a.Now.Sub(m.sampled), a.SRTT) - m.gap) / vivaceGapWeight
		}
		m.sampled = a.Now
	}
	left := a.sentTime()
	for k := m.known; k < m.planned; k++ {
		i := &m.intervals[k]
		if !i.containsSent(left) {
			continue
		}
		i.acked += a.Acked
		if i.before == 0 {
			i.before = m.heard
		}
		i.heard = a.Now
		i.limited = i.limited || a.Sent.AppLimited
		// To send the bytes of one acknowledgement takes time, be they a batch or a
		// packet at a slow rate. That time is no pause.
		i.paused = i.paused || left.Sub(i.newest)-m.packetTime(m.toPackets(a.Acked), i.rate) > a.SRTT
		i.newest = max(i.newest, left)
		if a.RTT > 0 {
			i.slope.addPoint(left.Sub(i.from).Seconds(), a.RTT.Seconds())
		}
	}
	m.heard = a.Now
	before := m.known
	for m.known < m.planned {
		i := &m.intervals[m.known]
		if i.to == 0 || left < i.to.Add(m.packetTime(vivaceGuardPackets, i.rate)) {
			return false
		}
		m.known++
		if i.overruns(m.unit) {
			m.overrun++
			m.through = i.deliveredRate(m.unit)
		} else {
			m.overrun = 0
		}
	}
	return m.known > before
}

// onLoss charges a loss to the oldest interval that is not fully known, because
// transports report a loss when what left after it arrives.
func (m *monitor) onLoss(lost Bytes) {
	if m.known < m.planned && m.intervals[m.known].from != 0 {
		m.intervals[m.known].lost += lost
	}
}

// planIsUsable reports whether every interval of the plan is usable.
func (m *monitor) planIsUsable() bool {
	for k := range m.planned {
		if !m.intervals[k].isUsable(m.unit) {
			return false
		}
	}
	return true
}
