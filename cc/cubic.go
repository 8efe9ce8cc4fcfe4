package cc

import (
	"math"
	"time"
)

// CUBIC as in RFC 9438, with HyStart++ (RFC 9406) for the first slow start.
// Linux's extra growth before the first loss is a setting.

func init() {
	offOn := []string{"off", "on"}
	Register(Spec{
		Name:   "cubic",
		About:  "CUBIC: the window follows a cubic in the time since the last loss; needs losses to stop growing.",
		Source: "RFC 9438; slow start RFC 9406",
		Params: []Param{
			{
				Name: "hystart", About: "leave slow start when the round trip rises: the first one, by RFC 9406; or " +
					"each one, as Linux does", Default: hystartRFC, Choices: []string{"off", "on", "linux"},
			},
			{
				Name: "pre_loss_growth", About: "growth before the first loss and after a timeout: the RFC's, or " +
					"Linux's of at least 5 % per round trip, with a target one least round trip ahead",
				Default: 0, Choices: []string{"rfc", "linux"},
			},
			{
				Name: "pacing", About: "pace at 1.2 windows per round trip, 2 in slow start, as Linux does", Default: 0,
				Choices: offOn,
			},
		},
		New: func(cfg Config) Algorithm {
			return &cubic{
				lossWindow:  newLossWindow(cfg),
				linuxGrowth: cfg.Params["pre_loss_growth"] == 1,
				hystart:     cfg.Params["hystart"],
				paced:       cfg.Params["pacing"] == 1,
			}
		},

		Needs: []Signal{NeedsRTT, NeedsLoss},
		Marks: MarksAreLosses,
		Internals: []Internal{
			showSsthresh,
			{Name: "w_max_packets", About: "window at which the cubic levels off"},
			{Name: "k_seconds", About: "from the start of the epoch until it is reached"},
			{Name: "w_est_packets", About: "what Reno's window would be"},
		},
	})
}

const (
	cubicBeta     = 0.7                                   // RFC 9438 §4.6
	cubicC        = 0.4                                   // packets/s³; RFC 9438 §5
	cubicAlpha    = 3 * (1 - cubicBeta) / (1 + cubicBeta) // packets per round trip; RFC 9438 §4.3
	cubicMaxRise  = 1.5                                   // windows per round trip; RFC 9438 §4.2
	linuxMinRise  = 0.05                                  // of a window per round trip; tcp_cubic.c, cnt ≤ 20
	cubicGain     = 1.2                                   // windows per round trip; tcp_pacing_ca_ratio
	slowStartGain = 2.0                                   // windows per round trip; tcp_pacing_ss_ratio
)

// Choices of the setting hystart.
const hystartRFC, hystartLinux = 1, 2

type cubic struct {
	NoTick
	lossWindow
	linuxGrowth, paced bool
	hystart            float64 // 0: off; hystartRFC, hystartLinux

	hy           hystart
	linux        linuxHystart
	srtt, minRTT time.Duration
	heard        Time // last acknowledgement
	idle         Time // since when nothing was in flight; 0: something is

	epochStart Time    // 0: no epoch yet
	wMax       float64 // window the cubic levels off at; 0: no loss yet, or a timeout since
	hasLost    bool    // wMax stems from a loss
	k          float64 // seconds from the epoch's start to wMax
	wEst       float64 // what Reno would have by now
	cwndPrior  float64 // at the last cut
}

func (c *cubic) OnAck(a Ack) {
	n := c.growthCredit(a)
	c.srtt, c.minRTT = a.SRTT, a.MinRTT
	c.skipIdle(a)
	if c.inSlowStart() {
		slower, exit := 1.0, false
		switch {
		case c.hystart == hystartLinux:
			exit = c.linux.endsSlowStart(a, c.cwnd)
		case c.hystart == hystartRFC && c.ssthresh == c.first:
			slower, exit = c.hy.onAck(a)
		}
		n /= slower
		if exit {
			c.ssthresh = c.cwnd
		}
		n = c.growInSlowStart(n)
	}
	if n > 0 && !c.recovering {
		c.growAlongCubic(a.Now, n)
	}
}

// skipIdle moves the epoch by the time in which the application, not the
// window, held the sender back (RFC 9438 §5.8).
func (c *cubic) skipIdle(a Ack) {
	if c.epochStart != 0 {
		switch left := a.sentTime(); {
		case !a.CwndLimited:
			c.epochStart += a.Now - c.heard
		case c.idle != 0 && left > c.idle:
			c.epochStart += left - c.idle
		}
		c.epochStart = min(c.epochStart, a.Now)
	}
	c.heard, c.idle = a.Now, 0
	if a.Inflight <= 0 {
		c.idle = a.Now
	}
}

// wCubic is W_cubic (RFC 9438 §4.2, equation 1), t seconds into the epoch.
func (c *cubic) wCubic(t float64) float64 {
	d := t - c.k
	return cubicC*d*d*d + c.wMax
}

// growAlongCubic is congestion avoidance for n acknowledged packets.
func (c *cubic) growAlongCubic(now Time, n float64) {
	if c.epochStart == 0 {
		c.epochStart, c.wEst, c.k = now, c.cwnd, 0
		if c.cwnd < c.wMax {
			c.k = math.Cbrt((c.wMax - c.cwnd) / cubicC)
		} else {
			c.wMax = c.cwnd
		}
	}
	n = min(n, c.cwnd)
	t := now.Sub(c.epochStart).Seconds()
	alpha := cubicAlpha
	if c.wEst >= c.cwndPrior {
		alpha = 1
	}
	c.wEst = c.clampWindow(c.wEst+alpha*n/c.cwnd, timeoutWindow)
	next := c.cwnd
	if c.linuxGrowth && !c.hasLost {
		next += n * linuxMinRise
	}
	if c.wCubic(t) < c.wEst { // Reno would be ahead
		next = max(next, c.wEst)
	} else {
		ahead := c.srtt
		if c.linuxGrowth {
			ahead = c.minRTT
		}
		target := min(max(c.wCubic(t+ahead.Seconds()), c.cwnd), cubicMaxRise*c.cwnd)
		next = max(next, c.cwnd+n*(target-c.cwnd)/c.cwnd)
	}
	c.cwnd = c.clampWindow(next, timeoutWindow)
}

func (c *cubic) OnLoss(l Loss) {
	before := c.cwnd
	if c.cutWindow(l, cubicBeta) {
		c.cwndPrior = before
		if before < c.wMax { // fast convergence: make room for newcomers (RFC 9438 §4.7)
			before *= (1 + cubicBeta) / 2
		}
		c.wMax, c.hasLost = before, true
		c.epochStart = 0
	}
	if l.Timeout { // the next epoch starts at its own plateau (RFC 9438 §4.8)
		c.wMax, c.hasLost = 0, false
		c.epochStart = 0
	}
}

// Inspect shows what Spec.Internals lists.
func (c *cubic) Inspect() Internals { return Internals{finiteOrZero(c.ssthresh), c.wMax, c.k, c.wEst} }

func (c *cubic) Control() Control {
	ctl := Control{Cwnd: c.toBytes(c.cwnd), Phase: c.phaseName()}
	if c.paced {
		gain := cubicGain
		if c.cwnd < c.ssthresh/2 {
			gain = slowStartGain
		}
		ctl.PacingRate = c.pacingRate(gain, c.cwnd, c.srtt)
	}
	if ctl.Phase == "slow_start" && c.ssthresh == c.first && c.hy.isConservative() {
		ctl.Phase = "conservative_slow_start"
	}
	return ctl
}
