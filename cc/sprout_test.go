package cc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// whole is Sprout with a segment for its unit, so that counts are whole.
const whole = "sprout:unit_bytes=1448"

// sproutPath is a path with a helper for ticks.
type sproutPath struct {
	*path
	in *sprout
}

func newSproutPath(tb testing.TB, ref string) *sproutPath {
	tb.Helper()
	p := newPath(tb, ref)
	return &sproutPath{p, as[*sprout](p)}
}

// Arrive acknowledges n packets, spread over the next tick, and lets it end; 0
// lets it end in silence.
func (p *sproutPath) Arrive(n int, rtt time.Duration) {
	if p.in.ends == 0 { // the first acknowledgement begins it
		p.Ack(1, rtt)
		n--
	}
	end := p.in.ends
	for i := range n {
		p.state.Now = max(p.state.Now, end.Add(-SproutTick*time.Duration(n-i)/time.Duration(n+1)))
		p.Ack(1, rtt)
	}
	p.Tick(0)
}

// Tick lets the tick end, late by so much.
func (p *sproutPath) Tick(late time.Duration) {
	p.state.Now = p.alg.Control().NextTick.Add(late)
	p.fill()
	p.alg.OnTick(p.state)
}

// steady is a path that has delivered 10 packets a tick for a while.
func steady(tb testing.TB, ref string, rtt time.Duration) *sproutPath {
	tb.Helper()
	p := newSproutPath(tb, ref)
	for range 100 {
		p.Arrive(10, rtt)
	}
	return p
}

func TestSproutWindow(t *testing.T) {
	p := newSproutPath(t, whole)
	assert.InDelta(t, 10, p.Cwnd(), 0.01, "the initial window before the first round trip")
	assert.Equal(t, "start", p.alg.Control().Phase)
	assert.Zero(t, p.alg.Control().NextTick, "no tick before the first acknowledgement")
	assert.InDelta(t, 10+10, float64(p.alg.Control().PacingRate.BytesIn(SproutTick))/1448, 0.1,
		"which goes out within a tick")

	p.Ack(1, 40*ms)
	assert.InDelta(t, 501.9*0.04+5, p.Cwnd(), 1.5, "any rate is as likely: mean rate times round trip, and the "+
		"forecast of 5 ticks")
	assert.Equal(t, p.state.Now.Add(20*ms), p.alg.Control().NextTick)

	p = steady(t, whole, 40*ms)
	assert.InDelta(t, 505.9*0.04+35, p.Cwnd(), 1.5, "10 a tick: 35 in the next 5")
	assert.InDelta(t, 505.9*1448*8, float64(p.alg.Control().PacingRate), 0.02*505.9*1448*8,
		"no room in the window: what will leave it is replaced")
	p.state.Inflight = 0
	p.idle = true
	p.Tick(0)
	assert.InDelta(t, 505.9*0.04+35+10, float64(p.alg.Control().PacingRate.BytesIn(SproutTick))/1448, 4,
		"an empty network: the whole window, and what will leave it")

	assert.InDelta(t, 12, steady(t, whole+",target_ticks=2", 40*ms).in.Inspect()[2], 1, "the forecast of 2 ticks")
	assert.InDelta(t, 50, steady(t, whole+",quantile=0.5", 40*ms).in.Inspect()[2], 1, "the median")
}

func TestSproutOutage(t *testing.T) {
	p := steady(t, whole+",spread_ticks=1", 40*ms)
	for range 5 {
		p.Arrive(0, 0)
	}
	assert.Zero(t, p.in.ahead, "100 ms without arrivals close the forecast")
	assert.InDelta(t, 42.8, p.in.rate, 0.5)

	p = steady(t, whole, 40*ms)
	before := p.Cwnd()
	for range 4 {
		p.Arrive(0, 0)
	}
	assert.InDelta(t, before, p.Cwnd(), 0, "4 silent ticks may yet prove to be a bunch; nothing can be sent meanwhile")
	for range 5 {
		p.Arrive(0, 0)
	}
	assert.Zero(t, p.in.ahead, "but 9 are an outage of 5")
	for range 200 {
		p.Arrive(0, 0)
	}
	assert.InDelta(t, 1, p.Cwnd(), 0, "never below a segment")
	assert.Equal(t, RateOf(1448/5, 20*ms), p.alg.Control().PacingRate, "paced as a unit in 100 ms")
	p.Timeout()
	assert.Greater(t, p.in.model.p[0], 0.9, "a timeout leaves the belief as it is")
	for range 6 {
		p.Arrive(10, 40*ms)
	}
	assert.InDelta(t, 350, p.in.rate, 4, "arrivals bring it back; before them the silence is over")
}

