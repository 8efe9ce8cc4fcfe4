package flow

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

const ms = time.Millisecond

// remote is a peer with a clock, at the end of a path with two ways of these lengths.
type remote struct {
	tick        time.Duration // 0: timestamps stand still
	skew        float64
	offset      uint32
	there, back func(at time.Duration) time.Duration
	shows       func(at time.Duration, v uint32) uint32 // in place of v; nil: v
}

// told is what the estimator said of one acknowledgement.
type told struct {
	at, rtt, least, there, back time.Duration
	queue                       time.Duration
	known                       bool
}

// watchWays has r acknowledge every so often, and shows what o tells of it.
func watchWays(o *oneWayEstimator, r remote, every, until time.Duration, see func(told)) {
	origin := cc.Time(time.Second)
	least := time.Duration(math.MaxInt64)
	var came, returned time.Duration // of the one before, which none overtakes
	for at := time.Duration(0); at < until; at += every {
		came = max(came, at+r.there(at))
		returned = max(returned, came+r.back(came))
		there, back, rtt, arrives := came-at, returned-came, returned-at, origin.Add(returned)
		value := r.offset
		if r.tick > 0 {
			value += uint32(int64(float64(came) * (1 + r.skew) / float64(r.tick)))
		}
		if r.shows != nil {
			value = r.shows(at, value)
		}
		least = min(least, rtt)
		queue, known := o.addReading(PeerClock{arrives, value}, arrives, rtt, least)
		see(told{at, rtt, least, there, back, queue, known})
	}
}

func steady(d time.Duration) func(time.Duration) time.Duration {
	return func(time.Duration) time.Duration { return d }
}

// swings takes base, and a queue that grows to high and drains in every period.
func swings(base, high, period time.Duration) func(time.Duration) time.Duration {
	return func(at time.Duration) time.Duration {
		return base + time.Duration(float64(high)*(1-math.Abs(2*float64(at%period)/float64(period)-1)))
	}
}

// between adds a queue that stands from one time to another, and rises and falls within
// its upper third as those of CUBIC do.
func between(way func(time.Duration) time.Duration, from, to, high time.Duration) func(time.Duration) time.Duration {
	return func(at time.Duration) time.Duration {
		queue := time.Duration(0)
		if at >= from && at < to {
			filled := min(1, float64(at-from)/float64(2*time.Second))
			queue = time.Duration(filled * (0.7 + 0.3*float64(at%(8*time.Second))/float64(8*time.Second)) * float64(high))
		}
		return way(at) + queue
	}
}

// longer adds to a way from some time on.
func longer(way func(time.Duration) time.Duration, from, by time.Duration) func(time.Duration) time.Duration {
	return func(at time.Duration) time.Duration {
		if at >= from {
			return way(at) + by
		}
		return way(at)
	}
}

// A minute of an upload, on any clock: what it makes acknowledgements wait is known to
// within two ticks and a few milliseconds, and nothing else is.
func TestOneWayTellsAnUploadOfAMinute(t *testing.T) {
	ticks := []time.Duration{
		time.Microsecond, 100 * time.Microsecond, ms, 1234567, 2 * ms, 4 * ms, 5 * ms, 7812500, 10 * ms,
	}
	rapid.Check(t, func(rt *rapid.T) {
		draw := func(name string, from, to time.Duration) time.Duration {
			return time.Duration(rapid.Int64Range(int64(from), int64(to)).Draw(rt, name))
		}
		r := remote{
			tick: rapid.SampledFrom(ticks).Draw(rt, "tick"), offset: rapid.Uint32().Draw(rt, "offset"),
			skew:  rapid.Float64Range(-400e-6, 400e-6).Draw(rt, "skew"),
			there: swings(draw("there", ms, 100*ms), draw("queue", 0, 40*ms), draw("period", 100*ms, 3*time.Second)),
		}
		back := draw("back", ms, 100*ms)
		begins := draw("begins", 30*time.Second, 40*time.Second)
		r.back = between(steady(back), begins, begins+time.Minute, draw("upload", 100*ms, 2*time.Second))
		var o oneWayEstimator
		known := time.Duration(-1)
		watchWays(&o, r, draw("every", 2*ms, 20*ms), 2*time.Minute, func(h told) {
			truth := min(h.back-back, h.rtt-h.least)
			switch {
			case !h.known && h.queue > 0, h.known && h.queue > truth+max(5*ms, r.tick+ms),
				h.known && h.queue < truth-2*r.tick-15*ms:
				rt.Fatalf("%+v, but it waited %v", h, truth)
			case h.known && known < 0:
				known = h.at
			}
		})
		require.GreaterOrEqual(rt, known, time.Duration(0))
		require.Less(rt, known, begins, "it is known by then")
	})
}

