package cc

import (
	"bytes"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// published is the grid of the models that MDI's authors ship.
var published = MDIGrid{Window: MDIAxis{-60, 60, 5}, Delay: MDIAxis{-25, 15, 5}}

func TestMDIChange(t *testing.T) {
	for _, tt := range []struct{ now, before, want, quantised float64 }{
		{55, 50, 16.99, 16}, // worked numbers: ±percent · log10
		{102, 100, 4, 4},
		{99, 100, -2, -2},
	} {
		v := relativeChange(tt.now, tt.before)
		assert.InDelta(t, tt.want, v, 0.005)
		fine := MDIAxis{-20, 20, 2}
		assert.Equal(t, tt.quantised, fine.valueAt(fine.nearestIndex(v)))
		assert.InEpsilon(t, tt.now, applyChange(v, tt.before), 1e-9, "and back")
	}
	for _, tt := range []struct{ v, before, want float64 }{
		{20, 100, 110}, // worked numbers
		{-60, 100, 70},
		{0, 100, 100},
		{60, 1000, 1200},
	} {
		assert.InDelta(t, tt.want, applyChange(tt.v, tt.before), 1e-9, "%+v", tt)
	}
	assert.InEpsilon(t, 100*math.Log10(1.1), relativeChange(2, 1), 1e-9, "below 1.1 the logarithm's weight stays above 0")
}

func TestMDIStates(t *testing.T) {
	m, err := newMDIModel(published)
	require.NoError(t, err)
	assert.Len(t, m.p, 225*225)
	levels, err := newMDIModel(MDIGrid{published.Window, MDIAxis{-5, 5, 5}, MDIAxis{0, 4, 0.5}})
	require.NoError(t, err)
	assert.Len(t, levels.p, 9*25*3*25)
	for _, tt := range []struct {
		model  *MDIModel
		epoch  MDIEpoch
		window float64
		row    int
	}{
		{m, MDIEpoch{Previous: -25}, -60, 0}, // worked numbers
		{m, MDIEpoch{}, 0, 137},
		{m, MDIEpoch{Previous: 15}, 60, 224},
		{m, MDIEpoch{Previous: -100}, -100, 0}, // beyond the grid its edges count
		{m, MDIEpoch{Previous: 100}, 100, 224},
		{m, MDIEpoch{Previous: 2.4}, -2.4, 137}, // the nearest, not the one below
		{m, MDIEpoch{Previous: 2.6}, 2.6, 137 + 25 + 1},
		{levels, MDIEpoch{Level: 2, Previous: 15}, 0, 4*25 + 12},
		{levels, MDIEpoch{Level: 9}, 60, 9*25 - 1},
	} {
		assert.Equal(t, tt.row, tt.model.stateIndex(tt.epoch, tt.window), "%+v", tt)
	}
}

// recordRun returns the epochs of an algorithm with these delays and windows, over a path of at least 20 ms.
func recordRun(run ...[2]float64) []MDIEpoch {
	window := 0.0
	r := MDIRecorder{
		Algorithm: newMDI(Config{MSS: DefaultMSS}, mdiModels[0].model), Window: func() float64 { return window },
	}
	now := Time(1)
	r.clock.least, r.clock.bar = 20, 20
	for _, e := range run {
		s := State{Now: now, MSS: DefaultMSS, Inflight: DefaultMSS}
		r.OnAck(Ack{State: s, Acked: DefaultMSS, RTT: time.Duration(e[0] * float64(ms))})
		now = r.clock.next
		window, s.Now = e[1], now
		r.OnTick(s)
	}
	return r.Epochs
}

func TestMDIRecorderRecordsEpochs(t *testing.T) {
	epochs := recordRun([2]float64{40, 30}, [2]float64{40, 30}, [2]float64{80, 24}, [2]float64{80, 24})
	assert.InDelta(t, 100*math.Log10(40), epochs[2].Change, 1e-9)
	assert.Equal(t, []MDIEpoch{
		{Level: 1, Window: 30},
		{Level: 1, Window: 30},
		{Change: epochs[2].Change, Level: 2, Window: 24},
		{Previous: epochs[2].Change, Level: 2, Window: 24},
	}, epochs)
}

// walk is a run whose windows and delays vary at random.
func walk(seed uint64, n int) []MDIEpoch {
	rng := rand.New(rand.NewPCG(seed, 1))
	run := [][2]float64{{50, 30}}
	for len(run) < n {
		last := run[len(run)-1]
		run = append(run, [2]float64{
			min(max(last[0]*(1+0.05*rng.NormFloat64()), 20), 400),
			min(max(last[1]*(1+0.08*rng.NormFloat64()), 2), 400),
		})
	}
	return recordRun(run...)
}

func TestMDITrainedBlocksAreDistributions(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := rapid.SampledFrom([]MDIGrid{
			{Window: published.Window, Delay: MDIAxis{-5, 5, 5}},
			{Window: MDIAxis{-60, 60, 20}, Delay: MDIAxis{-25, 15, 5}},
			DefaultMDIGrid,
		}).Draw(t, "grid")
		trainsDistributions(t, g, rapid.Uint64().Draw(t, "seed"))
	})
}

