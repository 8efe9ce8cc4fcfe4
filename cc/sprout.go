package cc

import (
	"cmp"
	"math"
	"time"
)

// Sprout (Winstein, Sivaraman & Balakrishnan, NSDI 2013). Arrivals counted in
// ticks of 20 ms tell how fast the link may be; what it will deliver in the next
// ticks but for a chance of 5 % may be in the network, and no more.
//
//	start ──(first round trip)──▶ forecast ◀──▶ probe_rtt (10 s without the least round trip)
//	                               │    ▲
//	             (5 s of nothing)  ▼    │ (acknowledgement)
//	                                idle
//
// Sprout has a receiver that counts and forecasts (sprout_window.go). Here its
// place is taken by acknowledgements: they are the arrivals, a way back later,
// and what is on the way besides the queue is the mean rate times the least
// round trip. Forecasting over that time, too, would be cautious about what
// cannot queue: it then counts its own caution as the link's rate.

const (
	sproutUnit     = 1400.0 // bytes; keithw/sprout, the receiver's
	sproutQuantile = 0.05   // NSDI 2013 §3.3
	sproutTarget   = 5      // ticks, of 100 ms; NSDI 2013 §3.5
	// sproutSpread is the most ticks that a bunch of acknowledgements is spread
	// over: unspread, it would read as an outage and a burst.
	sproutSpread = 5
	// After sproutRest without anything in flight the rate may be anything: the
	// wandering has taken the belief as far as no belief at all.
	sproutRest = 5 * time.Second
	// The least round trip is looked for again after sproutBaseWindow: with
	// sproutDrain of what a link without a queue holds, which empties it. Otherwise the
	// queue, which is never empty on a steady link, would become the base.
	sproutBaseWindow = 10 * time.Second
	sproutDrain      = 0.5
	sproutLeastDrain = 200 * time.Millisecond
	sproutNear       = 16                     // within a 16th of it, the least round trip counts as seen
	sproutProbe      = 100 * time.Millisecond // the pacing never falls below a unit in that time
	// sproutMemory is how many ticks back the bytes sent by then are remembered.
	sproutMemory = 64

	sproutNormalise = 1 // the second choice of outage
	// sproutCumulative is the second choice of drain. It also sends more at rates of about a unit per tick, where the
	// forecast is next to nothing: there the other form may hear no more than a packet per round trip, and stay at it.
	sproutCumulative = 1
)

func init() {
	Register(Spec{
		Name:   "sprout",
		About:  "Sprout: forecasts, cautiously, what a link whose rate wanders will deliver within 100 ms.",
		Source: "Winstein, Sivaraman & Balakrishnan, NSDI 2013",
		Params: []Param{
			{
				Name: "unit_bytes", Unit: "bytes", Default: sproutUnit, Min: 100, Max: 1e6,
				About: "what the model counts in: it knows rates up to 1000 of it per second (11 Mbit/s) and tells " +
					"them apart from about 50",
			},
			{
				Name: "quantile", Default: sproutQuantile, Min: 0.001, Max: 0.5,
				About: "chance that the link delivers less than forecast",
			},
			{
				Name: "target_ticks", Unit: "20 ms", Default: sproutTarget, Min: 1, Max: sproutHorizons,
				About: "what is in the network drains within so many ticks but for that chance; a fraction is cut off",
			},
			{
				Name: "spread_ticks", Unit: "20 ms", Default: sproutSpread, Min: 1, Max: 25,
				About: "acknowledgements that come in bunches are spread over up to so many ticks; 1: over none",
			},
			{
				Name: "outage", Default: 0, Choices: []string{"reference", "normalised"},
				About: "an outage loses weight in every tick, as in the authors' program; or ends once a second, " +
					"as in their paper",
			},
			{
				Name: "drain", Default: 0, Choices: []string{"tick", "cumulative"},
				About: "what a tick takes off a queue, where the receiver forecasts: what was forecast for it, or, as " +
					"in the authors' program, all that was forecast until then",
			},
		},
		New: func(cfg Config) Algorithm { return newSprout(cfg) },

		Needs: []Signal{NeedsRTT, NeedsTicks},
		Internals: []Internal{
			{Name: "rate_units", About: "expected rate, units per second"},
			{Name: "outage", About: "probability that the link delivers nothing"},
			{Name: "forecast_units", About: "what will be delivered within target_ticks but for the quantile"},
			{Name: "base_rtt_ms", About: "round trip without a queue"},
			{Name: "window_bytes", About: "what the forecast allows, before the floor of one segment"},
			{Name: "silent_ticks", About: "ticks without arrivals that may yet prove to be a bunch"},
		},
	})
}

