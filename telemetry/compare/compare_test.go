package compare

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var start = time.Unix(1_800_000_000, 0)

// world draws the observations of a side. Hosts differ in rate and delay, and so do the hours of one host.
type world struct {
	random      *rand.Rand
	rate, delay float64 // factors
}

// observeHosts records hosts of a rule over three hours, each of which has between 20 and 80 busy seconds.
func (w world) observeHosts(r *Recorder, rule string, hosts int) {
	for h := range hosts {
		hostRate, hostDelay := 1e6*math.Exp(0.3*w.random.NormFloat64()), 0.05*math.Exp(0.4*w.random.NormFloat64())
		for hour := range 3 {
			at := start.Add(time.Duration(hour) * time.Hour)
			hourDelay := hostDelay * math.Exp(0.3*w.random.NormFloat64())
			r.Observe(at, rule, fmt.Sprint("host ", h), func(u *Unit) {
				for range 20 + w.random.IntN(60) {
					delay := w.delay * hourDelay * w.random.ExpFloat64()
					u.ObserveSecond(time.Duration(delay*float64(time.Second)), w.rate*hostRate*math.Exp(0.2*w.random.NormFloat64()))
				}
			})
		}
	}
}

// TestIntervalsHoldTheTruth repeats a comparison of sides that differ by known factors, and of sides that do not.
func TestIntervalsHoldTheTruth(t *testing.T) {
	const runs, hosts = 200, 40
	covered := map[string]int{}
	alarms := 0
	for seed := range uint64(runs) {
		var r Recorder
		random := rand.New(rand.NewPCG(seed, 7))
		world{random, 0.9, 0.5}.observeHosts(&r, "tried", hosts)
		world{random, 1, 1}.observeHosts(&r, "rest", hosts)
		world{random, 1, 1}.observeHosts(&r, "same", hosts)
		now := start.Add(3 * time.Hour)
		out := r.Compare(now, "tried", "rest", "hosts")
		for i, truth := range []float64{0.5, 0.5, 0.5, 0.9} {
			if f := out.Figures[i].Ratio; f.Low <= truth && truth <= f.High {
				covered[out.Figures[i].Name]++
			}
		}
		same := r.Compare(now, "same", "rest", "hosts")
		assert.False(t, same.Harmful)
		if f := same.Figures[rateFigure].Ratio; f.Low > 1 || f.High < 1 {
			alarms++
		}
	}
	require.Len(t, covered, 4)
	for name, n := range covered {
		part := float64(n) / runs
		t.Logf("%s: %.1f %% of the intervals hold the true ratio", name, 100*part)
		assert.InDelta(t, 0.95, part, 0.03, name)
	}
	assert.InDelta(t, 0.05, float64(alarms)/runs, 0.03, "sides that are the same")
}

// TestADifferenceOfFivePercentIsFound does so with 800 hosts on each side.
func TestADifferenceOfFivePercentIsFound(t *testing.T) {
	const runs = 20
	found := 0
	for seed := range uint64(runs) {
		var r Recorder
		random := rand.New(rand.NewPCG(seed, 8))
		world{random, 0.95, 1}.observeHosts(&r, "tried", 800)
		world{random, 1, 1}.observeHosts(&r, "rest", 800)
		if r.Compare(start.Add(3*time.Hour), "tried", "rest", "hosts").Figures[rateFigure].Ratio.High < 1 {
			found++
		}
	}
	assert.GreaterOrEqual(t, found, runs*8/10)
}

func TestVerdicts(t *testing.T) {
	record := func(rate, delay float64, hosts int) Result {
		var r Recorder
		world{rand.New(rand.NewPCG(1, 9)), rate, delay}.observeHosts(&r, "tried", hosts)
		world{rand.New(rand.NewPCG(2, 9)), 1, 1}.observeHosts(&r, "", 60)
		return r.Compare(start.Add(3*time.Hour), "tried", "", "hosts")
	}
	for name, c := range map[string]struct {
		rate, delay float64
		hosts       int
		verdict     string
		harmful     bool
	}{
		"far less delay": {
			1, 0.1, 60, `^9\d % less queueing delay at the 95th percentile ` +
				`\(−\d+ % to −\d+ %\); no difference in rate`, false,
		},
		"half of the rate": {0.5, 1, 60, `; [45]\d % less rate while busy`, true},
		"many times more":  {1, 20, 60, `^\d\d times the queueing delay`, false},
		"too few hosts":    {1, 0.1, 5, `^not enough yet: 5 and 60 hosts were seen, and 8 are needed`, false},
		"none":             {1, 0.1, 0, `^not enough yet: 0 and 60 hosts`, false},
	} {
		t.Run(name, func(t *testing.T) {
			out := record(c.rate, c.delay, c.hosts)
			assert.Regexp(t, c.verdict, out.Verdict)
			assert.Equal(t, c.harmful, out.Harmful)
		})
	}
}

func TestDownloadsAreToldApartBySize(t *testing.T) {
	var r Recorder
	for h := range 10 {
		r.Observe(start, "a", fmt.Sprint(h), func(u *Unit) {
			u.ObserveSecond(time.Millisecond, 1e6)
			u.ObserveDownload(100e3, time.Second)
			u.ObserveDownload(100e3+1, 2*time.Second)
			u.ObserveDownload(1e9, 60*time.Second)
		})
		r.Observe(start, "b", fmt.Sprint(h), func(u *Unit) {
			u.ObserveSecond(time.Millisecond, 1e6)
			u.ObserveDownload(5, 2*time.Second)
			u.ObserveDownload(1e9, 120*time.Second)
		})
	}
	ratios := map[string]float64{}
	for _, f := range r.Compare(start, "a", "b", "hosts").Figures {
		ratios[f.Name] = f.Ratio.Value
	}
	assert.InDelta(t, 0.5, ratios["downloads up to 100 kB"], 1e-9)
	assert.InDelta(t, 0.5, ratios["larger downloads"], 1e-9)
	assert.NotContains(t, ratios, "downloads up to 1 MB", "one side has none")
}

func TestARecorderIsBoundedAndForgets(t *testing.T) {
	var r Recorder
	second := func(u *Unit) { u.ObserveSecond(time.Millisecond, 1) }
	for h := range maxUnits + 100 {
		r.Observe(start, "a", fmt.Sprint(h), second)
	}
	assert.Len(t, r.units, maxUnits)
	r.Observe(start.Add(26*time.Hour), "a", "late", second)
	assert.Len(t, r.units, 1, "those of the day before are gone")
	assert.Empty(t, r.Compare(start.Add(60*time.Hour), "a", "b", "hosts").Figures, "and too old ones do not count")
}

func TestQuantilesAreThoseOfTheDelays(t *testing.T) {
	var u Unit
	for ms := 1; ms <= 1000; ms++ {
		u.ObserveSecond(time.Duration(ms)*time.Millisecond, 1)
	}
	for _, p := range []float64{0.1, 0.5, 0.95} {
		assert.InEpsilon(t, p, u.delayQuantile(p), 0.03)
	}
	assert.True(t, math.IsNaN(new(Unit).delayQuantile(0.5)))
	var high Unit
	high.ObserveSecond(time.Hour, 1)
	assert.Greater(t, high.delayQuantile(0.5), 10.0)
}
