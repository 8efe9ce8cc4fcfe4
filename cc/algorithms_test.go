package cc

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// program is a sequence of events as bytes, so that rapid and the fuzzer can
// both write one: an operation, and a number for it to use.
type program []byte

// world is what the sender knows; it stays consistent whatever the program does.
type world struct {
	state  State
	rtt    time.Duration
	record bool // there is a record of when bytes left
	marks  bool // what is acknowledged came with ECN marks
	l4s    bool // and left as ECT(1)
	alg    Algorithm
	last   Control
	hint   Hint
}

const longest = 10 * time.Minute // of a wait or a round trip

func (w *world) wait(d time.Duration) { w.state.Now = w.state.Now.Add(min(d, longest)) }

func (w *world) ack(n Bytes, rtt time.Duration) {
	w.state.Delivered += n
	w.state.Inflight = max(0, w.state.Inflight-n)
	a := Ack{Acked: n, RTT: rtt, L4S: w.l4s}
	if w.marks {
		a.Marked = n
	}
	if rtt > 0 {
		p := path{state: w.state}
		p.smooth(rtt)
		w.state = p.state
		a.DeliveryRate = RateOf(n, rtt)
	}
	if w.record {
		a.Sent = Sent{At: max(1, w.state.Now.Add(-w.rtt)), Cwnd: w.last.Cwnd, Inflight: w.state.Inflight}
	}
	a.State = w.state
	w.alg.OnAck(a)
}

func (w *world) lose(n Bytes, timeout bool) {
	w.alg.OnLoss(Loss{State: w.state, Lost: n, SentAt: max(1, w.state.Now.Add(-w.state.SRTT)), Timeout: timeout})
}

// step runs one operation with the number v.
func (w *world) step(op, v byte) {
	mss := w.state.MSS
	switch op % 16 {
	case 0, 1: // the window's worth of single acknowledgements, up to 255
		for range int(v) {
			w.wait(w.rtt / 256)
			w.ack(mss, w.rtt)
		}
	case 2: // one report for many segments, not all of them whole
		w.wait(ms)
		w.ack(Bytes(v)*mss+Bytes(v), w.rtt)
	case 3: // a cumulative jump, soon past 4 GiB
		w.ack(1+Bytes(v)<<28, w.rtt)
	case 4: // no sample
		w.ack(Bytes(v)*mss, 0)
	case 5:
		w.lose(Bytes(v)*mss, false)
	case 6:
		w.lose(Bytes(v), true)
	case 7:
		w.wait(1 << (v % 40))
	case 8: // in time or late
		if w.last.NextTick != 0 {
			w.state.Now = max(w.state.Now, w.last.NextTick)
			w.wait(time.Duration(v) * ms)
			w.alg.OnTick(w.state)
		}
	case 9: // the round trip steps to anything
		w.rtt = min(1<<(v%40)+time.Duration(v), longest)
	case 10:
		w.wait(10 * time.Second)
		w.state.Inflight = 0
	case 11:
		w.state.CwndLimited = v%2 == 0
		w.state.Inflight = Bytes(float64(w.last.Cwnd) * float64(v) / 255)
	case 12: // the path's segment size changes, which the next event tells
		w.state.MSS = []Bytes{536, 1448, 8948, 65483}[v%4]
		w.ack(0, 0)
	case 13:
		w.record = v%2 == 0
	case 15:
		w.marks, w.l4s = v%2 == 0, v%4 > 1
	case 14: // the network speaks, of anything, and is silent from then on
		w.hint = Hint{
			At: w.state.Now, Capacity: Rate(v) << (v % 32), FairShare: Rate(v) << 16, LinkRate: 1 << (v % 40), ArrivalRate: Rate(v) << (v % 24),
			QueueRoom: Bytes(v) * mss, Flows: int(v % 9), RadioLost: w.hint.RadioLost + Bytes(v)*mss/8, Share: float64(v) / 255,
		}
		w.state.Hint = &w.hint
	}
}

// run returns the limits after each step and fails if they are not valid ones.
func (p program) run(t require.TestingT, name string, params Params, seed uint64) []Control {
	alg, err := New(name, Config{Params: params, Rand: rand.New(rand.NewPCG(seed, 0))})
	require.NoError(t, err)
	w := &world{
		state:  State{Now: 1, MSS: DefaultMSS, CwndLimited: true},
		rtt:    40 * ms,
		record: true,
		alg:    alg,
		last:   alg.Control(),
	}
	var trace []Control
	for i := 0; i+1 < len(p); i += 2 {
		w.step(p[i], p[i+1])
		ctl := alg.Control()
		require.Equal(t, ctl, alg.Control(), "asking changes nothing")
		require.GreaterOrEqual(t, ctl.Cwnd, w.state.MSS, "at least one segment")
		require.LessOrEqual(t, ctl.Cwnd, MaxCwnd)
		require.GreaterOrEqual(t, ctl.PacingRate, Rate(0))
		require.GreaterOrEqual(t, ctl.NextTick, Time(0))
		require.NotEmpty(t, ctl.Phase)
		requireNumbers(t, alg)
		w.last = ctl
		trace = append(trace, ctl)
	}
	return trace
}