type sprout struct {
	segments
	model    sproutModel
	unit     float64 // bytes
	quantile float64
	target   int // ticks
	spread   int // ticks
	initial  Bytes
	base     sproutBase
	fed      sproutDrainer // where a receiver forecasts

	rate  float64 // units/s, expected
	ahead int     // units, forecast
	pace  Rate

	ends    Time                // of the tick under way; 0: none is
	came    float64             // bytes, since the tick began and less than half a unit from before
	some    bool                // something came
	limited bool                // the window held the sender back in it
	idle    int                 // ticks without anything in flight
	silent  int                 // ticks without arrivals, not taken in yet
	ticks   int                 // so far
	sent    [sproutMemory]Bytes // by the end of each of the last ticks; a ring
}

func newSprout(cfg Config) *sprout {
	s := &sprout{
		segments: segments{cfg.MSS},
		model:    newSproutModel(sproutTableFor(cfg.Params)),
		unit:     cfg.Params["unit_bytes"],
		quantile: cfg.Params["quantile"],
		target:   int(cfg.Params["target_ticks"]),
		spread:   int(cfg.Params["spread_ticks"]),
		initial:  cfg.InitialCwnd,
	}
	s.fed.cumulative = cfg.Params["drain"] == sproutCumulative
	s.forgetRate(State{})
	return s
}

// sproutTableFor returns the constants of the model, which all flows share.
func sproutTableFor(p Params) *sproutTable {
	if p["outage"] == sproutNormalise {
		return sproutNormalised()
	}
	return sproutReference()
}

// forgetRate forgets the rate; ticks begin anew with the next acknowledgement.
func (s *sprout) forgetRate(st State) {
	s.ends, s.came, s.some, s.limited, s.idle, s.silent = 0, 0, false, false, 0, 0
	s.model.resetToUniform()
	s.updateForecast(st)
}

func (s *sprout) OnAck(a Ack) {
	s.endTicks(a.State, a.Acked)
	if s.fed.hasForecast() {
		return
	}
	if s.ends == 0 {
		s.ends = a.Now.Add(SproutTick)
		s.sent = [sproutMemory]Bytes{} // what left before is not known
	}
	s.came += float64(max(a.Acked, 0))
	s.some = s.some || a.Acked > 0
	s.base.addRTTSample(a)
}

// OnLoss leaves the rate as it is: what is lost is not acknowledged, and that says it.
func (s *sprout) OnLoss(l Loss) { s.endTicks(l.State, 0) }

// OnTick takes in the ticks that have ended.
func (s *sprout) OnTick(st State) { s.endTicks(st, 0) }

// endTicks closes the ticks that ended before an event, by which acked more
// bytes are known to be delivered.
func (s *sprout) endTicks(st State, acked Bytes) {
	s.setMSS(st.MSS)
	if s.fed.hasForecast() {
		s.fed.drainQueue(st)
		return
	}
	s.limited = s.limited || st.CwndLimited
	switch {
	case s.ends == 0 || st.Now < s.ends:
		return
	case st.Now.Sub(s.ends) >= sproutRest:
		s.forgetRate(st)
		return
	}
	for ; s.ends <= st.Now; s.ends = s.ends.Add(SproutTick) {
		s.endTick(st.Delivered+st.Inflight, st.Delivered-acked)
	}
	s.limited = false
	switch {
	case st.Inflight+acked > 0:
		s.idle = 0
	case s.idle >= int(sproutRest/SproutTick):
		s.forgetRate(st)
		return
	}
	s.updateForecast(st)
}

// endTick ends a tick; sent and delivered count bytes since the start.
func (s *sprout) endTick(sent, delivered Bytes) {
	s.sent[s.ticks%sproutMemory] = sent
	back := min(int((s.base.rtt+SproutTick-1)/SproutTick), sproutMemory-1)
	overdue := s.sent[(s.ticks+sproutMemory-back)%sproutMemory] > delivered
	s.ticks++
	s.idle++

	n := 0
	if s.some {
		n = max(1, int(math.Round(s.came/s.unit)))
		s.came = max(0, s.came-float64(n)*s.unit)
	}
	s.some = false
	switch {
	case !s.limited || n == 0 && !overdue:
		// What the application does not send cannot arrive, nor what has not had the
		// time: neither says anything about the link.
		s.addArrivals(s.silent, 0)
		s.silent = 0
		s.model.evolveTick()
	case n > 0:
		s.addArrivals(s.silent+1, n)
		s.silent = 0
	case s.silent+1 < s.spread:
		s.silent++ // nothing can be sent for it, so its time to be taken in may come
	default:
		s.addArrivals(1, 0)
	}
}

