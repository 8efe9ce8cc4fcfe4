package sim

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// GenConfig is a model of a radio link, from which traces are drawn. It has
// three parts, each with its own source of randomness.
//
// The level is what the link gives on average over some tens of milliseconds.
// Either it is redrawn every Redraw, uniformly between Min and Max; or it wanders:
// each Noise is an Ornstein-Uhlenbeck process, stationary with deviation Sigma
// and correlation time Tau. Linear noise is a fraction of Mean and is added to
// it (Gauss-Markov); Log noises are summed into an exponent, which gives the
// many-fold swings, and the time spent in deep fades, of a moving phone. Each
// trace with Log noise is scaled to Mean.
//
// Outages come at random (Poisson) and are a silence of uniform length: a
// handover, a tunnel.
//
// Grants are the base station's scheduler: the user is served in runs of
// milliseconds, and not at all between them, with geometric lengths both, so
// that opportunities come in bursts.
type GenConfig struct {
	Name           string
	About          string
	Mean, Min, Max cc.Rate // the level stays between Min and Max; Max 0: no upper bound
	Linear         Noise
	Log            []Noise
	Redraw         time.Duration

	OutageEvery          time.Duration // mean time from one to the next; 0: none
	OutageMin, OutageMax time.Duration

	GrantShare float64       // of the milliseconds in which the user is served; 0: all
	GrantRun   time.Duration // mean length of a run of them
}

// Noise is a stationary Gauss-Markov process around zero.
type Noise struct {
	Sigma float64
	Tau   time.Duration
}

const mbit cc.Rate = 1_000_000

// models are the built-in ones. rapid, walk and highway are named after, and
// vary as, the channels that the ALCC evaluation used; lte was matched to the
// mean, the range of one-second rates and the longest gap of recorded LTE links.
var models = []GenConfig{
	{
		Name:  "lte",
		About: "LTE on the move: mean 9 Mbit/s, slow shadowing and fast fading, handovers of up to 1.2 s",
		Mean:  9 * mbit, Max: 60 * mbit,
		Log:         []Noise{{Sigma: 0.55, Tau: 8 * time.Second}, {Sigma: 0.45, Tau: 400 * time.Millisecond}},
		OutageEvery: 20 * time.Second, OutageMin: 300 * time.Millisecond, OutageMax: 1200 * time.Millisecond,
		GrantShare: 0.35, GrantRun: 3 * time.Millisecond,
	},
	{
		Name:  "rapid",
		About: "a new level every 5 s, uniform between 1 and 20 Mbit/s",
		Min:   1 * mbit, Max: 20 * mbit, Redraw: 5 * time.Second,
		GrantShare: 0.7, GrantRun: 4 * time.Millisecond,
	},
	{
		Name:  "walk",
		About: "a walk: Gauss-Markov level, mean 9, deviation 4 Mbit/s, correlation time 2 s",
		Mean:  9 * mbit, Linear: Noise{Sigma: 4. / 9, Tau: 2 * time.Second},
		GrantShare: 0.5, GrantRun: 4 * time.Millisecond,
	},
	{
		Name:  "highway",
		About: "a highway: mean 6 Mbit/s, and an outage of 0.5 to 3 s every 30 s",
		Mean:  6 * mbit, Linear: Noise{Sigma: 0.4, Tau: time.Second},
		OutageEvery: 30 * time.Second, OutageMin: 500 * time.Millisecond, OutageMax: 3 * time.Second,
		GrantShare: 0.5, GrantRun: 4 * time.Millisecond,
	},
}

// Models returns the built-in models.
func Models() []GenConfig { return slices.Clone(models) }

// Model returns the built-in model with that name; the error lists the names there are.
func Model(name string) (GenConfig, error) {
	var names []string
	for _, m := range models {
		if m.Name == name {
			return m, nil
		}
		names = append(names, m.Name)
	}
	return GenConfig{}, fmt.Errorf("no model %q of a link; there are %s", name, strings.Join(names, ", "))
}

// GeneratedLength is how long the traces are that commands and experiments draw,
// so that a model and a seed name one trace. It is the length of most recorded
// ones.
const GeneratedLength = 5 * time.Minute

// Generate draws a trace of the length d, a whole number of milliseconds, from
// the built-in model with that name.
func Generate(model string, seed uint64, d time.Duration) (*Trace, error) {
	m, err := Model(model)
	if err != nil {
		return nil, fmt.Errorf("sim: %w", err)
	}
	return m.Generate(seed, d)
}

