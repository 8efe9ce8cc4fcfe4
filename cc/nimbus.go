package cc

import (
	"math"
	"time"
)

// Nimbus (Goyal et al., SIGCOMM 2022) keeps the queue short unless elastic cross traffic would take its
// share. It pulses its sending rate, and checks whether cross traffic reacts, as flows do that are clocked by
// their acknowledgements:
//
//	slow start ──(capacity known)──▶ delay ──(elastic: E > 2.25)──▶ competitive
//	     ▲                             ▲                                 │
//	     │                             └────(E < 2, and 5 s passed)──────┘
//	     └───(2 s of silence)─── both
//
// In delay mode the rate follows what the cross traffic leaves of the capacity
// and the queue's distance from its target; in competitive mode it is CUBIC's.
// What the paper leaves open follows its authors' nimbus. The agreement of several flows on one that pulses
// is not implemented.

func init() {
	Register(Spec{
		Name: "nimbus",
		About: "Nimbus: keeps the queue short, and competes as CUBIC does while cross traffic is elastic; for " +
			"links of a fixed rate.",
		Source: "Goyal et al., SIGCOMM 2022",
		Params: []Param{
			{
				Name: "mu_mbit", Unit: "Mbit/s", Default: 0, Min: 0, Max: 1e6,
				About: "the bottleneck's rate, payload only; 0: the largest rate of delivery in the window below",
			},
			{
				Name: "mu_window_s", Unit: "s", Default: 600, Min: 1, Max: 86400,
				About: "how long the largest rate is remembered; beside other flows it cannot be seen again",
			},
			{
				Name: "mode", Default: 0, Choices: []string{"auto", "delay", "competitive"},
				About: "switch with the cross traffic, or stay in one",
			},
			{
				Name: "start", Default: 0, Choices: []string{"delay", "competitive"},
				About: "mode of auto before it has seen enough to decide, which takes 15 s",
			},
			{
				Name: "queue_ratio", Default: 1.25, Min: 1.05, Max: 4,
				About: "round trip that delay mode aims at, as a multiple of the one without a queue",
			},
		},
		New: func(cfg Config) Algorithm { return newNimbus(cfg) },

		Needs: []Signal{NeedsRTT, NeedsSent, NeedsLoss, NeedsTicks, NeedsPacing},
		Internals: []Internal{
			{Name: "mu_mbit", About: "rate of the bottleneck; 0: not known yet"},
			{Name: "cross_mbit", About: "rate of the cross traffic there"},
			{Name: "sent_mbit", About: "rate at which the newest acknowledged bytes left"},
			{Name: "received_mbit", About: "rate at which the same bytes arrived"},
			{Name: "elasticity", About: "average by which the pulse stands out of the cross traffic; above 2.25 it " +
				"is elastic"},
			{Name: "eta", About: "the same at the last look"},
			{Name: "rate_mbit", About: "rate without the pulse"},
			{Name: "base_rtt_ms", About: "least round trip remembered"},
		},
	})
}

const (
	nimbusSmoothing = 0.2   // weight of a new rate in the smoothed one; the largest smoothed rate is the capacity
	nimbusPulse     = 0.25  // height of the pulse, of the capacity
	nimbusLow       = 0.125 // height of competitive mode's, of its rate
	nimbusFloor     = 0.05  // least rate, of the capacity
	nimbusCeiling   = 1.5   // largest rate, of the capacity, which may be more than what was seen of it
	nimbusAlpha     = 0.8   // part of the unused capacity by which the rate changes
	nimbusBeta      = 0.5   // of the capacity, per round trip of distance from the target
	nimbusGain      = 2.0   // windows per round trip that the window allows
	// nimbusSettle is by how much the target falls per sample to its final value
	// after a switch that found a queue.
	nimbusSettle = 0.005

	elasticAbove   = 2.25
	inelasticBelow = 2.0
	nimbusLookFrom = 10 * time.Second // of the run: until then there is too little to see
	nimbusActFrom  = 15 * time.Second // of the run
	nimbusStay     = 5 * time.Second  // in competitive mode, at least

	// nimbusSpan is over how much time rates are measured: a quarter of a pulse,
	// so that it shows. nimbusLeast packets at least.
	nimbusSpan  = 50 * time.Millisecond
	nimbusLeast = 10.0

	// The least round trip is remembered for nimbusBase. A standing queue hides it.
	// So if delay mode has not been within nimbusNear of it for nimbusDrainAfter, it
	// slows down to nimbusDrain of its rate for nimbusDrainRTTs, and again
	// nimbusDrainAgain later if a shorter round trip has shown.
	nimbusBase       = 30 * time.Second
	nimbusNear       = 1.05
	nimbusDrainAfter = 20 * time.Second
	nimbusDrainAgain = 2 * time.Second
	nimbusDrain      = 0.5
	nimbusDrainRTTs  = 3

	nimbusSilence     = 2 * time.Second // without an acknowledgement: start anew
	nimbusSilenceRTTs = 2
)