// addArrivals updates the model with n units that came within a number of ticks.
func (s *sprout) addArrivals(ticks, n int) {
	for i := range ticks {
		s.model.evolveTick()
		s.model.addArrivals(n*(i+1)/ticks - n*i/ticks)
	}
}

// updateForecast draws the conclusions, once a tick.
func (s *sprout) updateForecast(st State) {
	s.rate = s.model.meanRate()
	s.ahead = s.model.forecastUnits(s.target, s.quantile, s.ahead)
	// What the window has room for, and what will leave it, goes out over a tick.
	room := max(0, s.windowBytes()-float64(st.Inflight)) + s.rate*s.unit*sproutTickSecs
	s.pace = RateOf(Bytes(max(room, leastBytesPerTick(s.unit))), SproutTick)
}

// leastBytesPerTick is what is always let go in a tick, in bytes: a unit each sproutProbe.
func leastBytesPerTick(unit float64) float64 {
	return unit * float64(SproutTick) / float64(sproutProbe)
}

// windowBytes is what may be in the network, in bytes: what is under way without a
// queue, and what will have left the queue in time.
func (s *sprout) windowBytes() float64 {
	under := s.rate * s.base.rtt.Seconds()
	switch {
	case s.base.rtt == 0:
		return float64(s.initial)
	case s.base.isDraining():
		return s.base.holds
	}
	return s.unit * (under + float64(s.ahead))
}

// OnForecast hands over what a receiver forecasts, when the sender's next byte
// has number next. See Forecaster.
func (s *sprout) OnForecast(st State, next Bytes, f SproutForecast) {
	s.setMSS(st.MSS)
	s.fed.unit, s.fed.target = s.unit, s.target
	s.fed.setForecast(st, next, f)
}

// Inspect shows what Spec.Internals lists.
func (s *sprout) Inspect() Internals {
	return Internals{s.rate, s.model.p[0], float64(s.ahead), toMillis(s.base.rtt), s.windowBytes(), float64(s.silent)}
}

func (s *sprout) Control() Control {
	if s.fed.hasForecast() {
		return s.fed.currentLimits(s.segments)
	}
	ctl := Control{
		Cwnd:       s.toBytes(s.windowBytes() / float64(s.mss)),
		PacingRate: s.pace,
		NextTick:   s.ends,
		Phase:      "forecast",
	}
	switch {
	case s.base.rtt == 0:
		ctl.Phase = "start"
	case s.ends == 0:
		ctl.Phase = "idle"
	case s.base.isDraining():
		ctl.Phase = "probe_rtt"
	}
	return ctl
}

// sproutBase is the round trip of an empty queue: the least of the last
// sproutBaseWindow, for which the queue is drained if need be.
type sproutBase struct {
	rtt   time.Duration // 0: no sample yet
	seen  Time          // when a sample last came near it
	until Time          // of the draining; 0: it is not being drained
	least time.Duration // round trip while it is drained
	holds float64       // bytes that may be in flight while it is drained
}

func (b *sproutBase) isDraining() bool { return b.until != 0 }

func (b *sproutBase) addRTTSample(a Ack) {
	rtt := max(a.RTT, minDivisor)
	switch {
	case a.RTT <= 0:
	case b.rtt == 0 || rtt <= b.rtt+b.rtt/sproutNear:
		b.rtt = min(rtt, cmp.Or(b.rtt, rtt))
		b.seen, b.until = a.Now, 0
	case !b.isDraining():
		if a.Now.Sub(b.seen) >= sproutBaseWindow {
			b.until, b.least = a.Now.Add(max(sproutLeastDrain, 2*a.SRTT)), rtt
			// Of what is in flight, what would be without the queue: true of any link,
			// also of one that the model cannot tell.
			b.holds = sproutDrain * float64(a.Inflight+a.Acked) * float64(b.rtt) / float64(rtt)
		}
	default:
		b.least = min(b.least, rtt)
		if a.Now >= b.until { // the path has changed
			b.rtt, b.seen, b.until = b.least, a.Now, 0
		}
	}
}