func TestSproutSpreadsBunches(t *testing.T) {
	bunched := func(ref string) *sproutPath {
		p := steady(t, ref, 60*ms)
		for range 40 {
			p.Arrive(0, 0)
			p.Arrive(0, 0)
			p.Arrive(30, 60*ms)
		}
		return p
	}
	even := steady(t, whole, 60*ms).in.ahead
	assert.InDelta(t, even, bunched(whole).in.ahead, 2, "30 every third tick forecast what 10 a tick do")
	assert.Greater(t, bunched(whole+",spread_ticks=1").in.ahead, even+5,
		"taken as they come, the last burst counts for itself")

	p := steady(t, whole, 60*ms)
	for range 7 {
		p.Arrive(0, 0)
	}
	assert.InDelta(t, 4, p.in.silent, 0)
	want := belief(sproutReference(), append(times(100, 10), 0, 0, 0, 2, 2, 2, 2, 2)...)
	p.Arrive(10, 60*ms)
	assert.InDelta(t, want.meanRate(), p.in.rate, 5, "over 5 ticks at most; those before were empty")
}

func TestSproutCounts(t *testing.T) {
	for _, tt := range []struct {
		name          string
		ref           string
		arrivals      float64 // packets each tick
		ticks         int
		seen, atLeast int
	}{
		{"a segment of 1448 is a unit of 1400 and a bit, which adds up", "sprout", 10, 30, 310, 310},
		{"half a unit is rounded up", "sprout:unit_bytes=2896", 1, 10, 10, 10},
		{"less than a unit counts as one, or it would read as an outage", "sprout:unit_bytes=14480", 1, 10, 10, 10},
		{"a unit of ten segments", "sprout:unit_bytes=14480", 10, 10, 10, 10},
	} {
		p := newSproutPath(t, tt.ref)
		want := newSproutModel(sproutReference())
		p.Ack(tt.arrivals, 40*ms)
		p.Tick(0)
		for range tt.ticks - 1 {
			p.Ack(tt.arrivals, 40*ms)
			p.Tick(0)
		}
		got := p.in.rate
		for i := range tt.ticks {
			want.evolveTick()
			want.addArrivals(tt.seen*(i+1)/tt.ticks - tt.seen*i/tt.ticks)
		}
		assert.InDelta(t, want.meanRate(), got, 0.02*want.meanRate(), tt.name)
	}
}

func TestSproutTakesNoEvidenceFromWhatWasNotSent(t *testing.T) {
	p := steady(t, whole, 40*ms)
	rate := p.in.rate
	p.idle = true
	for range 20 {
		p.Arrive(0, 0)
	}
	assert.InDelta(t, rate, p.in.rate, 2, "the application is silent, not the link")
	for range 20 {
		p.Arrive(1, 40*ms)
	}
	assert.InDelta(t, rate, p.in.rate, 6, "what little it sends says nothing either")

	// Ten packets at a time, which come back together after 400 ms: until then
	// nothing is overdue.
	p = newSproutPath(t, whole)
	p.state.SRTT, p.state.CwndLimited = 400*ms, true
	for range 6 {
		p.state.Delivered += 10 * DefaultMSS
		p.state.Inflight = 0
		p.alg.OnAck(Ack{State: p.state, Acked: 10 * DefaultMSS, RTT: 400 * ms})
		p.state.Inflight = 10 * DefaultMSS
		for range 19 {
			p.state.Now = p.alg.Control().NextTick
			p.alg.OnTick(p.state)
		}
		p.Wait(20 * ms)
	}
	assert.InDelta(t, 500, p.in.rate, 25, "ten in a tick are ten in a tick, and the silence around them is none of "+
		"the link's")
}

