package cc

import (
	"math"
	"math/rand/v2"
	"time"
)

// PCC Vivace (Dong et al., NSDI 2018) experiments continuously. Time is divided into intervals with one rate
// each. Throughput, growth of the round trip and loss give the utility of that rate. The rate follows the
// slope of the utility:
//
//	Starting ──(twice the rate is worth less)──▶ Probing ◀─┐ the pairs disagree,
//	  ▲  doubles                          1±ε, two pairs ──┘ or too little comes through
//	  │                                    │          ▲
//	  │                     the pairs agree│          │the slope turns
//	  │                                    ▼          │
//	  └──(2 s of silence)               Moving: rate += θ·slope
//
// Utility, steps and bounds are the paper's. The lengths of intervals, the order of the pairs and the least
// step are those of its authors' code, PCC-Uspace. As there, a shrinking round trip adds no utility. An
// interval's bytes are those that left in it. Until all of them are acknowledged or lost, the sender decides
// nothing, also in Starting, and sends at the rate decided last.

func init() {
	Register(Spec{
		Name: "vivace",
		About: "PCC Vivace: tries rates, weighs throughput against growing delay and loss, and climbs; " +
			"for links of a fixed rate: where the rate wanders it fills the queue.",
		Source: "Dong et al., NSDI 2018; PCC-Uspace",
		Params: []Param{
			{
				Name: "epsilon", Default: 0.05, Min: 0.005, Max: 0.5,
				About: "part of the rate by which probes go above and below it",
			},
			{
				Name: "latency", Default: 900, Min: 0, Max: 1e6,
				About: "weight of the round trip's growth; 0: only loss counts",
			},
			{
				Name: "loss", Default: 11.35, Min: 0, Max: 1e7,
				About: "weight of loss, times the rate; in uspace's rules by itself",
			},
			{
				Name: "max_rate", Unit: "Mbit/s", Default: 10_000, Min: 1, Max: 1e6,
				About: "never send faster",
			},
			{
				Name: "overrun", Default: 1, Choices: []string{"ignore", "follow"},
				About: "while less than three quarters of the rate comes through: probe on, or fall to three " +
					"quarters of what does",
			},
			{
				Name: "rules", Choices: []string{"paper", "uspace"},
				About: "whose steps, bounds and form of the utility",
			},
		},
		Profiles: []Profile{{
			Name:   "uspace",
			About:  "the constants of its authors' code, which tolerates no loss",
			Params: Params{"epsilon": 0.02, "latency": 900, "loss": 1e6, "rules": float64(vivaceUspace), "overrun": 0},
		}, {
			Name:   "paper",
			About:  "rates change as its paper has it and in no other way, however little comes through",
			Params: Params{"overrun": 0},
		}, {
			Name:   "loss",
			About:  "the paper's loss-based variant, which holds its own against flows that fill the queue",
			Params: Params{"latency": 0},
		}},
		New: func(cfg Config) Algorithm { return newVivace(cfg) },

		Needs: []Signal{NeedsRTT, NeedsLoss, NeedsTicks, NeedsPacing},
		Internals: []Internal{
			{Name: "rate_mbit", About: "the rate around which it probes or from which it moves"},
			{Name: "utility", About: "of the last interval"},
			{Name: "gradient", About: "utility per Mbit/s, as of the last decision"},
			{Name: "streak", About: "steps in one direction"},
			{Name: "bound", About: "part of the rate by which the next step may change it"},
			{Name: "rtt_slope", About: "growth of the round trip in the last interval, s/s; 0: none, or noise"},
			{Name: "loss_percent", About: "in the last interval"},
		},
	})
}

const (
	vivacePaper = iota
	vivaceUspace
)

// vivaceRules are the differences between paper and code.
type vivaceRules struct {
	noise      float64 // least slope of the round trip that counts
	leastBound float64 // on a step, as a part of the rate
	widen      float64 // by which the bound grows each time it binds
	mbit       float64 // bit/s in their Mbit/s
	// loss counts by itself, not times the rate; the second pair alone gives the slope; steps grow by a tenth
	code bool
}

