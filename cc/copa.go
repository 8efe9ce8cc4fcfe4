package cc

import (
	"time"
)

// Copa (Arun & Balakrishnan, NSDI 2018). The window moves towards the one that
// sends at the rate 1/(delta·dq), dq being the standing queueing delay:
//
//	slow start ──(cwnd above target)──▶ ±n·velocity/(delta·cwnd) per ack
//	     ▲                                           │
//	     └──────(timeout, or 2 s of silence)─────────┘
//
// What the paper leaves open follows its authors' genericCC and mvfst's Copa.

// copaDefaultDelta, in 1/packet, keeps a queue that outlasts the pauses of a
// cellular scheduler; docs/decisions/0002-copa-default.md has the sweep.
const copaDefaultDelta = 0.02

// copaPaperDelta is the paper's choice (NSDI 2018 §2.1).
const copaPaperDelta = 0.5

func init() {
	Register(Spec{
		Name:   "copa",
		About:  "Copa: keeps about 1/delta packets in the queue, and so the delay short.",
		Source: "Arun & Balakrishnan, NSDI 2018",
		Params: []Param{
			{
				Name: "delta", Unit: "1/packet", Default: copaDefaultDelta, Min: 0.001, Max: 5,
				About: "weight of delay against throughput: the queue holds about 1/delta packets",
			},
			{
				Name: "mode", Default: float64(copaConstant), Choices: []string{"constant", "auto", "coop"},
				About: "delta as set; lowered against flows that fill the queue; or always as against such flows",
			},
		},
		Profiles: []Profile{
			{
				Name:   "paper",
				About:  "as its paper has it, for links that serve packet by packet",
				Params: Params{"delta": copaPaperDelta, "mode": float64(copaConstant)},
			},
			{
				Name:   "alcc",
				About:  "as the ALCC and MDI experiments ran it: do_ss:auto:0.02",
				Params: Params{"delta": 0.02, "mode": float64(copaAuto)},
			},
		},
		New: func(cfg Config) Algorithm { return newCopa(cfg) },

		Needs: []Signal{NeedsRTT, NeedsPacing},
		Internals: []Internal{
			{Name: "target_packets", About: "window that the standing queue allows; 0: there is no queue"},
			{Name: "velocity", About: "packets per round trip and 1/delta by which the window moves"},
			{Name: "delta", About: "weight of delay in force, 1/packet"},
			{Name: "standing_rtt_ms", About: "least round trip of the last half smoothed one"},
			{Name: "min_rtt_ms", About: "least round trip remembered"},
		},
	})
}

const (
	copaMinCwnd = 2.0 // packets; genericCC
	copaGain    = 2.0 // windows per standing round trip; NSDI 2018 §2.1
	// copaSameDirection is the number of round trips in one direction after
	// which the velocity doubles (NSDI 2018 §2.2).
	copaSameDirection = 3
	// copaMinWindow and copaMinWindowRTTs: the longer of the two is how long the
	// least round trip is remembered (genericCC).
	copaMinWindow     = 10 * time.Second
	copaMinWindowRTTs = 20
	copaSilence       = 2 * time.Second // without an acknowledgement: start anew; genericCC
	copaSilenceRTTs   = 2               // but never less, or a slow path would start anew for ever
	// Above copaMaxLoss, over at least copaLossRTTs and copaLossPackets, the
	// window shrinks by copaLossCut; genericCC.
	copaMaxLoss     = 0.3
	copaLossCut     = 0.7
	copaLossRTTs    = 2
	copaLossPackets = 20.0
	noQueue         = time.Microsecond // a queueing delay up to this is none
)

// direction is where the window has been moving.
type direction int8

const (
	still direction = iota
	rising
	falling
)

type copa struct {
	segments
	initial float64 // packets
	compete copaCompete

	cwnd      float64 // packets
	ssthresh  float64 // packets: slow start ends there at the latest; 0: at the first queue
	slowStart bool
	velocity  float64
	dir       direction
	agreed    int     // turns that kept dir
	snapAt    Time    // start of the turn in which dir is being judged
	snapCwnd  float64 // packets, then

	minRTT, standing windowedFilter
	sampled          Time // newest round-trip sample; 0: none
	deadline         Time // when the silence has lasted too long; 0: no acknowledgement since the start

	lossSince   Time    // start of the period below; 0: none
	acked, lost float64 // packets in it
	timeout     epoch   // what left before the last one counts as lost by it, even if it is reported later
	resend      float64 // packets: half of the window before the last timeout
}