func trainsDistributions(t require.TestingT, g MDIGrid, seed uint64) {
	m, err := TrainMDI(g, walk(seed, 1000), walk(7, 100))
	require.NoError(t, err)
	filled := 0
	m.eachBlock(func(b []float64) {
		s := sumOf(b)
		if s == 0 {
			return
		}
		filled++
		require.InDelta(t, 1, s, 1e-9)
		for _, p := range b {
			require.True(t, p == 0 || p >= mdiLeastP, "%v", p)
		}
	})
	require.Positive(t, filled)
}

func TestMDILearnsWhatHappensBeyondTheGrid(t *testing.T) {
	run := recordRun([][2]float64{
		{50, 30},
		{50, 30},
		{50, 30},
		{80, 24},
		{80, 24},
		{160, 12},
		{160, 12},
		{100, 15},
		{100, 15},
		{50, 15},
		{50, 15},
		{25, 18},
	}...)
	m, err := TrainMDI(published, run)
	require.NoError(t, err)
	assert.InEpsilon(t, 0.8, m.Down, 1e-9, "the median of 0.8 and 0.5 is the larger")
	assert.InEpsilon(t, 1.2, m.Up, 1e-9, "the median of 1.25, 1 and 1.2")
	m, err = TrainMDI(published, run[:3])
	require.NoError(t, err)
	assert.Zero(t, m.Down, "nothing was seen there")
	assert.Zero(t, m.Up)
}

func TestMDIRefusesToLearnFromNothing(t *testing.T) {
	for complaint, runs := range map[string][][]MDIEpoch{
		"hold no three successive epochs within the grid": {{{Window: 30}, {Window: 30}}, nil},
		"the 1 runs hold no three": {{
			{Window: 30},
			{Level: math.Inf(1), Window: 30},
			{Window: math.Inf(1)},
			{Change: math.NaN(), Window: 1},
			{Window: 30},
		}},
		"the 0 runs": nil,
	} {
		_, err := TrainMDI(DefaultMDIGrid, runs...)
		assert.ErrorContains(t, err, complaint)
	}
	for complaint, g := range map[string]MDIGrid{
		"the window's changes from 1 to 2 in steps of 0":  {Window: MDIAxis{1, 2, 0}, Delay: MDIAxis{-1, 1, 1}},
		"the delay's changes from 1 to 2 leave out 0":     {Window: MDIAxis{-1, 1, 1}, Delay: MDIAxis{1, 2, 1}},
		"do not reach from -1 to 1 in whole steps of 0.3": {Window: MDIAxis{-1, 1, 1}, Delay: MDIAxis{-1, 1, 0.3}},
		"a grid of 10201 states is larger than":           {Window: MDIAxis{-50, 50, 1}, Delay: MDIAxis{-50, 50, 1}},
		"in steps of NaN are no grid": {
			Window: MDIAxis{-50, 50, math.NaN()}, Delay: MDIAxis{-50, 50, 1},
		},
	} {
		_, err := TrainMDI(g, walk(1, 10))
		assert.ErrorContains(t, err, complaint)
	}
}