// A path that has become longer, both ways: the way there is shown as longer by what it
// is, at once; the way back becomes the least in time, without a step.
func TestOneWayFollowsAPathThatGrew(t *testing.T) {
	const by, at = 50 * ms, 20 * time.Second
	var o oneWayEstimator
	r := remote{
		tick: ms, skew: 50e-6, there: longer(swings(10*ms, 20*ms, time.Second), at, by), back: longer(steady(10*ms),
			at, by),
	}
	last := told{}
	newest := time.Duration(0)
	watchWays(&o, r, 5003*time.Microsecond, 20*time.Minute, func(h told) {
		newest = h.queue
		if h.at < time.Second || h.at > at && h.at < at+time.Second {
			last = h
			return
		}
		off := h.rtt - h.queue - 10*ms - h.there
		step := off - (last.rtt - last.queue - 10*ms - last.there)
		// Nothing shows the skew any better while the way back is longer than the least.
		unsure := 2*ms + time.Duration(40e-6*float64(h.at))
		if !h.known || step.Abs() > 2*ms || off.Abs() > unsure && h.at < 8*time.Minute {
			t.Fatalf("the way there is off by %v, a step of %v: %+v", off, step, h)
		}
		last = h
	})
	assert.LessOrEqual(t, newest, 3*ms, "the longer way back is the least by now")
}

func TestOneWayOfClocksThatAreNone(t *testing.T) {
	for name, shows := range map[string]func(time.Duration, uint32) uint32{
		"stands still":   func(time.Duration, uint32) uint32 { return 7 },
		"runs backwards": func(_ time.Duration, v uint32) uint32 { return -v },
		"leaps":          func(at time.Duration, v uint32) uint32 { return v + uint32(at/(50*ms))*1_000_003 },
		"much too fast":  func(at time.Duration, _ uint32) uint32 { return uint32(at / 100) },
		"much too slow":  func(at time.Duration, _ uint32) uint32 { return uint32(at / (500 * ms)) },
		"noise":          func(at time.Duration, _ uint32) uint32 { return uint32(at) * 2654435761 },
	} {
		var o oneWayEstimator
		r := remote{
			tick: ms, there: swings(10*ms, 30*ms, time.Second), back: swings(10*ms, 10*ms, 700*ms),
			shows: shows,
		}
		watchWays(&o, r, 5*ms, 2*time.Minute, func(h told) {
			require.False(t, h.known, "%s: %+v", name, h)
			require.Zero(t, h.queue, name)
		})
	}
	var o oneWayEstimator
	queue, known := o.addReading(PeerClock{}, cc.Time(time.Second), 20*ms, 10*ms)
	assert.Zero(t, queue)
	assert.False(t, known)
}

// A clock that is set is learnt again; one that wraps around goes on.
func TestOneWayOfAClockThatIsSet(t *testing.T) {
	for _, set := range []int64{-100_000, -300, 300, 100_000} {
		var o oneWayEstimator
		r := remote{
			tick: ms, offset: math.MaxUint32 - 5000, there: swings(10*ms, 20*ms, 500*ms), back: swings(10*ms, 40*ms,
				900*ms),
			shows: func(at time.Duration, v uint32) uint32 {
				if at > 30*time.Second {
					v += uint32(set)
				}
				return v
			},
		}
		unknown := 0
		watchWays(&o, r, 5*ms, time.Minute, func(h told) {
			switch {
			case h.at < 5*time.Second:
			case h.at < 30*time.Second || h.at > 40*time.Second:
				truth := min(h.back-10*ms, h.rtt-h.least)
				require.True(t, h.known, "%+v", h)
				require.InDelta(t, truth, h.queue, float64(3*ms), "%d: %+v", set, h)
			case !h.known:
				unknown++
			}
		})
		assert.NotZero(t, unknown, "%d", set)
	}
}