// nimbusMode is the rule that sets the rate.
type nimbusMode uint8

const (
	nimbusStarting nimbusMode = iota // CUBIC, from slow start on
	nimbusDelay
	nimbusCompetitive
)

func (m nimbusMode) String() string { return [...]string{"slow_start", "delay", "competitive"}[m] }

type nimbus struct {
	cubic
	cfg   Config
	first nimbusMode // after the start
	auto  bool       // the mode follows the cross traffic

	flight         FlightRates
	mu             capacity
	window         time.Duration // for which mu is remembered
	base           windowedFilter
	sent, received float64 // bytes/s; 0: not known yet
	cross          float64 // bytes/s
	rtt            time.Duration

	mode     nimbusMode
	elastic  elasticity
	rate     float64       // bytes/s, without the pulse
	paced    float64       // bytes/s, with it
	extra    float64       // bytes by which the pulse widens the window
	ratio    float64       // target round trip over the least one
	aim      float64       // final value of ratio
	began    Time          // the first acknowledgement; 0: none
	switched Time          // to the present mode
	grid     Time          // when the next sample is due; 0: none is
	looks    int           // samples since the last look
	deadline Time          // when the silence has lasted too long; 0: nothing is awaited
	near     Time          // when the round trip was last near the least one
	drain    Time          // end of the current draining; 0: none
	drained  Time          // two round trips after the end of the last draining; 0: there was none
	covered  time.Duration // least round trip known when the last draining began
}

func newNimbus(cfg Config) *nimbus {
	n := &nimbus{
		cfg:     cfg,
		auto:    cfg.Params["mode"] == 0,
		first:   nimbusDelay,
		mu:      capacity{fixed: mbitToBytes(cfg.Params["mu_mbit"]), slowest: newMinFilter()},
		window:  time.Duration(cfg.Params["mu_window_s"] * float64(time.Second)),
		base:    newMinFilter(),
		elastic: newElasticity(),
		aim:     cfg.Params["queue_ratio"],
	}
	if cfg.Params["mode"] == 2 || n.auto && cfg.Params["start"] == 1 {
		n.first = nimbusCompetitive
	}
	n.restart()
	return n
}

// restart begins anew with slow start, on a path of the capacity that is known.
func (n *nimbus) restart() {
	mss := n.mss
	n.cubic = cubic{lossWindow: newLossWindow(n.cfg), hystart: hystartRFC}
	n.setMSS(mss)
	n.mode, n.ratio = nimbusStarting, n.aim
	n.flight.reset()
	n.base.reset()
	n.elastic.reset()
	n.sent, n.received, n.cross, n.rate, n.paced, n.rtt = 0, 0, 0, 0, 0, 0
	n.began, n.switched, n.grid, n.looks, n.deadline, n.near, n.drain, n.drained = 0, 0, 0, 0, 0, 0, 0, 0
}

func (n *nimbus) OnAck(a Ack) {
	n.OnTick(a.State) // which may be late
	if n.began == 0 {
		n.began, n.near, n.grid = a.Now, a.Now, a.Now.Add(nimbusGrid)
	}
	n.deadline = a.Now.Add(max(nimbusSilence, nimbusSilenceRTTs*a.SRTT))
	if a.RTT > 0 {
		n.rtt = max(a.RTT, minDivisor)
		n.base.addSample(a.Now, n.rtt, nimbusBase)
		if float64(n.rtt) <= nimbusNear*float64(n.base.extreme()) {
			n.near = a.Now
		}
	}
	n.flight.Add(a, nimbusSpan)
	switch n.mode {
	case nimbusStarting:
		n.cubic.OnAck(a)
		n.checkSlowStartEnd(a.State)
	case nimbusCompetitive:
		// The pacer holds the sender back, not the window.
		a.CwndLimited = !a.Sent.AppLimited && n.toPackets(a.Inflight+a.Acked) >= n.cwnd/2
		n.cubic.OnAck(a)
	case nimbusDelay:
	}
}