func TestMDILooksAtTheNearestStateWhereItHasNone(t *testing.T) {
	m, err := newMDIModel(published)
	require.NoError(t, err)
	m.nextWindowProbabilities(m.stateIndex(MDIEpoch{Previous: 0}, 0),
		m.Grid.Delay.nearestIndex(5))[m.Grid.Window.nearestIndex(-10)] = 1
	m.nextWindowProbabilities(m.stateIndex(MDIEpoch{Previous: -25}, 60),
		m.Grid.Delay.nearestIndex(5))[m.Grid.Window.nearestIndex(20)] = 1
	m.findNearest()
	assert.Equal(t, -10.0, m.drawChange(m.stateIndex(MDIEpoch{Previous: 0}, 0), 5, 0.5))
	assert.Equal(t, -10.0, m.drawChange(m.stateIndex(MDIEpoch{Previous: 15}, -60), 5, 0.5))
	assert.Equal(t, 20.0, m.drawChange(m.stateIndex(MDIEpoch{Previous: -25}, 50), 5, 0.5))
	assert.Equal(t, 20.0, m.drawChange(0+m.Grid.Window.valueCount()-1, 5, 0.5), "row 0 is as good as any")
	assert.Equal(t, 0.0, m.drawChange(m.stateIndex(MDIEpoch{Previous: 0}, 0), -5, 0.5), "nowhere: the window stays")
}

func TestMDIDrawsInProportion(t *testing.T) {
	m, err := newMDIModel(published)
	require.NoError(t, err)
	b := m.nextWindowProbabilities(m.stateIndex(MDIEpoch{Previous: 0}, 0), m.Grid.Delay.nearestIndex(0))
	for change, probability := range map[float64]float64{-5: 0.25, 0: 0.5, 5: 0.2499} {
		b[m.Grid.Window.nearestIndex(change)] = probability
	}
	m.findNearest()
	for u, want := range map[float64]float64{0: -5, 0.2499: -5, 0.25: 0, 0.7499: 0, 0.75: 5, 0.99999: 5} {
		assert.Equal(t, want, m.drawChange(m.stateIndex(MDIEpoch{Previous: 0}, 0), 0, u), "%v", u)
	}
}

func TestMDIModelsSurviveTheirFile(t *testing.T) {
	m, err := TrainMDI(DefaultMDIGrid, walk(3, 5000))
	require.NoError(t, err)
	var first, second bytes.Buffer
	require.NoError(t, m.Write(&first, "made by a test", "of two lines"))
	assert.True(t, strings.HasPrefix(first.String(),
		"# made by a test\n# of two lines\n13,-18,18,3,3,-0.5,0.5,0.5,9,0,4,0.5\n"))
	again, err := ReadMDI(bytes.NewReader(first.Bytes()))
	require.NoError(t, err)
	require.NoError(t, again.Write(&second, "made by a test", "of two lines"))
	assert.Equal(t, first.String(), second.String())
	assert.InDeltaSlice(t, m.p, again.p, 1e-4)
	assert.Equal(t, m.nearest, again.nearest)
}

func TestMDIReadsPublishedModels(t *testing.T) {
	zeros := strings.Repeat("0.0,", 74) + "0.0\n"
	text := "25,-60,60,5,3,-5,5,5\n" + strings.Repeat(zeros, 37) +
		strings.Repeat("0.0,", 37) + "0.25,0.75" + strings.Repeat(",0.0", 36) + "\n" + strings.Repeat(zeros, 37)
	m, err := ReadMDI(strings.NewReader(text))
	require.NoError(t, err)
	assert.Equal(t, MDIGrid{Window: MDIAxis{-60, 60, 5}, Delay: MDIAxis{-5, 5, 5}}, m.Grid)
	assert.Equal(t, 5.0, m.drawChange(m.stateIndex(MDIEpoch{Previous: 0}, 0), 0, 0.5))
	assert.Zero(t, m.Down, "they have no edges")

	whole, err := ReadMDI(strings.NewReader("1,0,0,1,2,0,1,1\n0.2,0.6\n0,0\nedges,0.9,1.1\n\n"))
	require.NoError(t, err)
	assert.Equal(t, []float64{1, 1, 0, 0}, whole.p, "rows that add up to 1, instead of blocks")
	assert.Equal(t, 0.9, whole.Down)
}