var vivaceRulesOf = [...]vivaceRules{
	vivacePaper:  {noise: 0.01, leastBound: 0.05, widen: 0.1, mbit: 1e6}, // NSDI 2018 §4, §6
	vivaceUspace: {noise: 0.02, leastBound: 0.1, widen: 0.05, mbit: 1 << 20, code: true},
}

const (
	vivaceExponent  = 0.9  // of the rate in the utility; NSDI 2018 §4.1
	vivaceAmplifier = 10.0 // of the code's first step, growing by 1 with each,
	vivaceStep      = 0.1  // the part of the amplified step that is taken; PCC-Uspace
	vivaceMinStep   = 0.01 // of the rate; PCC-Uspace
	vivaceMinRate   = 0.1  // Mbit/s
	// The window is this many round trips at the rate, and these packets, so that
	// pacing is what limits the sender.
	vivaceWindows = 2
	vivaceExtra   = 10
	// vivaceOverruns is how many intervals in a row must overrun the path to be
	// followed at once.
	vivaceOverruns = 2
	// vivaceFirstRTT stands for the round trip before it is known.
	vivaceFirstRTT = 100 * time.Millisecond
	vivaceSilence  = 2 * time.Second // without an acknowledgement: start anew
)

type vivaceState uint8

const (
	vivaceStarting vivaceState = iota
	vivaceProbing
	vivaceMoving
)

var vivacePhases = [...]string{"starting", "probing", "moving"}

// worth is a rate with its utility; rate 0: none.
type worth struct{ rate, utility float64 }

type vivace struct {
	monitor
	vivaceRules
	rng                        *rand.Rand
	epsilon, latency, lossCost float64
	most                       float64 // Mbit/s
	follow                     bool    // the parameter overrun
	initial                    float64 // packets

	state     vivaceState
	rate      float64 // Mbit/s
	started   bool    // the first round trip is known
	last      worth   // of the rate before this one
	highFirst bool    // of the four probes, the first is above the rate
	streak    int     // τ: steps in one direction
	rising    bool    // that direction
	bound     float64 // on the next step, as a part of the rate
	gradient  float64
	timedOut  bool  // since the last acknowledgement
	expiry    epoch // what left before the last timeout counts as lost by it, even if it is reported later
	deadline  Time  // when the silence has lasted too long; 0: nothing is in flight

	utility, slope, loss float64 // of the interval judged last
}

func newVivace(cfg Config) *vivace {
	p := cfg.Params
	v := &vivace{
		vivaceRules: vivaceRulesOf[int(p["rules"])],
		rng:         cfg.Rand,
		epsilon:     p["epsilon"], latency: p["latency"], lossCost: p["loss"],
		most: p["max_rate"], follow: p["overrun"] != 0,
	}
	v.segments, v.monitor.unit = segments{cfg.MSS}, v.mbit
	v.bound = v.leastBound
	v.initial = v.toPackets(cfg.InitialCwnd)
	v.rate = v.clampRate(v.mbitPerSecond(cfg.InitialCwnd, vivaceFirstRTT))
	return v
}

func (v *vivace) mbitPerSecond(n Bytes, d time.Duration) float64 {
	return float64(RateOf(n, d)) / v.mbit
}

func (v *vivace) clampRate(r float64) float64 { return min(max(r, vivaceMinRate), v.most) }

// utilityOf returns the utility of a rate x in Mbit/s, at which the round trip grows by
// slope and a part loss of the packets is lost (NSDI 2018 §4.1, eq. 1).
func (v *vivace) utilityOf(x, slope, loss float64) float64 {
	cost := v.lossCost * loss
	if !v.code {
		cost *= x
	}
	return math.Pow(x, vivaceExponent) - v.latency*x*slope - cost
}