func TestSproutRests(t *testing.T) {
	p := steady(t, whole, 40*ms)
	p.idle = true
	for range 251 {
		if p.alg.Control().NextTick == 0 {
			break
		}
		p.Tick(0)
	}
	assert.Zero(t, p.alg.Control().NextTick, "after 5 s with nothing in flight there is no tick")
	assert.Equal(t, "idle", p.alg.Control().Phase)
	assert.InDelta(t, 501.9, p.in.rate, 1, "and any rate is as likely again")
	p.Wait(time.Hour)
	p.idle = false
	p.Ack(1, 40*ms)
	assert.Equal(t, p.state.Now.Add(20*ms), p.alg.Control().NextTick, "the next acknowledgement begins anew")
	assert.InDelta(t, 501.9*0.04+5, p.Cwnd(), 1.5)

	p = steady(t, whole, 40*ms)
	p.Tick(time.Minute)
	assert.Equal(t, "idle", p.alg.Control().Phase, "a clock that stood still leaves nothing to be believed")
}

func TestSproutLateTicks(t *testing.T) {
	a, b := steady(t, whole, 40*ms), steady(t, whole, 40*ms)
	for range 6 {
		a.Tick(0)
	}
	b.Tick(5 * SproutTick)
	assert.Equal(t, a.in.model.p, b.in.model.p, "six ticks at once are six ticks")
	assert.Equal(t, a.alg.Control(), b.alg.Control())
	b.Tick(7 * ms)
	assert.Equal(t, a.alg.Control().NextTick.Add(SproutTick), b.alg.Control().NextTick,
		"being late does not shift the next")
}

func TestSproutBase(t *testing.T) {
	p := steady(t, whole, 40*ms)
	start := p.state.Now
	for p.alg.Control().Phase == "forecast" {
		p.Arrive(10, 80*ms)
		require.Less(t, p.state.Now.Sub(start), 11*time.Second)
	}
	assert.GreaterOrEqual(t, p.state.Now.Sub(start), 10*time.Second,
		"the base is looked for 10 s after it was last seen")
	assert.Equal(t, "probe_rtt", p.alg.Control().Phase)
	assert.InDelta(t, 0.5*(505.9*0.04+35)*40/80, p.Cwnd(), 1, "with half of what a link without a queue holds")
	p.Arrive(10, 42*ms)
	assert.Equal(t, "forecast", p.alg.Control().Phase, "and seen")
	assert.Equal(t, 40*ms, p.in.base.rtt, "within a 16th")
	p.Arrive(10, 39*ms)
	assert.Equal(t, 39*ms, p.in.base.rtt)

	for p.alg.Control().Phase == "forecast" {
		p.Arrive(10, 80*ms)
	}
	for range 20 {
		p.Arrive(10, 70*ms)
	}
	assert.Equal(t, "forecast", p.alg.Control().Phase)
	assert.Equal(t, 70*ms, p.in.base.rtt, "a longer path is believed when draining shows nothing shorter")
}

func TestSproutSegments(t *testing.T) {
	p := steady(t, whole, 40*ms)
	p.state.MSS = 8948
	for range 20 {
		p.Arrive(0, 0)
	}
	assert.Equal(t, Bytes(8948), p.alg.Control().Cwnd, "the floor is the segment of the path")
}