func TestMDIRefusesFiles(t *testing.T) {
	for text, complaint := range map[string]string{
		"":                                 "it is empty",
		"# nothing\n":                      "it is empty",
		"1,2,3\n":                          "line 1: a grid has 8 numbers, or 12 with levels, not 3",
		"x,0,0,1,1,0,0,1\n":                `line 1: "x" is not a number`,
		"2,0,0,1,1,0,0,1\n":                "line 1: the grid is said to have 2 values from 0 to 0, but has 1",
		"1,0,0,1,1,0,0,1,1,0,0,0\n":        "line 1: the levels' step is 0",
		"1,0,0,1,1,0,0,1\n":                "it has 0 states, but its grid has 1",
		"1,0,0,1,1,0,0,1\n1\n1\n":          "line 3: there are more than the 1 states",
		"1,0,0,1,1,0,0,1\n1,1\n":           "line 2: there are more than 1 probabilities",
		"2,0,1,1,1,0,0,1\n1\n":             "line 2: there are 1 probabilities of a state, but should be 2",
		"1,0,0,1,1,0,0,1\n-1\n":            `line 2: "-1" is not one of the probabilities`,
		"1,0,0,1,1,0,0,1\nNaN\n":           `line 2: "NaN" is not one of the probabilities`,
		"1,0,0,1,1,0,0,1\n1\nedges,1\n":    "line 3: there are 1 edges, but should be 2",
		"1,0,0,1,1,0,0,1\n1\nedges,1,1\n1": "line 4: there is something behind the edges",
		"1e9,0,1e9,1,1,0,0,1\n":            "no grid",
		"1,0,0,1,1,0,0,1\n" + strings.Repeat("1", 2<<20): "line 2: bufio.Scanner: token too long",
	} {
		_, err := ReadMDI(strings.NewReader(text))
		assert.ErrorContains(t, err, complaint, "%.60q", text)
	}
}

func FuzzReadMDI(f *testing.F) {
	for _, text := range []string{
		"1,0,0,1,1,0,0,1\n1\nedges,0.9,1.1\n",
		"3,-5,5,5,1,0,0,1\n0.2,0.3,0.5\n0,0,0\n1,0,0\n",
		"# a comment\n2,0,1,1,2,-1,0,1\n0.2,0.3,0.5,1\n1,1,1,1\n0,0,0,0\n1e-300,0,0,1e9\n",
		"25,-60,60,5,9,-25,15,5\n",
		"1,0,0,1,1,0,0,1,2,0,1,1\n1\n1\n",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		m, err := ReadMDI(bytes.NewReader(text))
		if err != nil {
			return
		}
		m.eachBlock(func(b []float64) {
			if s := sumOf(b); s != 0 {
				require.InDelta(t, 1, s, 2e-3)
			}
		})
		for s := range m.rows {
			v := m.drawChange(s, 0, 0.5)
			require.True(t, v >= m.Grid.Window.Min && v <= m.Grid.Window.Max || v == 0)
		}
		var first, second bytes.Buffer
		require.NoError(t, m.Write(&first))
		again, err := ReadMDI(bytes.NewReader(first.Bytes()))
		require.NoError(t, err)
		require.NoError(t, again.Write(&second))
		require.Equal(t, first.String(), second.String(), "what is written reads back")
	})
}

// imitating is an mdi with a model of one's own.
func imitating(t *testing.T, m *MDIModel) (*path, *mdi) {
	t.Helper()
	m.findNearest()
	p := newPath(t, "mdi")
	alg := as[*mdi](p)
	alg.model = m
	return p, alg
}

// epochs lets n epochs pass with a delay each.
func epochs(p *path, delays ...time.Duration) (windows []float64) {
	for _, d := range delays {
		p.Ack(1, d)
		p.Wait(mdiEpoch)
		p.fill()
		p.alg.OnTick(p.state)
		windows = append(windows, as[*mdi](p).window)
	}
	return windows
}

