//go:build linux

package agents

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/agents"
)

// kernelFold is over how long the kernel's acknowledgements are summed up before a program
// runs on them.
const kernelFold = time.Millisecond

// folding sums acknowledgements up before its algorithm hears of them, as over kernel TCP.
type folding struct {
	cc.Algorithm
	over  time.Duration // 0: it hears of each
	sum   cc.Ack
	since cc.Time // of the first in sum
	seen  *seen
}

func (f *folding) OnAck(a cc.Ack) {
	f.seen.ack(a)
	if f.sum.Acked == 0 {
		f.since = a.Now
	}
	a.Acked, a.Marked = a.Acked+f.sum.Acked, a.Marked+f.sum.Marked
	f.sum = a
	if a.Now.Sub(f.since) >= f.over {
		f.flush()
	}
}

func (f *folding) OnLoss(l cc.Loss) {
	f.flush()
	f.Algorithm.OnLoss(l)
}

func (f *folding) flush() {
	if f.sum.Acked > 0 {
		f.seen.run(f.sum)
		f.Algorithm.OnAck(f.sum)
		f.sum = cc.Ack{}
	}
}

// seen is what folds over a round trip of 20 ms come to that see each acknowledgement, and
// those that see what a program is run on.
type seen struct {
	acks, runs int
	each, some extremes
	next       cc.Time
	apart      map[string][]float64 // of folds, by how much the one is off, as a part of the other
}

// extremes are of round trips, in ms, and so is their average.
type extremes struct{ least, most, average float64 }

func (f *extremes) add(rtt time.Duration) {
	if rtt == 0 { // no sample
		return
	}
	ms := float64(rtt) / 1e6
	f.least, f.most = min(f.least, ms), max(f.most, ms)
	if f.average == 0 {
		f.average = ms
	}
	f.average = 0.8*f.average + 0.2*ms // (ewma 8 …)
}

func (s *seen) ack(a cc.Ack) {
	s.acks++
	s.each.add(a.RTT)
	if a.Now < s.next {
		return
	}
	for name, of := range map[string][2]float64{
		"min": {s.each.least, s.some.least}, "max": {s.each.most, s.some.most}, "ewma": {
			s.each.average,
			s.some.average,
		},
	} {
		if s.next > 0 && of[1] > 0 && !math.IsInf(of[1], 0) {
			s.apart[name] = append(s.apart[name], math.Abs(of[1]/of[0]-1))
		}
	}
	s.next = a.Now.Add(20 * time.Millisecond)
	for _, f := range []*extremes{&s.each, &s.some} {
		f.least, f.most = math.Inf(1), 0
	}
}

func (s *seen) run(a cc.Ack) {
	s.runs++
	s.some.add(a.RTT)
}

// folded is perRTT with acknowledgements that are summed up.
func folded(
	t testing.TB, who agents.Agents, link sim.LinkConfig, length, over time.Duration,
) (rates, delays []float64, s *seen) {
	t.Helper()
	s = &seen{apart: map[string][]float64{}}
	rates, delays = perRTT(t, func(scenario sim.Scenario) (r sim.Result, err error) {
		err = who.Simulate(scenario, func(scenario sim.Scenario) (err error) {
			lookup := scenario.Lookup
			scenario.Lookup = func(name string) (cc.Spec, error) {
				spec, err := lookup(name)
				algorithm := spec.New
				spec.New = func(c cc.Config) cc.Algorithm { return &folding{Algorithm: algorithm(c), over: over, seen: s} }
				return spec, err
			}
			r, err = sim.Run(scenario)
			return err
		})
		return r, err
	}, "ccp:"+who[0].Name, link, length)
	return rates, delays, s
}

func TestWhatIsFoldedIsAllThere(t *testing.T) {
	var got cc.Bytes
	f := &folding{Algorithm: summing{&got}, over: kernelFold, seen: &seen{apart: map[string][]float64{}}}
	for i := range 30 {
		f.OnAck(cc.Ack{
			State: cc.State{Now: cc.Time(i) * cc.Time(100*time.Microsecond)}, Acked: 1000,
			RTT: time.Millisecond,
		})
	}
	assert.Equal(t, 2, f.seen.runs, "one for each 1 ms that is over")
	f.OnLoss(cc.Loss{})
	assert.EqualValues(t, 30_000, got)
}

type summing struct{ acked *cc.Bytes }

func (s summing) OnAck(a cc.Ack)        { *s.acked += a.Acked }
func (summing) OnLoss(cc.Loss)          {}
func (summing) OnTick(cc.State)         {}
func (summing) Control() (c cc.Control) { return c }

// BenchmarkFold is what is lost where a program runs once per millisecond, and not for each
// acknowledgement: in what comes of Reno and Cubic, and in what their folds see.
//
//	go test -run '^$' -bench Fold -benchtime 1x ./test/agents
func BenchmarkFold(b *testing.B) {
	for _, name := range []string{"reno", "cubic"} {
		who := start(b, name)
		for at, over := range map[string]struct {
			link   sim.LinkConfig
			length time.Duration
		}{
			"96mbit": {sim.LinkConfig{Rate: 96e6, Delay: 10 * time.Millisecond, QueuePackets: 160}, 30 * time.Second},
			"1gbit":  {sim.LinkConfig{Rate: 1e9, Delay: 10 * time.Millisecond, QueuePackets: 1667}, 4 * time.Second},
		} {
			b.Run(name+"/"+at, func(b *testing.B) {
				for b.Loop() {
					each, eachDelays, _ := folded(b, who, over.link, over.length, 0)
					some, someDelays, s := folded(b, who, over.link, over.length, kernelFold)
					require.NotEmpty(b, s.apart["min"])
					b.ReportMetric(float64(s.acks)/float64(s.runs), "acks/run")
					b.ReportMetric(distance(each, some), "KS-throughput")
					b.ReportMetric(distance(eachDelays, someDelays), "KS-queueing")
					b.ReportMetric(100*total(some)/total(each), "%throughput")
					for fold, apart := range s.apart {
						slices.Sort(apart)
						b.ReportMetric(100*quantile(apart, 0.95), "%p95-"+fold+"-off")
					}
				}
			})
		}
	}
}

func total(of []float64) (sum float64) {
	for _, v := range of {
		sum += v
	}
	return sum
}
