package cc

import (
	"errors"
	"fmt"
	"time"
)

// Janus (Zhou, Choffnes & Chowdhury, IEEE TMC 2018) is only as aggressive as it must be to reach the rate
// that the application wants. Two algorithms take turns on one window. Each starts afresh at every switch:
//
//	                ┌──────────(P above R')──────────┐
//	guarantee ──▶ Cubic                              ▼
//	            aggressive                      conservative ◀── bulk, delay_sensitive
//	                ▲                              Vegas          (R' unknown until two round
//	                └──────(P below (1−γ)·R')────────┘             trips after its slow start)
//
// R is the requested rate, R' the target into which Algorithm 1 turns it, P the throughput, smoothed once a
// round trip.
//
// Three rules are ours. The first two are for steady paths, the third for short flows beside long ones:
//
//   - Vegas keeps two packets in the queue, and not two to four. Between these bounds flows would keep whatever
//     unequal rates they happen to have.
//   - A long conservative stage clears the buffer periodically, as at its start. A flow that has measured the
//     others' queue as part of its base adds its own, and without clearing all would keep that queue for good.
//     When one flow clears, the round trip falls for all, and each corrects its base.
//   - Vegas' slow start grows by three packets for each ten that arrive, where Linux doubles the window in a
//     round trip. Otherwise the burst of a short download would delay the packets of others on the link.

func init() {
	Register(Spec{
		Name: "janus",
		About: "Janus: Vegas while the flow has its target rate, CUBIC to regain it; lowers the target when the " +
			"link is full.",
		Source: "Zhou, Choffnes & Chowdhury, IEEE TMC 2018",
		Params: []Param{
			{
				Name: "class", Default: float64(janusBulk), Choices: []string{"bulk", "delay_sensitive", "guarantee"},
				About: "what the flow is for: bulk and delay_sensitive take the target from what the network has " +
					"to spare; guarantee brings its own",
			},
			{
				Name: "target_mbit", Unit: "Mbit/s", Default: 0, Min: 0, Max: 1e5,
				About: "with guarantee, payload that the application needs; 0: not known, so taken from the " +
					"network as for bulk, but never lowered below min_mbit",
			},
			{
				Name: "min_mbit", Unit: "Mbit/s", Default: 0, Min: 0, Max: 1e5,
				About: "with guarantee, what the target is never lowered below, at most target_mbit where that is " +
					"known; 0: as low as it takes",
			},
			{
				Name: "aggressive", Default: float64(janusCubic), Choices: []string{"cubic", "reno", "htcp"},
				About: "what regains the target (TMC 2018 §7.3)",
			},
			{
				Name: "gamma", Default: 0.2, Min: 0.01, Max: 0.9,
				About: "how far throughput may fall short of the target, and by how much a target is lowered, each " +
					"as a fraction of it",
			},
			{
				Name: "epsilon", Default: 0.1, Min: 0, Max: 1,
				About: "how far a guaranteed flow may exceed what it asked for, as a fraction of it",
			},
			{
				Name: "queue_packets", Unit: "packets", Default: 4, Min: 0, Max: 100,
				About: "what the conservative stage keeps in the queue, left out of the estimate of the " +
					"propagation delay",
			},
			{
				Name: "tau", Unit: "round trips", Default: 20, Min: 0, Max: 1000,
				About: "in which the aggressive stage doubles the window; times gamma/(1-gamma) it is how long " +
					"that stage lasts before the target is lowered",
			},
			{
				Name: "xi", Default: 0.125, Min: 0.01, Max: 1,
				About: "weight of the newest round trip in the smoothed throughput",
			},
		},
		Check: checkJanus,
		New:   func(cfg Config) Algorithm { return newJanus(cfg) },

		Needs: []Signal{NeedsRTT, NeedsLoss},
		Marks: MarksAreLosses,
		Internals: []Internal{
			{Name: "target_mbit", About: "rate aimed at now; 0: not known yet"},
			{Name: "throughput_mbit", About: "smoothed over round trips"},
			{Name: "propagation_ms", About: "round trip without queue, as estimated"},
			{Name: "cap_packets", About: "window that keeps a guaranteed flow near its target; 0: not capped"},
			showSsthresh,
		},
	})
}

// janusClass is the class of a flow; the values are those of Param class.
type janusClass int

const (
	janusBulk janusClass = iota
	janusDelaySensitive
	janusGuarantee
)

// janusPair is the algorithm of the aggressive stage; the values are those of Param aggressive.
type janusPair int

const (
	janusCubic janusPair = iota
	janusReno
	janusHTCP
)

func checkJanus(p Params) error {
	target, least := p["target_mbit"], p["min_mbit"]
	switch guarantee := janusClass(p["class"]) == janusGuarantee; {
	case target > 0 && !guarantee:
		return errors.New("target_mbit goes with class=guarantee")
	case least > 0 && !guarantee:
		return errors.New("min_mbit goes with class=guarantee")
	case target > 0 && least > target:
		return fmt.Errorf("min_mbit is %v, but must not be above target_mbit, which is %v", least, target)
	}
	return nil
}