// utilityOfInterval returns the utility of interval k.
func (v *vivace) utilityOfInterval(k int) float64 {
	i := &v.intervals[k]
	v.slope, v.loss = i.rttSlope(v.noise), i.lossRate()
	v.utility = v.utilityOf(i.rate, v.slope, v.loss)
	return v.utility
}

// streakFactor returns the factor of the streak's next step (NSDI 2018 §4.2). It grows with τ, faster beyond
// three.
func (v *vivace) streakFactor(streak int) float64 {
	tau := float64(streak)
	switch {
	case v.code:
		return vivaceStep * (vivaceAmplifier + tau - 1)
	case tau <= 3:
		return tau
	default:
		return 2*tau - 3
	}
}

// boundedStep returns by how much a gradient moves rate r. A step beyond the bound widens the bound for the
// next one.
func (v *vivace) boundedStep(gradient, r float64) float64 {
	size := v.streakFactor(max(v.streak, 1)) * math.Abs(gradient)
	if most := v.bound * r; size > most {
		size = most
		v.bound += v.widen
	} else {
		v.bound = v.leastBound
	}
	return math.Copysign(max(size, vivaceMinStep*r), gradient)
}

// beginState begins the intervals that state calls for.
func (v *vivace) beginState(now Time, state vivaceState) {
	v.state = state
	if state != vivaceProbing {
		v.beginPlan(now, v.rate)
		return
	}
	v.streak, v.bound = 0, v.leastBound
	high, low := v.rate*(1+v.epsilon), v.rate*(1-v.epsilon)
	if v.highFirst = v.rng.IntN(2) == 0; v.highFirst {
		v.beginPlan(now, high, low, low, high)
	} else {
		v.beginPlan(now, low, high, high, low)
	}
}

func (v *vivace) OnAck(a Ack) {
	v.setMSS(a.MSS)
	v.srtt = a.SRTT
	v.timedOut = false
	v.OnTick(a.State) // which may be late
	v.deadline = 0
	if a.Inflight > 0 {
		v.deadline = a.Now.Add(max(vivaceSilence, 2*a.SRTT))
	}
	if !v.started && a.SRTT > 0 {
		v.started = true
		v.rate = v.clampRate(v.mbitPerSecond(v.segments.toBytes(v.initial), max(a.SRTT, minDivisor)))
		v.beginState(a.Now, vivaceStarting)
		return
	}
	complete := v.onAck(a)
	if v.follow && v.overrun >= vivaceOverruns {
		v.overrun = 0
		v.rate = v.clampRate(vivaceMinSent * v.through)
		v.beginState(a.Now, vivaceProbing)
		return
	}
	if !complete {
		return
	}
	if !v.planIsUsable() {
		v.beginState(a.Now, v.state) // again
		return
	}
	switch v.state {
	case vivaceStarting:
		v.decideStart(a.Now)
	case vivaceProbing:
		v.decideProbes(a.Now)
	case vivaceMoving:
		v.decideMove(a.Now)
	}
}

// decideStart doubles the rate as long as the utility grows. Where only loss counts, a deep buffer delays
// the end.
func (v *vivace) decideStart(now Time) {
	u := v.utilityOfInterval(0)
	if v.last.rate > 0 && (u < v.last.utility || v.follow && v.intervals[0].overruns(v.mbit)) {
		v.rate = v.last.rate
		v.beginState(now, vivaceProbing)
		return
	}
	v.last = worth{v.rate, u}
	if v.rate >= v.most {
		v.beginState(now, vivaceProbing)
		return
	}
	v.rate = v.clampRate(2 * v.rate)
	v.beginState(now, vivaceStarting)
}