// checkSlowStartEnd ends the start once slow start has found the capacity, or filled the configured one.
func (n *nimbus) checkSlowStartEnd(s State) {
	mu := n.mu.estimate()
	full := n.mu.fixed > 0 && n.base.n > 0 && n.cwnd*float64(n.mss) >= mu*n.base.extreme().Seconds()
	switch {
	case mu == 0 || n.received == 0 || n.base.n == 0:
	case n.inSlowStart() && !full:
	case n.first == nimbusDelay:
		n.enterDelayMode(s, n.aim) // the queue is our own: no other flow fills it while it drains
	default:
		n.enterCompetitiveMode(s.Now, n.cwnd)
	}
}

// enterDelayMode enters delay mode with a first target.
func (n *nimbus) enterDelayMode(s State, ratio float64) {
	n.mode, n.switched, n.ratio = nimbusDelay, s.Now, max(n.aim, ratio)
	// What filled the queue may have hidden the least round trip.
	n.near, n.drain = s.Now.Add(nimbusStay-nimbusDrainAfter), 0
	n.setRate(s)
}

// enterCompetitiveMode enters competitive mode with a window in packets, as if CUBIC had
// levelled off there.
func (n *nimbus) enterCompetitiveMode(now Time, window float64) {
	mss := n.mss
	n.cubic = cubic{lossWindow: newLossWindow(n.cfg), hasLost: true}
	n.setMSS(mss)
	n.cwnd = n.clampWindow(window, minLossWindow)
	n.ssthresh = n.cwnd
	n.mode, n.switched = nimbusCompetitive, now
}

func (n *nimbus) OnLoss(l Loss) {
	n.setMSS(l.MSS)
	if n.mode != nimbusDelay { // in delay mode losses do not set the rate
		n.cubic.OnLoss(l)
	}
}

// OnTick samples the rates, looks at the spectrum, and shapes the pulse. It
// ends a silence.
func (n *nimbus) OnTick(s State) {
	n.setMSS(s.MSS)
	if n.deadline != 0 && s.Now >= n.deadline {
		n.restart()
	}
	if n.grid == 0 || s.Now < n.grid {
		return
	}
	sent, received, ok := n.flight.Rates(nimbusSpan, Bytes(nimbusLeast*float64(n.mss)))
	if ok {
		n.sent, n.received = sent, received
		n.mu.addRate(s.Now, received, n.window)
	}
	mu := n.mu.estimate()
	n.cross = crossTraffic(mu, n.sent, n.received)
	// The samples of a late tick are all the same. More of them than the history
	// holds are of no use.
	n.grid = max(n.grid, s.Now.Add(-nimbusHistory*nimbusGrid))
	for n.grid <= s.Now {
		n.elastic.addSample(n.cross, n.received, n.rtt)
		n.ratio = max(n.aim, n.ratio-nimbusSettle)
		n.grid = n.grid.Add(nimbusGrid)
		n.looks++
	}
	if n.mode != nimbusStarting {
		n.chooseMode(s, mu)
		n.setRate(s)
	}
}

// chooseMode switches modes by the elasticity of cross traffic.
func (n *nimbus) chooseMode(s State, mu float64) {
	run := s.Now.Sub(n.began)
	if n.looks < nimbusLook || run < nimbusLookFrom {
		return
	}
	n.looks = 0
	if n.drained != 0 && s.Now.Sub(n.drained) < nimbusHistory*nimbusGrid {
		return // without a queue cross traffic cannot be measured, and the draining would dominate the spectrum
	}
	n.elastic.updateElasticity(mu)
	if !n.auto || run < nimbusActFrom {
		return
	}
	switch n.mode {
	case nimbusDelay:
		if n.elastic.value > elasticAbove {
			// Take back the rate that the elastic flows have taken since. Flows that were
			// there before nimbusLookFrom have taken theirs earlier. Then a half is the
			// share beside one of them.
			before := max(n.elastic.receivedAgo(int(nimbusStay/nimbusGrid)), mu/2)
			n.enterCompetitiveMode(s.Now, before*max(n.rtt, minDivisor).Seconds()/float64(n.mss))
		}
	case nimbusCompetitive:
		if n.elastic.value < inelasticBelow && s.Now.Sub(n.switched) >= nimbusStay {
			n.enterDelayMode(s, float64(n.rtt)/float64(n.base.extreme()))
		}
	case nimbusStarting:
	}
}