func newCopa(cfg Config) *copa {
	c := &copa{
		segments: segments{cfg.MSS},
		compete:  newCopaCompete(copaMode(cfg.Params["mode"]), cfg.Params["delta"]),
		minRTT:   newMinFilter(),
		standing: newMinFilter(),
	}
	c.initial = c.toPackets(cfg.InitialCwnd)
	c.restart()
	c.ssthresh = c.toPackets(cfg.Ssthresh)
	return c
}

// restart drops all samples of the path, and begins slow start.
func (c *copa) restart() {
	c.cwnd, c.slowStart = c.clampWindow(c.initial, copaMinCwnd), true
	c.resetVelocity(0)
	c.snapAt = 0
	c.minRTT.reset()
	c.standing.reset()
	c.sampled, c.deadline = 0, 0
	c.lossSince, c.acked, c.lost = 0, 0, 0
	c.ssthresh = 0
	c.compete.reset()
}

// resetVelocity sets the velocity to its first value.
func (c *copa) resetVelocity(now Time) {
	c.velocity, c.dir, c.agreed = 1, still, 0
	c.snapAt, c.snapCwnd = now, c.cwnd
}

func (c *copa) OnAck(a Ack) {
	c.OnTick(a.State) // which may be late
	c.deadline = a.Now.Add(max(copaSilence, copaSilenceRTTs*a.SRTT))
	// One event never moves the window by more than a round trip's worth.
	n := min(c.toPackets(a.Acked), c.cwnd)
	c.acked += n
	c.guardLoss(a.State)
	if !c.addRTTSample(a) {
		if c.sampled == 0 && a.RTT <= 0 && a.CwndLimited && c.cwnd < c.resend {
			c.cwnd = min(c.cwnd+n, c.resend) // what a timeout has sent again shows no delay
		}
		return
	}
	c.stepWindow(a, n)
	if !c.slowStart {
		c.compete.onAck(a.State, c.minRTT.extreme())
	}
}

// addRTTSample adds a round trip to the filters, and reports whether they have enough samples.
func (c *copa) addRTTSample(a Ack) bool {
	if a.RTT <= 0 {
		// Bytes that may have been sent twice give no sample (Karn). The last one
		// counts for a round trip.
		return c.sampled != 0 && a.Now.Sub(c.sampled) <= a.SRTT
	}
	rtt := max(a.RTT, minDivisor)
	least := rtt
	if c.sampled != 0 {
		least = min(least, c.minRTT.extreme())
	}
	c.minRTT.addSample(a.Now, rtt, max(copaMinWindow, copaMinWindowRTTs*least))
	if c.sampled != 0 && a.Inflight+a.Acked <= c.mss {
		// With a single segment in flight the receiver may have delayed its
		// acknowledgement, which would look like a queue.
		return false
	}
	c.sampled = a.Now
	c.standing.addSample(a.Now, rtt, a.SRTT/2)
	c.compete.addRTTSample(a.State, rtt)
	return true
}

// targetWindow is the window at which the rate is 1/(delta·dq); infinite without a queue.
func (c *copa) targetWindow() float64 {
	standing := c.standing.extreme()
	dq := standing - c.minRTT.extreme()
	if dq <= noQueue {
		return infinite
	}
	return float64(standing) / (c.compete.delta * float64(dq))
}