// The parts draw from streams of their own: another grant pattern leaves the
// level and the outages as they were.
const (
	levelStream = iota + 1
	outageStream
	grantStream
)

// maxGenerated bounds what a generated trace may last.
const maxGenerated = time.Hour

// Generate draws a trace of the length d, a whole number of milliseconds. One
// seed gives one trace.
func (g GenConfig) Generate(seed uint64, d time.Duration) (*Trace, error) {
	if d < time.Millisecond || d > maxGenerated || d%time.Millisecond != 0 {
		return nil, fmt.Errorf("sim: a generated trace lasts a whole number of milliseconds, between 1 and %d, not "+
			"%v", maxGenerated.Milliseconds(), d)
	}
	level := g.level(int(d.Milliseconds()), rand.New(rand.NewPCG(seed, levelStream)))
	g.cutOutages(level, rand.New(rand.NewPCG(seed, outageStream)))
	g.grant(level, rand.New(rand.NewPCG(seed, grantStream)))

	t := &Trace{Name: fmt.Sprintf("%s seed %d", g.Name, seed)}
	credit := 0.0 // bytes
	for i, rate := range level {
		for credit += rate / 8000; credit >= float64(OpportunityBytes); credit -= float64(OpportunityBytes) {
			if len(t.times) == maxOpportunities-1 {
				return nil, fmt.Errorf("sim: %v of model %s has more than the %d opportunities a trace may have", d,
					g.Name, maxOpportunities)
			}
			t.times = append(t.times, int64(i+1))
		}
	}
	return t.closeAt(d)
}

// level returns the level in bits per second in each of n milliseconds.
func (g GenConfig) level(n int, rng *rand.Rand) []float64 {
	out := make([]float64, n)
	if g.Redraw > 0 {
		value := 0.0
		for i := range out {
			if i%int(g.Redraw.Milliseconds()) == 0 {
				value = float64(g.Min) + rng.Float64()*float64(g.Max-g.Min)
			}
			out[i] = value
		}
		return out
	}
	linear := g.Linear.start(rng)
	var logs []func() float64
	for _, noise := range g.Log {
		logs = append(logs, noise.start(rng))
	}
	sum := 0.0
	for i := range out {
		exponent := 0.0
		for _, step := range logs {
			exponent += step()
		}
		out[i] = max(0, 1+linear()) * math.Exp(exponent)
		sum += out[i]
	}
	scale := float64(g.Mean)
	if len(g.Log) > 0 {
		scale *= float64(n) / sum
	}
	for i := range out {
		out[i] = max(float64(g.Min), out[i]*scale)
		if g.Max > 0 {
			out[i] = min(out[i], float64(g.Max))
		}
	}
	return out
}

// start returns a function that returns the noise of the next millisecond, always 0 without noise.
func (n Noise) start(rng *rand.Rand) (step func() float64) {
	if n.Sigma == 0 {
		return func() float64 { return 0 }
	}
	keep := math.Exp(-float64(time.Millisecond) / float64(n.Tau))
	x, kick := n.Sigma*rng.NormFloat64(), n.Sigma*math.Sqrt(1-keep*keep)
	return func() float64 {
		x = keep*x + kick*rng.NormFloat64()
		return x
	}
}

// cutOutages silences the level.
func (g GenConfig) cutOutages(level []float64, rng *rand.Rand) {
	if g.OutageEvery <= 0 {
		return
	}
	at := 0.0 // milliseconds
	for {
		at += rng.ExpFloat64() * g.OutageEvery.Seconds() * 1000
		if at >= float64(len(level)) {
			return
		}
		length := g.OutageMin + time.Duration(rng.Float64()*float64(g.OutageMax-g.OutageMin))
		end := min(len(level), int(at)+int(length.Milliseconds()))
		clear(level[int(at):end])
		at = float64(end)
	}
}

// grant concentrates the level on the milliseconds in which the user is served.
func (g GenConfig) grant(level []float64, rng *rand.Rand) {
	if g.GrantShare <= 0 || g.GrantShare >= 1 {
		return
	}
	run := max(1, float64(g.GrantRun)/float64(time.Millisecond))
	pause := max(1, run*(1-g.GrantShare)/g.GrantShare)
	share := run / (run + pause)
	served := rng.Float64() < share
	for i := range level {
		if served {
			level[i] /= share
			served = rng.Float64() >= 1/run
		} else {
			level[i] = 0
			served = rng.Float64() < 1/pause
		}
	}
}