// setRate sets the rate, and the pulse on top of it.
func (n *nimbus) setRate(s State) {
	mu := n.mu.estimate()
	rtt := max(n.rtt, minDivisor)
	switch n.mode {
	case nimbusDelay:
		n.rate = delayRate(mu, n.cross, n.sent, rtt, n.base.extreme(), n.ratio)
		n.rate = min(max(n.rate, nimbusFloor*mu), nimbusCeiling*mu)
		n.drainForBaseRTT(s)
	case nimbusCompetitive:
		n.rate = n.cwnd * float64(n.mss) / rtt.Seconds()
	case nimbusStarting:
	}
	_, phase := math.Modf(s.Now.Sub(n.began).Seconds() * nimbusPulseHz)
	if n.mode == nimbusDelay {
		n.paced, n.extra = max(n.rate+pulseRate(phase, nimbusPulse*mu), nimbusFloor*mu), 0
		return
	}
	// The window is CUBIC's, and follows the pulse. A rate that is not clocked by
	// acknowledgements keeps sending into a full queue and suffers the losses, and so
	// does a pulse that is high in relation to the flow's own rate.
	height := nimbusLow * min(mu, n.rate)
	n.paced = cubicGain*n.rate + max(0, pulseRate(phase, height))
	n.extra = pulseIntegral(phase, height)
}

// delayRate returns the rate of delay mode in bytes per second. It is the capacity that cross traffic leaves,
// corrected so that the queue reaches its target within a few round trips.
func delayRate(mu, cross, sent float64, rtt, base time.Duration, ratio float64) float64 {
	return sent + nimbusAlpha*(mu-cross-sent) - mu*nimbusBeta/rtt.Seconds()*(rtt.Seconds()-ratio*base.Seconds())
}

// drainForBaseRTT drains the queue when it has hidden the least round trip for long, and again soon after a
// draining that has shown a shorter round trip.
func (n *nimbus) drainForBaseRTT(s State) {
	base := n.base.extreme()
	if n.drain == 0 && s.Now.Sub(n.near) >= nimbusDrainAfter {
		n.drain, n.covered = s.Now.Add(nimbusDrainRTTs*n.rtt), base
	}
	switch {
	case n.drain == 0:
	case s.Now < n.drain:
		n.rate *= nimbusDrain
		n.drained = s.Now.Add(2 * n.rtt)
	default:
		n.near, n.drain = s.Now, 0
		if nimbusNear*float64(base) < float64(n.covered) {
			n.near = s.Now.Add(nimbusDrainAgain - nimbusDrainAfter)
		}
	}
}

// Inspect shows what Spec.Internals lists.
func (n *nimbus) Inspect() Internals {
	const mbit = 8 / 1e6
	return Internals{
		n.mu.estimate() * mbit, n.cross * mbit, n.sent * mbit, n.received * mbit,
		n.elastic.value, n.elastic.eta, n.rate * mbit, toMillis(n.base.extreme()),
	}
}

func (n *nimbus) Control() Control {
	ctl := Control{Phase: n.mode.String(), NextTick: n.grid}
	if n.mode == nimbusStarting {
		ctl.Cwnd = n.toBytes(n.cwnd)
		ctl.PacingRate = n.pacingRate(slowStartGain, n.cwnd, n.srtt)
		if !n.inSlowStart() {
			ctl.Phase = "starting"
		}
		return ctl
	}
	const most = 1e17                                   // bytes/s, still a Rate
	ctl.PacingRate = max(1, Rate(8*min(n.paced, most))) // 0 would not pace
	if n.mode == nimbusCompetitive {
		ctl.Cwnd = n.toBytes(n.cwnd + n.extra/float64(n.mss))
		return ctl
	}
	ctl.Cwnd = n.toBytes(nimbusGain * n.rate * n.rtt.Seconds() / float64(n.mss))
	return ctl
}