const (
	janusStart   = 0.3 // packets that Vegas' slow start adds for each that arrives; ours
	janusMinCwnd = 2.0 // packets; the floor of both stages
	// janusSettle is how many round trips after Vegas' slow start the throughput
	// becomes the target of a flow without one (TMC 2018 §4.2).
	janusSettle = 2
	// janusProbe is the round trip of a conservative stage that gives the
	// propagation delay, as its least sample: in the one before the queue still drains.
	janusProbe = 2
	// janusClearEvery is how many round trips a conservative stage that is not
	// capped goes on before it clears the buffer again; ours.
	janusClearEvery = 64
	// janusLeastBase bounds the estimate of the propagation delay from below, in
	// least round trips: at small rates the queue of the estimate exceeds them.
	janusLeastBase = 0.5
)

type janus struct {
	NoTick
	segments
	epsilon, queue float64
	guarantee      bool // R was given

	target janusTarget
	meter  janusMeter

	aggressive bool
	first      bool // no conservative stage has been entered yet
	pair       janusPair
	cubic      cubic // its window is that of the aggressive stage, whatever makes it grow
	htcp       htcp
	vegas      vegas

	rounds      int           // ended since the buffer was cleared, or, without a target, since slow start
	propagation time.Duration // D_p; 0: no sample yet
	cap         float64       // packets; 0: none
}

func newJanus(cfg Config) *janus {
	j := &janus{
		segments: segments{cfg.MSS},
		epsilon:  cfg.Params["epsilon"],
		queue:    cfg.Params["queue_packets"],
		target:   janusTarget{gamma: cfg.Params["gamma"], tau: cfg.Params["tau"]},
		meter:    janusMeter{xi: cfg.Params["xi"]},
	}
	if janusClass(cfg.Params["class"]) == janusGuarantee {
		j.target.setOriginal(mbitToBytes(cfg.Params["target_mbit"]), mbitToBytes(cfg.Params["min_mbit"]))
	}
	j.pair = janusPair(cfg.Params["aggressive"])
	j.guarantee = j.target.original > 0
	j.aggressive, j.first = j.guarantee, true
	w := newLossWindow(cfg)
	j.cubic = cubic{lossWindow: w, linuxGrowth: true}
	j.vegas = vegas{lossWindow: w, beta: vegasAlpha, start: janusStart}
	return j
}

func (j *janus) OnAck(a Ack) {
	j.setMSS(a.MSS)
	j.meter.addAck(a)
	if j.first {
		j.propagation = j.meter.base
	}
	if j.aggressive {
		j.limitSlowStart()
		j.growAggressively(a)
	} else {
		j.vegas.OnAck(a)
	}
	if j.meter.endsRound(a) {
		j.endRound(a)
	}
	if j.cap > 0 {
		j.vegas.cwnd = min(j.vegas.cwnd, j.cap)
	}
}

// growAggressively handles an acknowledgement in the aggressive stage.
func (j *janus) growAggressively(a Ack) {
	w := &j.cubic.lossWindow
	switch j.pair {
	case janusReno:
		w.growWindow(w.growthCredit(a))
	case janusHTCP:
		j.htcp.onAck(w, a)
	case janusCubic:
		j.cubic.OnAck(a)
	}
}

// shrinkAggressively handles a loss in the aggressive stage.
func (j *janus) shrinkAggressively(l Loss) {
	w, fresh := &j.cubic.lossWindow, false
	switch j.pair {
	case janusReno:
		fresh = w.cutWindow(l, renoBeta)
	case janusHTCP:
		fresh = j.htcp.onLoss(w, l)
	case janusCubic:
		j.cubic.OnLoss(l)
	}
	j.cubic.hasLost = j.cubic.hasLost || fresh
}

// limitSlowStart ends the first slow start at the window for the target, by the round trips so far (TMC 2018
// §4.4).
func (j *janus) limitSlowStart() {
	c := &j.cubic
	if j.first && j.propagation > 0 && c.inSlowStart() && c.epoch.reacted == 0 {
		c.ssthresh = max(j.windowFor(j.target.original, j.propagation), janusMinCwnd)
	}
}

// windowFor returns the window in packets that moves rate bytes/s over that round trip.
func (j *janus) windowFor(rate float64, rtt time.Duration) float64 {
	return rate * rtt.Seconds() / float64(j.mss)
}

// endRound evaluates the round trip that a has ended.
func (j *janus) endRound(a Ack) {
	m, t := &j.meter, &j.target
	switch {
	case j.aggressive:
		m.updateAverage()
		p := m.avg
		if j.first { // the average started at 0 and lags (TMC 2018 §4.3)
			p = m.smp
		}
		switch {
		case p > t.now:
			j.enterConservative(a)
		case !m.limited:
			if j.cubic.hasLost {
				t.noteDrainedQueue(m.rtt)
			}
			t.lowerTarget(a.Now, m.rtt, a.RTTVar, j.leastTarget())
		}
	case t.now == 0:
		j.measureTarget()
	default:
		j.rounds++
		if j.rounds == 1 {
			return // after a cut the sender pauses, and a lower throughput means nothing
		}
		m.updateAverage()
		if j.rounds == janusProbe {
			j.estimatePropagation()
		}
		t.raiseTarget(m.avg)
		j.limitRate()
		switch {
		case m.limited: // the application is the cause of a low throughput or of an empty queue
		case m.avg < t.unmetBelow():
			j.enterAggressive(a.Now)
		case j.rounds >= janusClearEvery && j.cap == 0: // a cap leaves no queue behind
			j.clearQueue(&j.vegas.lossWindow)
		}
	}
}