// decideProbes compares the two pairs of probes.
func (v *vivace) decideProbes(now Time) {
	var high, low [2]float64 // utilities, of each pair
	for pair := range 2 {
		first, second := v.utilityOfInterval(2*pair), v.utilityOfInterval(2*pair+1)
		if v.highFirst == (pair == 0) {
			high[pair], low[pair] = first, second
		} else {
			low[pair], high[pair] = first, second
		}
	}
	rising := high[0] > low[0]
	if rising != (high[1] > low[1]) {
		v.beginState(now, vivaceProbing)
		return
	}
	u := [2]float64{(low[0] + low[1]) / 2, (high[0] + high[1]) / 2}
	if v.code {
		u = [2]float64{low[1], high[1]}
	}
	v.gradient = (u[1] - u[0]) / (2 * v.epsilon * v.rate)
	v.rising, v.streak = rising, 1
	if rising {
		v.last = worth{v.rate * (1 + v.epsilon), u[1]}
	} else {
		v.last = worth{v.rate * (1 - v.epsilon), u[0]}
	}
	v.rate = v.clampRate(v.last.rate + v.boundedStep(v.gradient, v.last.rate))
	v.beginState(now, vivaceMoving)
}

// decideMove moves the rate again while the slope keeps its sign.
func (v *vivace) decideMove(now Time) {
	u := v.utilityOfInterval(0)
	if v.rate == v.last.rate { // at the floor or the ceiling
		v.beginState(now, vivaceProbing)
		return
	}
	v.gradient = (u - v.last.utility) / (v.rate - v.last.rate)
	if (v.gradient > 0) != v.rising {
		v.streak, v.bound = 0, v.leastBound
		v.rate = v.clampRate(v.last.rate + v.boundedStep(v.gradient, v.last.rate))
		v.beginState(now, vivaceProbing)
		return
	}
	v.last = worth{v.rate, u}
	v.streak++
	v.rate = v.clampRate(v.rate + v.boundedStep(v.gradient, v.rate))
	v.beginState(now, vivaceMoving)
}

func (v *vivace) OnLoss(l Loss) {
	v.setMSS(l.MSS)
	v.endInterval(l.Now)
	if !l.Timeout && v.expiry.covers(l.SentAt) {
		return
	}
	v.onLoss(l.Lost)
	if !l.Timeout {
		return
	}
	v.expiry.reacted = l.Now
	if !v.timedOut { // as RFC 5681 §3.1: once until something is acknowledged
		v.timedOut = true
		v.rate = v.clampRate(v.rate / 2)
	}
	v.restart(l.Now)
}

// restart begins new intervals at the current rate.
func (v *vivace) restart(now Time) {
	v.last = worth{}
	if !v.started {
		return
	}
	if v.state == vivaceMoving {
		v.state = vivaceProbing
	}
	v.beginState(now, v.state)
}

// OnTick ends an interval, or a silence.
func (v *vivace) OnTick(s State) {
	v.setMSS(s.MSS)
	if v.deadline != 0 && s.Now >= v.deadline {
		v.deadline = 0
		v.state = vivaceStarting
		v.restart(s.Now)
		return
	}
	v.endInterval(s.Now)
}

// currentRate returns the rate of the current interval.
func (v *vivace) currentRate() float64 {
	if v.sending < v.planned {
		return v.intervals[v.sending].rate
	}
	return v.rate
}

// Inspect shows what Spec.Internals lists.
func (v *vivace) Inspect() Internals {
	return Internals{v.rate, v.utility, v.gradient, float64(v.streak), v.bound, v.slope, 100 * v.loss}
}

func (v *vivace) Control() Control {
	rate := Rate(v.currentRate() * v.mbit)
	rtt := v.srtt
	if rtt <= 0 {
		rtt = vivaceFirstRTT
	}
	ctl := Control{
		Cwnd:       v.toBytes(vivaceWindows*v.toPackets(rate.BytesIn(rtt)) + vivaceExtra),
		PacingRate: rate,
		NextTick:   v.intervalEnd(),
		Phase:      vivacePhases[v.state],
	}
	if ctl.NextTick == 0 || v.deadline != 0 && v.deadline < ctl.NextTick {
		ctl.NextTick = v.deadline
	}
	return ctl
}
