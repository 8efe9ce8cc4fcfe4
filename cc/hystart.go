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

// linuxHystart ends slow start as Linux's CUBIC does (Ha and Rhee, PFLDnet 2008): at the first round trip that has
// risen, and where acknowledgements that follow each other closely span half of the least round trip. It serves each
// slow start, not the first alone.
type linuxHystart struct {
	round   round
	train   Time          // newest acknowledgement of the train that began with the round
	newest  time.Duration // least round trip of this round; 0: none
	samples int           // of this round
}

// Values of Linux 6, net/ipv4/tcp_cubic.c.
const (
	linuxHystartWindow = 16                   // packets; a smaller window does not end slow start
	linuxHystartGap    = 2 * time.Millisecond // between acknowledgements of one train, at most
)

// endsSlowStart takes an acknowledgement and reports whether slow start ends at a window of cwnd packets. Rises below
// 4 to 16 ms and rounds of fewer than eight samples do not count, as in RFC 9406.
func (h *linuxHystart) endsSlowStart(a Ack, cwnd float64) bool {
	if h.round.endsWith(a) {
		h.train, h.newest, h.samples = a.Now, 0, 0
	}
	if cwnd < linuxHystartWindow {
		return false
	}
	if a.Now.Sub(h.train) <= linuxHystartGap {
		h.train = a.Now
		// Half of it, as the sender is not paced: Linux paces CUBIC under the fq qdisc alone.
		if a.Now.Sub(h.round.start) > a.MinRTT/2 {
			return true
		}
	}
	if a.RTT > 0 {
		h.samples++
		if h.newest == 0 || a.RTT < h.newest {
			h.newest = a.RTT
		}
	}
	rise := min(max(a.MinRTT/hystartDivisor, hystartMinRise), hystartMaxRise)
	return h.samples > hystartSamples && h.newest > a.MinRTT+rise
}