// leastTarget returns a segment per second, because a target of 0 could never be raised.
func (j *janus) leastTarget() float64 { return float64(j.mss) }

// measureTarget takes the target from the network: Vegas leaves slow start as soon as
// a queue builds up, so its rate is what the others left over (TMC 2018 §4.2).
func (j *janus) measureTarget() {
	m := &j.meter
	switch {
	case j.vegas.inSlowStart():
		j.rounds = 0
	case m.limited: // says nothing about the network
	default:
		j.rounds++
		if j.rounds > janusSettle && m.smp > 0 {
			j.target.now = max(m.smp, j.target.floor, j.leastTarget())
			m.avg = m.smp
			j.clearQueue(&j.vegas.lossWindow)
		}
	}
}

// enterConservative enters the conservative stage, and clears the flow's packets from the queue (TMC 2018
// §4.4). Vegas measures its base after that.
func (j *janus) enterConservative(a Ack) {
	if j.first {
		j.meter.avg = j.meter.smp
	}
	j.vegas = vegas{lossWindow: j.cubic.lossWindow, beta: vegasAlpha, start: janusStart}
	j.clearQueue(&j.vegas.lossWindow)
	j.vegas.restart(a.Now)
	j.aggressive, j.cap = false, 0
}

// clearQueue reduces the window by the flow's packets in the queue: those beyond its rate times the
// propagation delay (TMC 2018 §4.4).
func (j *janus) clearQueue(w *lossWindow) {
	w.cwnd = max(min(w.cwnd, j.windowFor(j.meter.avg, j.propagation)), janusMinCwnd)
	w.ssthresh = w.cwnd
	j.first, j.rounds = false, 0
}

// enterAggressive enters the aggressive stage.
func (j *janus) enterAggressive(now Time) {
	w := j.vegas.lossWindow
	w.ssthresh = min(w.ssthresh, w.cwnd)
	j.cubic, j.htcp = cubic{lossWindow: w, linuxGrowth: true}, htcp{}
	j.aggressive, j.cap = true, 0
	j.target.beginAggressive(now, j.meter.rtt)
}

// estimatePropagation sets the propagation delay (TMC 2018 §4.4, equation 1).
func (j *janus) estimatePropagation() {
	m := &j.meter
	if m.avg <= 0 || j.windowFor(m.avg, m.rtt) < j.queue {
		return
	}
	own := time.Duration(j.queue * float64(j.mss) / m.avg * float64(time.Second))
	j.propagation = min(max(m.rtt-own, time.Duration(janusLeastBase*float64(m.base))), m.rtt)
}

// limitRate limits a guaranteed flow to the rate that it asked for (TMC 2018 §4.4). It goes by R. A limit by
// R' would prevent the rise beyond R'/(1−γ) by which a lowered target recovers.
func (j *janus) limitRate() {
	if !j.guarantee {
		return
	}
	r := j.target.original
	switch {
	case j.meter.avg > (1+j.epsilon)*r, j.cap > 0 && j.meter.avg >= r:
		j.cap = max(j.windowFor((1+j.epsilon)*r, j.meter.rtt), janusMinCwnd)
	default:
		j.cap = 0
	}
}

func (j *janus) OnLoss(l Loss) {
	j.setMSS(l.MSS)
	if j.aggressive {
		j.shrinkAggressively(l)
	} else {
		j.vegas.OnLoss(l)
	}
}

// activeWindow returns the window of the current stage.
func (j *janus) activeWindow() *lossWindow {
	if j.aggressive {
		return &j.cubic.lossWindow
	}
	return &j.vegas.lossWindow
}

// Inspect shows what Spec.Internals lists.
func (j *janus) Inspect() Internals {
	return Internals{
		bytesToMbit(j.target.now), bytesToMbit(j.meter.avg), toMillis(j.propagation), j.cap,
		finiteOrZero(j.activeWindow().ssthresh),
	}
}

func (j *janus) Control() Control {
	return Control{Cwnd: j.toBytes(j.activeWindow().cwnd), Phase: j.phaseName()}
}

func (j *janus) phaseName() string {
	switch {
	case j.first && j.activeWindow().inSlowStart():
		return "slow_start"
	case j.aggressive:
		return "aggressive"
	case j.target.now == 0:
		return "measuring"
	case j.rounds == 0:
		return "clearing"
	case j.cap > 0:
		return "capped"
	}
	return "conservative"
}