// stepWindow moves the window for n acknowledged packets.
func (c *copa) stepWindow(a Ack, n float64) {
	if c.standing.extreme() < c.minRTT.extreme() {
		return // the filters have different windows, and the least round trip has expired first
	}
	target := c.targetWindow()
	up := c.cwnd <= target
	known := c.ssthresh > 0 && c.cwnd >= c.ssthresh
	// While the window is not used, there is no queue, and without this the
	// window would grow for ever.
	grow := a.CwndLimited && c.toPackets(a.Inflight)+n >= c.cwnd/2
	switch {
	case c.slowStart && up && !known:
		if grow {
			c.cwnd = c.clampWindow(c.cwnd+n, copaMinCwnd)
		}
		return
	case c.slowStart:
		c.slowStart = false
		c.resetVelocity(a.Now)
		c.compete.beginSettling()
	case a.Now.Sub(c.snapAt) >= a.SRTT:
		c.updateVelocity(a.Now)
	}
	if up && !grow {
		return
	}
	dir := falling
	if up {
		dir = rising
	}
	if c.velocity > 1 && dir != c.dir {
		c.resetVelocity(a.Now)
		c.dir = dir
	}
	// Beyond this an acknowledgement would move the window by more than a packet.
	c.velocity = min(c.velocity, max(1, c.cwnd*c.compete.delta))
	unit := c.velocity / (c.compete.delta * c.cwnd)
	move := n * unit
	// Packet by packet, the window would turn around at the target: many in one
	// event do not carry it further than one of them.
	if up {
		c.cwnd = min(c.cwnd+move, max(target, c.cwnd+unit))
	} else {
		c.cwnd = max(c.cwnd-move, min(target, c.cwnd-unit))
	}
	c.cwnd = c.clampWindow(c.cwnd, copaMinCwnd)
}

// updateVelocity judges in which direction the window has moved, and doubles the velocity once it has kept its
// direction. It does so once per round trip and the window's lag. More often, the velocity would double
// several times before the queue shows the effect of the first.
func (c *copa) updateVelocity(now Time) {
	dir := still // unused, or at its floor: nothing to speed up
	switch {
	case c.cwnd > c.snapCwnd:
		dir = rising
	case c.cwnd < c.snapCwnd:
		dir = falling
	}
	if dir != c.dir || dir == still {
		c.resetVelocity(now)
		c.dir = dir
		return
	}
	c.agreed++
	if c.agreed >= copaSameDirection {
		c.velocity *= 2
	}
	c.snapAt, c.snapCwnd = now, c.cwnd
}

func (c *copa) OnLoss(l Loss) {
	c.setMSS(l.MSS)
	if l.Timeout {
		if c.sampled != 0 {
			c.resend = c.cwnd / 2 // RFC 5681 §3.1
		}
		c.restart()
		c.timeout.reacted = l.Now
		return
	}
	if c.timeout.covers(l.SentAt) {
		return
	}
	c.lost += c.toPackets(l.Lost)
	c.guardLoss(l.State)
	c.compete.onLoss(l)
}

// guardLoss shrinks the window when a good part of it is lost: a policer or a
// very short queue shows no delay.
func (c *copa) guardLoss(s State) {
	if c.lossSince == 0 {
		c.lossSince = s.Now
	}
	total := c.acked + c.lost
	if s.Now.Sub(c.lossSince) < copaLossRTTs*s.SRTT || total <= copaLossPackets {
		return
	}
	if c.lost > copaMaxLoss*total {
		c.cwnd = c.clampWindow(copaLossCut*c.cwnd, copaMinCwnd)
		// Slow start, or the velocity, would undo the cut within the period.
		if c.slowStart {
			c.slowStart = false
			c.compete.beginSettling()
		}
		c.resetVelocity(s.Now)
	}
	c.lossSince, c.acked, c.lost = s.Now, 0, 0
}

// OnTick ends a silence.
func (c *copa) OnTick(s State) {
	c.setMSS(s.MSS)
	if c.deadline != 0 && s.Now >= c.deadline {
		c.restart()
	}
}

// Inspect shows what Spec.Internals lists.
func (c *copa) Inspect() Internals {
	return Internals{
		finiteOrZero(c.targetWindow()), c.velocity, c.compete.delta, toMillis(c.standing.extreme()),
		toMillis(c.minRTT.extreme()),
	}
}

func (c *copa) Control() Control {
	ctl := Control{
		Cwnd:       c.toBytes(c.cwnd),
		PacingRate: c.pacingRate(copaGain, c.cwnd, c.standing.extreme()),
		NextTick:   c.deadline,
		Phase:      c.compete.phaseName(),
	}
	if c.slowStart {
		ctl.Phase = "slow_start"
	}
	return ctl
}