func TestMDIReproducesADeterministicBlock(t *testing.T) {
	m, err := newMDIModel(published)
	require.NoError(t, err)
	m.nextWindowProbabilities(m.stateIndex(MDIEpoch{Previous: 0}, 0),
		m.Grid.Delay.nearestIndex(0))[m.Grid.Window.nearestIndex(20)] = 1
	m.nextWindowProbabilities(m.stateIndex(MDIEpoch{Previous: 0}, 20),
		m.Grid.Delay.nearestIndex(0))[m.Grid.Window.nearestIndex(-20)] = 1
	m.nextWindowProbabilities(m.stateIndex(MDIEpoch{Previous: 0}, -20),
		m.Grid.Delay.nearestIndex(0))[m.Grid.Window.nearestIndex(0)] = 1
	p, alg := imitating(t, m)
	alg.resetWindow(100)
	want := []float64{110, applyChange(-20, 110)}
	want = append(want, want[1])
	assert.InDeltaSlice(t, want, epochs(p, 50*ms, 50*ms, 50*ms), 1e-9)
}

func TestMDIImitatesWhatItLearned(t *testing.T) {
	// Its subject answers a delay that grows with a window that shrinks as much, and the other way round.
	run := [][2]float64{{100, 100}}
	for i := range 400 {
		last, v := run[len(run)-1], 8.0
		if i%4 >= 2 {
			v = -8
		}
		run = append(run, [2]float64{applyChange(v, last[0]), applyChange(-v, last[1])})
	}
	m, err := TrainMDI(MDIGrid{Window: MDIAxis{-20, 20, 2}, Delay: MDIAxis{-10, 10, 2}}, recordRun(run...))
	require.NoError(t, err)
	p, alg := imitating(t, m)
	alg.resetWindow(100)
	rtt, window := 100.0, 100.0
	epochs(p, 100*ms)
	alg.resetWindow(100)
	for i := range 100 {
		v := 8.0
		if i%4 >= 2 {
			v = -8
		}
		rtt, window = applyChange(v, rtt), applyChange(-v, window)
		got := epochs(p, time.Duration(rtt*float64(time.Millisecond)))
		require.InEpsilon(t, window, got[0], 1e-3, "epoch %d", i)
	}
}

func TestMDIBeyondTheTable(t *testing.T) {
	for _, tt := range []struct {
		name         string
		settings     string
		down, up     float64
		rise, fall   float64 // of a window of 100 packets
		delays       [2]time.Duration
		phase1, last string
	}{
		{
			"as learned", "mdi", 0.9, 1.2, 90, 108,
			[2]time.Duration{60 * ms, 40 * ms},
			"delay_exploding",
			"delay_collapsing",
		},
		{
			"where nothing was learned", "mdi", 0, 0, 95, 115,
			[2]time.Duration{60 * ms, 40 * ms},
			"delay_exploding",
			"delay_collapsing",
		},
		{
			"as set", "mdi:down=0.95,up_packets=5", 0.5, 2, 95, 100,
			[2]time.Duration{60 * ms, 40 * ms},
			"delay_exploding",
			"delay_collapsing",
		},
	} {
		m, err := newMDIModel(published)
		require.NoError(t, err)
		m.Down, m.Up = tt.down, tt.up
		m.findNearest()
		before := mdiModels[0].model
		mdiModels[0].model = m
		p := newPath(t, tt.settings)
		mdiModels[0].model = before
		epochs(p, 50*ms, 50*ms)
		as[*mdi](p).resetWindow(100)
		assert.InDelta(t, tt.rise, epochs(p, tt.delays[0])[0], 1e-9, tt.name)
		assert.Equal(t, tt.phase1, p.alg.Control().Phase)
		assert.InDelta(t, tt.fall, epochs(p, tt.delays[1])[0], 1e-9, tt.name)
		assert.Equal(t, tt.last, p.alg.Control().Phase)
		assert.InDelta(t, tt.fall, epochs(p, tt.delays[1])[0], 1e-9, "%s: an empty table keeps the window", tt.name)
		assert.Equal(t, "imitate", p.alg.Control().Phase)
	}
}

func TestMDIBacksOffInAnOutage(t *testing.T) {
	m, err := newMDIModel(published)
	require.NoError(t, err)
	p, alg := imitating(t, m)
	epochs(p, 50*ms, 50*ms)
	alg.resetWindow(100)
	for range 100 { // half a second without an acknowledgement
		p.Wait(mdiEpoch)
		p.fill()
		alg.OnTick(p.state)
	}
	assert.Less(t, alg.window, 5.0)
	assert.Equal(t, 50.0, alg.clock.d1, "the delays are those of the last epochs that had one")
}

