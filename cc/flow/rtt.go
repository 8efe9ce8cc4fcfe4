package flow

import "time"

// rttEstimator smooths round-trip samples (RFC 6298 §2) and keeps their minimum.
type rttEstimator struct {
	latest, srtt, rttvar, min time.Duration
}

func (e *rttEstimator) addSample(sample time.Duration) {
	sample = max(sample, time.Microsecond) // clocks are coarse; nothing may divide by zero
	e.latest = sample
	if e.srtt == 0 {
		e.srtt, e.rttvar, e.min = sample, sample/2, sample
		return
	}
	e.min = min(e.min, sample)
	e.rttvar += ((e.srtt - sample).Abs() - e.rttvar) / 4
	e.srtt += (sample - e.srtt) / 8
}

// shiftedBy is e for a path whose base round trip is d longer.
func (e rttEstimator) shiftedBy(d time.Duration) rttEstimator {
	for _, rtt := range []*time.Duration{&e.latest, &e.srtt, &e.min} {
		if *rtt > 0 {
			*rtt = max(*rtt+d, time.Microsecond)
		}
	}
	return e
}

// rto is the retransmission timeout the samples suggest (RFC 6298 §2.3, with
// Linux's 200 ms floor); one second before the first sample.
func (e *rttEstimator) rto() time.Duration {
	if e.srtt == 0 {
		return time.Second
	}
	return max(e.srtt+4*e.rttvar, 200*time.Millisecond)
}