// requireNumbers looks for a NaN behind the limits, where clamping would hide it.
func requireNumbers(t require.TestingT, alg Algorithm) {
	a, ok := alg.(Inspector)
	if !ok {
		return
	}
	inside := a.Inspect()
	require.Equal(t, inside, a.Inspect(), "looking changes nothing")
	for _, v := range inside {
		require.False(t, math.IsNaN(v) || math.IsInf(v, 0), "%T holds %v", alg, inside)
	}
}

func TestWhatAnAlgorithmShowsIsDescribed(t *testing.T) {
	for _, s := range Specs() {
		alg, err := New(s.Name, Config{Rand: rand.New(rand.NewPCG(1, 2))})
		require.NoError(t, err)
		a, shows := alg.(Inspector)
		assert.Equal(t, len(s.Internals) > 0, shows, s.Name)
		if !shows {
			continue
		}
		shown := a.Inspect()
		for _, v := range shown[len(s.Internals):] {
			assert.Zero(t, v, "%s shows more than its Spec describes", s.Name)
		}
		for _, i := range s.Internals {
			assert.NotEmpty(t, i.Name)
			assert.NotEmpty(t, i.About, "%s: %s", s.Name, i.Name)
		}
	}
}

// compatible are the settings out of p that go with those before them.
func compatible(s Spec, p Params) Params {
	kept := Params{}
	for _, d := range s.Params {
		kept[d.Name] = p[d.Name]
		if s.Check != nil {
			if _, err := s.Resolve(kept); err != nil {
				delete(kept, d.Name)
			}
		}
	}
	return kept
}

func TestAlgorithmsKeepTheirPromises(t *testing.T) {
	for _, s := range Specs() {
		t.Run(s.Name, func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				params := Params{}
				for _, d := range s.Params {
					if len(d.Choices) > 0 {
						params[d.Name] = float64(rapid.IntRange(0, len(d.Choices)-1).Draw(t, d.Name))
					} else {
						params[d.Name] = rapid.Float64Range(d.Min, d.Max).Draw(t, d.Name)
					}
				}
				params = compatible(s, params)
				p := program(rapid.SliceOfN(rapid.Byte(), 2, 200).Draw(t, "program"))
				seed := rapid.Uint64().Draw(t, "seed")
				require.Equal(t, p.run(t, s.Name, params, seed), p.run(t, s.Name, params, seed),
					"same seed, same limits")
			})
		})
	}
}

// FuzzAlgorithms chooses an algorithm, the corner of its settings' ranges and a program.
func FuzzAlgorithms(f *testing.F) {
	for i := range Specs() {
		f.Add(byte(i), byte(0), uint64(1), []byte{0, 200, 2, 30, 5, 3, 0, 100, 6, 1, 3, 40, 10, 0, 9, 35, 0, 50})
	}
	f.Fuzz(func(t *testing.T, which, corner byte, seed uint64, p []byte) {
		s := Specs()[int(which)%len(Specs())]
		params := Params{}
		for i, d := range s.Params {
			values := []float64{d.Default, d.Min, d.Max}
			if n := len(d.Choices); n > 0 {
				values = []float64{d.Default, 0, float64(n - 1)}
			}
			params[d.Name] = values[(int(corner)>>(2*i)&3)%3]
		}
		params = compatible(s, params)
		p = p[:min(len(p), 1000)]
		assert.Equal(t, program(p).run(t, s.Name, params, seed), program(p).run(t, s.Name, params, seed),
			"same seed, same limits")
	})
}

// typical is a flow's life in miniature: an acknowledgement in most steps,
// now and then a loss, a timeout or a tick.
func typical(alg Algorithm, w *world, i int) {
	w.alg = alg
	w.wait(ms)
	w.state.CwndLimited = true
	w.state.Inflight = 100 * DefaultMSS
	w.ack(DefaultMSS, 40*ms+time.Duration(i%32)*ms/4)
	switch {
	case i%5000 == 4999:
		w.lose(DefaultMSS, true)
	case i%500 == 499:
		w.lose(DefaultMSS, false)
	}
	if ctl := alg.Control(); ctl.NextTick != 0 && ctl.NextTick <= w.state.Now {
		alg.OnTick(w.state)
	}
}

// variants are all algorithms, with their profiles, as Parse reads them.
func variants() []string {
	var refs []string
	for _, s := range Specs() {
		refs = append(refs, s.Name)
		for _, f := range s.Profiles {
			refs = append(refs, s.Name+":"+f.Name)
		}
	}
	return refs
}

func TestAlgorithmsAllocateNothing(t *testing.T) {
	for _, ref := range variants() {
		alg := newPath(t, ref).alg
		w := &world{state: State{Now: 1, MSS: DefaultMSS}, rtt: 40 * ms, record: true}
		i := 0
		assert.Zero(t, testing.AllocsPerRun(20_000, func() { typical(alg, w, i); i++ }), ref)
	}
}

func BenchmarkOnAck(b *testing.B) {
	for _, ref := range variants() {
		b.Run(ref, func(b *testing.B) {
			alg := newPath(b, ref).alg
			ack := Ack{State: State{
				Now: 1, MSS: DefaultMSS, SRTT: 40 * ms, Inflight: 100 * DefaultMSS,
				CwndLimited: true,
			}, Acked: DefaultMSS}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				i++
				ack.Now = ack.Now.Add(ms)
				ack.RTT = 40*ms + time.Duration(i%32)*ms/4
				ack.Sent.At = max(1, ack.Now.Add(-ack.RTT))
				alg.OnAck(ack)
				_ = alg.Control()
			}
		})
	}
}