// A round trip that was measured too short must not hold the window down for good.
func TestMDIRecoversFromATooShortRoundTrip(t *testing.T) {
	p := newPath(t, "mdi")
	alg := as[*mdi](p)
	epochs(p, 50*ms, ms)
	alg.resetWindow(1)
	for range 400 {
		s := p.state
		s.Inflight = DefaultMSS
		alg.OnAck(Ack{
			State: s, Acked: DefaultMSS, RTT: 50 * ms,
			Sent: Sent{At: s.Now.Add(-50 * ms), Inflight: DefaultMSS},
		})
		p.Wait(mdiEpoch)
		p.state.Inflight = DefaultMSS
		alg.OnTick(p.state)
	}
	assert.Equal(t, 50.0, alg.clock.least)
	assert.Greater(t, alg.window, 10.0)
}

func TestMDISendsAnEpochsPart(t *testing.T) {
	for _, tt := range []struct{ window, inflight, delay, want float64 }{
		{60, 50, 52, 15}, // worked numbers of Verus
		{60, 50, 4, 10},
		{60, 50, 10, 60},
		{10, 50, 52, 0},
	} {
		assert.InDelta(t, tt.want, packetsPerEpoch(tt.window, tt.inflight, tt.delay), 1e-9, "%+v", tt)
	}
}

func TestMDILosses(t *testing.T) {
	p := newPath(t, "mdi")
	alg := as[*mdi](p)
	epochs(p, 50*ms)
	alg.resetWindow(100)
	p.Lose(1)
	assert.Equal(t, 50.0, alg.window)
	p.loseSent(1, p.state.Now.Add(-ms))
	assert.Equal(t, 50.0, alg.window, "once a round trip")
	p.Timeout()
	assert.Equal(t, mdiStart, alg.window)
}

func TestMDILeavesAWindowThatIsNotUsed(t *testing.T) {
	m, err := newMDIModel(published)
	require.NoError(t, err)
	for s := range m.rows {
		m.nextWindowProbabilities(s, m.Grid.Delay.nearestIndex(0))[m.Grid.Window.nearestIndex(20)] = 1
	}
	p, alg := imitating(t, m)
	alg.resetWindow(100)
	alg.OnAck(Ack{State: p.state, Acked: DefaultMSS, RTT: 50 * ms, Sent: Sent{AppLimited: true}})
	p.Wait(mdiEpoch)
	alg.OnTick(p.state)
	assert.Equal(t, 100.0, alg.window)
	assert.Zero(t, alg.Control().NextTick, "nothing is in flight: nothing to learn until something is")
}

func TestLoadMDIAddsAChoice(t *testing.T) {
	spec, models := registry["mdi"], mdiModels
	t.Cleanup(func() { registry["mdi"], mdiModels = spec, models })
	const text = "1,0,0,1,1,0,0,1\n1\nedges,0.5,2\n"
	for name, complaint := range map[string]string{
		"verus": "the mdi model verus is built in",
		"":      `"" is not a name`,
		"a=b":   `"a=b" is not a name`,
	} {
		assert.ErrorContains(t, LoadMDI(name, strings.NewReader(text)), complaint)
	}
	require.ErrorContains(t, LoadMDI("mine", strings.NewReader("")), "it is empty")
	_, _, err := Parse("mdi:model=mine")
	require.ErrorContains(t, err, "must be one of verus")

	require.NoError(t, LoadMDI("mine", strings.NewReader(text)))
	p := newPath(t, "mdi:model=mine")
	assert.Equal(t, 0.5, as[*mdi](p).down)
	require.NoError(t, LoadMDI("mine", strings.NewReader(strings.Replace(text, "0.5", "0.7", 1))),
		"again, to replace it")
	assert.Equal(t, 0.7, as[*mdi](newPath(t, "mdi:model=mine")).down)
	assert.Equal(t, []string{"verus", "mine"}, registry["mdi"].Params[0].Choices)
}
