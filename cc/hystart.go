package cc

import "time"

// hystart tells when slow start has begun to fill a queue (RFC 9406, HyStart++):
//
//	standard ──(round trip rises)──▶ conservative ──(5 rounds)──▶ exit
//	    ▲──────────(it was jitter)────────┘
type hystart struct {
	round        round
	last, newest time.Duration // least sample of the previous and of this round; 0: none
	samples      int           // in this round
	baseline     time.Duration // of the conservative phase; 0: standard phase
	rounds       int           // spent in the conservative phase
}

// RFC 9406 §4.3.
const (
	hystartMinRise = 4 * time.Millisecond
	hystartMaxRise = 16 * time.Millisecond
	hystartDivisor = 8 // of the round trip
	hystartSamples = 8 // per round
	hystartSlower  = 4 // growth divisor of the conservative phase
	hystartRounds  = 5
)

// onAck takes an acknowledgement in slow start and returns by how much to
// slow down its growth, and whether to leave slow start.
func (h *hystart) onAck(a Ack) (slower float64, exit bool) {
	if h.round.endsWith(a) {
		h.last, h.newest, h.samples = h.newest, 0, 0
		if h.isConservative() {
			h.rounds++
			exit = h.rounds >= hystartRounds
		}
	}
	if a.RTT > 0 {
		h.samples++
		if h.newest == 0 || a.RTT < h.newest {
			h.newest = a.RTT
		}
	}
	if h.samples >= hystartSamples {
		h.compareRounds()
	}
	if h.isConservative() {
		return hystartSlower, exit
	}
	return 1, exit
}

// compareRounds compares this round's least sample with the one it should be near to.
func (h *hystart) compareRounds() {
	if h.isConservative() {
		if h.newest < h.baseline {
			h.baseline = 0
		}
		return
	}
	rise := min(max(h.last/hystartDivisor, hystartMinRise), hystartMaxRise)
	if h.last != 0 && h.newest >= h.last+rise {
		h.baseline, h.rounds = h.newest, 0
	}
}

func (h *hystart) isConservative() bool { return h.baseline != 0 }
