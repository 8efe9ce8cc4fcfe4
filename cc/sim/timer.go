package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// The constants of loss detection.
const (
	ReorderPackets = 3                      // RFC 9002 §6.1.1, RFC 5681 §3.2
	minRTO         = 200 * time.Millisecond // Linux's; RFC 6298 §2.4 would have 1 s
	maxRTO         = 60 * time.Second       // RFC 6298 §2.5
	firstRTO       = time.Second            // RFC 6298 §2.1
)

// Timer is a sender's retransmission timer, with the round trips that it goes by (RFC 6298).
type Timer struct {
	srtt, rttvar time.Duration
	latest       time.Duration
	from         cc.Time // when it was last started
	backoff      uint    // doublings, until a round trip is measured
}

// Start starts it.
func (t *Timer) Start(now cc.Time) { t.from = now }

// Measure takes in a round trip. The timer stays backed off until there is one (§5, Karn): else it would
// fire for ever before the answer, where the round trip has grown beyond it.
func (t *Timer) Measure(rtt time.Duration) {
	t.latest, t.backoff = rtt, 0
	if t.srtt == 0 {
		t.srtt, t.rttvar = rtt, rtt/2
		return
	}
	t.rttvar += ((t.srtt - rtt).Abs() - t.rttvar) / 4
	t.srtt += (rtt - t.srtt) / 8
}

// Due is when it fires, if something is on the wire.
func (t *Timer) Due() cc.Time {
	d := firstRTO
	if t.srtt > 0 {
		d = max(minRTO, t.srtt+4*t.rttvar)
	}
	return t.from.Add(min(maxRTO, d<<min(t.backoff, 16)))
}

// Fire has it fire: it starts again, for twice as long.
func (t *Timer) Fire(now cc.Time) {
	t.backoff++
	t.from = now
}

// Patience is how long after a later packet's arrival an earlier one may still
// come (RFC 9002 §6.1.2).
func (t *Timer) Patience() time.Duration {
	return max(t.srtt, t.latest) * 9 / 8
}