// One that is set by less than shows at once is not taken for a queue for long.
func TestOneWayOfAClockThatIsSetBackALittle(t *testing.T) {
	var o oneWayEstimator
	r := remote{
		tick: ms, there: swings(10*ms, 20*ms, 500*ms), back: steady(10 * ms),
		shows: func(at time.Duration, v uint32) uint32 {
			if at > 30*time.Second {
				v -= 15
			}
			return v
		},
	}
	watchWays(&o, r, 5*ms, time.Minute, func(h told) {
		if h.at > 31*time.Second {
			require.LessOrEqual(t, h.queue, 2*ms, "%+v", h)
		}
	})
}

// Acknowledgements that an outage kept on their way, and that tell of no round trip, say
// nothing of the clock: neither at the start nor later. A queue stands on the way
// there, so that a clock takes long to be measured.
func TestOneWayOfAcknowledgementsThatAnOutageKept(t *testing.T) {
	const least, rtt, late, step = 20 * ms, 50 * ms, time.Second, 5 * ms
	for _, outage := range []time.Duration{0, 20 * time.Second} {
		var o oneWayEstimator
		known := false
		for at := time.Duration(0); at < 2*time.Minute; at += step {
			arrives := cc.Time(time.Hour).Add(at)
			said, sample := arrives.Add(-least/2), rtt
			if at >= outage && at < outage+10*step {
				said, sample = said.Add(-late), 0
			}
			var queue time.Duration
			queue, known = o.addReading(PeerClock{arrives, uint32(time.Duration(said) / ms)}, arrives, sample, least)
			if at > outage+time.Second {
				require.LessOrEqual(t, queue, 2*ms, "outage at %v, %v later", outage, at-outage)
			}
		}
		assert.True(t, known)
	}
}

func FuzzOneWay(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
	f.Fuzz(func(t *testing.T, data []byte) {
		var o oneWayEstimator
		now, least := cc.Time(1), time.Duration(math.MaxInt64)
		for ; len(data) >= 8; data = data[8:] {
			now = now.Add(time.Duration(data[0]) << (data[1] % 40))
			rtt := time.Duration(data[2]) << (data[3] % 40)
			if rtt > 0 {
				least = min(least, rtt)
			}
			value := uint32(data[4]) | uint32(data[5])<<8 | uint32(data[6])<<16 | uint32(data[7])<<24
			queue, known := o.addReading(PeerClock{now, value}, now, rtt, least)
			require.GreaterOrEqual(t, queue, time.Duration(0))
			require.LessOrEqual(t, queue, max(0, rtt-least))
			require.True(t, known || queue == 0)
			require.False(t, math.IsNaN(o.skew) || math.Abs(o.skew) > 0.01)
		}
	})
}

// Whatever a peer shows of its clock, nothing changes but what is known of the way back;
// and that leaves no less of a round trip than the least one.
func TestALyingClockChangesNothingElse(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		seed := rapid.Uint64().Draw(rt, "seed")
		play := func(lies bool) (events []Event) {
			p := newTestbed(t)
			p.trace = func(e Event) {
				require.GreaterOrEqual(rt, e.Reverse, time.Duration(0))
				require.LessOrEqual(rt, e.Reverse, max(0, e.RTT-e.State.MinRTT))
				e.Reverse, e.State.OneWay = 0, false
				events = append(events, e)
			}
			l := p.openEnforced(under("cubic"))
			rng := seed
			next := func(n uint64) uint64 {
				rng = rng*6364136223846793005 + 1442695040888963407
				return (rng >> 33) % n
			}
			for range 200 {
				p.wait(time.Duration(1+next(20)) * ms)
				l.fill()
				l.r.RTT = time.Duration(20+next(80)) * ms
				lie := uint32(next(1 << 31))
				if next(2) == 0 {
					lie = uint32(p.now / cc.Time(ms))
				}
				if lies {
					l.r.Peer = PeerClock{p.now, lie}
				}
				if n := min(l.r.Pipe, cc.Bytes(1+next(8))*mss); n > 0 {
					l.r.Acked += n
					l.r.Pipe -= n
				}
				l.report()
			}
			return events
		}
		require.Equal(rt, play(false), play(true))
	})
}