func TestSproutTakesItsReceiversWord(t *testing.T) {
	f := SproutForecast{ReceivedOrLost: 100_000, Counts: [8]int{5, 12, 20, 27, 35, 43, 51, 59}}
	for _, tt := range []struct {
		name   string
		drain  float64
		queued float64 // units
		after  time.Duration
		sent   float64 // units, since the forecast
		room   float64 // units
	}{
		{"nothing queued: what 5 ticks deliver", 0, 0, 0, 0, 35},
		{"less what is queued", 0, 10, 0, 0, 25},
		{"and what has been sent since", 0, 10, 10 * ms, 5, 20},
		{"a tick later 5 have left", 0, 10, 20 * ms, 0, 43 - 5 - (10 - 5)},
		{"three ticks later 20 have, if there were so many", 0, 30, 60 * ms, 0, 59 - 20 - (30 - 20)},
		{"but not more than there were", 0, 10, 60 * ms, 0, 59 - 20},
		{"beyond the forecast it goes no further", 0, 0, time.Minute, 0, 59 - 51},
		{"after more than 5 ticks' worth nothing is sent", 0, 36, 0, 0, 0},
		{"a part of a segment counts as one", 0, 9.75, 0, 0, 26},
		{"cumulative: without the first tick", 1, 0, 0, 0, 43 - 5},
		{"cumulative: three ticks take off 5 and 12 and 20", 1, 40, 60 * ms, 0, 59 - 27 - (40 - 37)},
	} {
		alg, err := New("sprout", Config{MSS: 1400, Params: Params{"drain": tt.drain}})
		require.NoError(t, err)
		st := State{Now: 1000, MSS: 1400, Delivered: 100_000}
		FindForecaster(alg).OnForecast(st, 100_000+Bytes(tt.queued*1400), f)
		assert.Equal(t, "fed", alg.Control().Phase)
		st.Inflight = Bytes(tt.sent * 1400)
		st.Now = st.Now.Add(tt.after)
		alg.OnTick(st)
		room := float64(alg.Control().Cwnd-st.Inflight) / 1400
		want := tt.room
		if want == 0 { // the window is never below a segment
			want = 1
		}
		assert.InDelta(t, want, room, 0.01, tt.name)
	}
}

func TestSproutReceiver(t *testing.T) {
	const unit = 1400
	now := Time(time.Second)
	r, err := NewSproutReceiver(now, nil)
	require.NoError(t, err)
	now = now.Add(SproutTick / 2)
	seq := Bytes(0)
	arrive := func(n int, pause time.Duration) {
		for range n {
			r.OnPacket(now, SproutPacket{Seq: seq, Size: unit, Behind: 5 * unit, Pause: pause})
			seq += unit
		}
		now = now.Add(SproutTick)
	}
	for range 200 {
		arrive(10, 0)
	}
	f := r.Forecast(now)
	assert.InDelta(t, 35, f.Counts[4], 1, "10 a tick")
	assert.Equal(t, seq, f.ReceivedOrLost)

	arrive(10, 200*ms)
	now = now.Add(190 * ms)
	assert.InDelta(t, 32, r.Forecast(now).Counts[4], 1, "ticks that the sender said would be empty are not evidence")
	now = now.Add(101 * ms)
	assert.Zero(t, r.Forecast(now).Counts[4], "those after are")

	seq += 3 * unit // lost, or late
	arrive(1, 0)
	assert.Equal(t, seq-3*unit, r.Forecast(now).ReceivedOrLost, "a hole within the reordering limit is not yet lost")
	arrive(10, 0)
	assert.Equal(t, seq, r.Forecast(now).ReceivedOrLost, "beyond it, it is")
	r.OnPacket(now, SproutPacket{Seq: seq - 14*unit, Size: unit, Behind: 5 * unit})
	assert.Equal(t, seq, r.Forecast(now).ReceivedOrLost, "and what comes after all does not count twice")

	for range 200 {
		arrive(10, 0)
	}
	for range 3 { // a segment is missing, so that the stream stops
		r.OnEarly(now, 10*unit)
		now = now.Add(SproutTick)
	}
	f = r.Forecast(now)
	assert.InDelta(t, 35, f.Counts[4], 1, "bytes behind a hole are evidence")
	assert.Equal(t, seq+30*unit, f.ReceivedOrLost)
	arrive(31, 0)
	assert.InDelta(t, 28, r.Forecast(now).Counts[4], 1, "once it is filled, only the segment is new")
	assert.Equal(t, seq, r.Forecast(now).ReceivedOrLost)

	for range 200 { // two packets of each flight, a round trip of three ticks
		arrive(2, 60*ms)
		now = now.Add(2 * SproutTick)
	}
	assert.Greater(t, r.Forecast(now).Counts[4], 5, "a flight that ends within a tick says the least that the link has")

	now = now.Add(time.Minute)
	assert.InDelta(t, 5, r.Forecast(now).Counts[4], 1, "after a long silence any rate is as likely")
	_, err = NewSproutReceiver(now, Params{"quantile": 2})
	assert.ErrorContains(t, err, "quantile")
}
