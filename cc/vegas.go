package cc

import (
	"math"
	"time"
)

// Vegas (Brakmo & Peterson 1994) with the constants and the integer arithmetic
// of Linux's tcp_vegas.c, which together settle at 2 to 5 queued packets.

func init() {
	Register(Spec{
		Name:   "vegas",
		About:  "Vegas: keeps two to five packets of its own in the queue; yields to loss-based flows.",
		Source: "Brakmo & Peterson, SIGCOMM 1994; Linux tcp_vegas.c",
		New:    func(cfg Config) Algorithm { return &vegas{lossWindow: newLossWindow(cfg), beta: vegasBeta, start: 1} },

		Needs:     []Signal{NeedsRTT, NeedsLoss},
		Marks:     MarksAreLosses,
		Internals: []Internal{showSsthresh, {Name: "base_rtt_ms", About: "least round trip of all"}},
	})
}

// tcp_vegas.c, in queued packets.
const (
	vegasAlpha = 2 // fewer: grow
	vegasBeta  = 4 // more: shrink
	vegasGamma = 1 // more: leave slow start
	// vegasMinAcks is how many acknowledgements of a round are too few to trust
	// its least round trip: delay of the acknowledgement may be in all of them.
	vegasMinAcks = 2
	vegasMinCwnd = 2.0 // packets
	// vegasKeep is the part of the window below which ssthresh never stays:
	// Linux's tcp_current_ssthresh.
	vegasKeep = 0.75
)

type vegas struct {
	NoTick
	lossWindow
	beta  float64       // queued packets; more: shrink
	start float64       // packets by which slow start grows for each that arrives
	base  time.Duration // least sample of all; 0: none
	round round
	least time.Duration // least sample of this round; 0: none
	acks  float64       // acknowledgements with a sample in this round
	idle  bool          // nothing was in flight after the last event
}

func (v *vegas) OnAck(a Ack) {
	n := v.growthCredit(a)
	if v.recovering || v.idle {
		// Vegas pauses in recovery and starts afresh after a pause.
		v.restart(a.Now)
	}
	v.idle = a.Inflight <= 0
	v.addRTTSample(a)
	switch {
	case v.recovering:
		v.growWindow(n)
	case !v.round.endsWith(a):
		if v.inSlowStart() {
			v.growInSlowStart(v.start * n)
		}
	default:
		v.adjustWindow(n, a.CwndLimited)
		v.least, v.acks = 0, 0
	}
}

func (v *vegas) restart(now Time) {
	v.round.start = now
	v.least, v.acks = 0, 0
}

func (v *vegas) addRTTSample(a Ack) {
	if a.RTT <= 0 {
		return
	}
	rtt := max(a.RTT, minDivisor)
	if v.base == 0 || rtt < v.base {
		v.base = rtt
	}
	if v.least == 0 || rtt < v.least {
		v.least = rtt
	}
	// An event for many packets stands for the acknowledgements a receiver
	// sends at the least, one for every second segment (RFC 5681 §4.2).
	v.acks += max(1, v.toPackets(a.Acked)/2)
}

// adjustWindow adjusts the window once per round; n packets may grow it.
func (v *vegas) adjustWindow(n float64, limited bool) {
	if v.acks <= vegasMinAcks {
		v.growWindow(n)
		return
	}
	// whole nanoseconds: the quotients below are exact where they should be
	base, rtt := float64(v.base), float64(v.least)
	queued := math.Trunc(v.cwnd * (rtt - base) / base)
	switch {
	case v.inSlowStart() && queued > vegasGamma:
		target := math.Trunc(v.cwnd * base / rtt)
		v.cwnd = min(v.cwnd, target+1)
		v.ssthresh = min(v.ssthresh, v.cwnd)
	case v.inSlowStart():
		v.growInSlowStart(v.start * n)
	case queued > v.beta:
		v.cwnd--
		v.ssthresh = min(v.ssthresh, v.cwnd)
	case queued < vegasAlpha && limited:
		v.cwnd++
	}
	v.cwnd = v.clampWindow(v.cwnd, vegasMinCwnd)
	v.ssthresh = max(v.ssthresh, vegasKeep*v.cwnd)
}

func (v *vegas) OnLoss(l Loss) {
	v.cutWindow(l, renoBeta)
	v.restart(l.Now)
}

// Inspect shows what Spec.Internals lists.
func (v *vegas) Inspect() Internals { return Internals{finiteOrZero(v.ssthresh), toMillis(v.base)} }

func (v *vegas) Control() Control { return Control{Cwnd: v.toBytes(v.cwnd), Phase: v.phaseName()} }
