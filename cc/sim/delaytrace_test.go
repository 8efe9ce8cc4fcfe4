package sim

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

func TestDelaysAreRead(t *testing.T) {
	d, err := ReadDelayTrace("leo", strings.NewReader("# one way\n12\n\n30\n8\n"))
	require.NoError(t, err)
	assert.Equal(t, 30*time.Millisecond, d.Duration())
	assert.Equal(t, 12*time.Millisecond, d.First())
	for since, want := range map[int]int{0: 12, 9: 12, 10: 30, 29: 8, 30: 12, 55: 8, 3000: 12} {
		assert.Equal(t, time.Duration(want)*time.Millisecond, d.at(time.Duration(since)*time.Millisecond),
			"after %d ms", since)
	}
	for lines, complaint := range map[string]string{
		"": "trace bad is empty", "5\n10001\n": "line 2: 10.001s is beyond the " +
			"10s", "5\n-1\n": `line 2: "-1" is not a whole number`,
	} {
		_, err := ReadDelayTrace("bad", strings.NewReader(lines))
		assert.ErrorContains(t, err, complaint, "%q", lines)
	}
}

func FuzzReadDelayTrace(f *testing.F) {
	f.Add([]byte("12\n#\n0\n"))
	f.Fuzz(func(t *testing.T, lines []byte) {
		if d, err := ReadDelayTrace("fuzz", bytes.NewReader(lines)); err == nil {
			assert.Equal(t, d.First(), d.at(d.Duration()))
		}
	})
}

// Whatever the delay does, packets of both kinds of link arrive in the order in which
// they left, and none before its delay is over.
func TestAMovingDelayOvertakesNobody(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		steps := rapid.SliceOfN(rapid.IntRange(0, 80), 1, 20).Draw(t, "delays")
		delays := &DelayTrace{}
		for _, ms := range steps {
			delays.steps = append(delays.steps, time.Duration(ms)*time.Millisecond)
		}
		cfg := LinkConfig{Rate: 12e6, Delay: time.Millisecond, Delays: delays}
		now, last := cc.Time(time.Second), cc.Time(0)
		tail, managed := NewLink(cfg, now), NewManagedLink(cfg, now)
		check := func(v Verdict, last cc.Time) {
			assert.GreaterOrEqual(t, v.Arrives, last)
			assert.GreaterOrEqual(t, v.Arrives.Sub(v.Departs), time.Millisecond+slices.Min(delays.steps))
			assert.LessOrEqual(t, v.Arrives.Sub(v.Departs), time.Millisecond+slices.Max(delays.steps))
		}
		var lastManaged cc.Time
		for range 50 {
			now = now.Add(time.Duration(rapid.IntRange(0, 20).Draw(t, "gap")) * time.Millisecond)
			v := tail.Send(now, 1500)
			check(v, last)
			last = v.Arrives
			managed.Enqueue(now, 0, 1500, 0, NotECT)
			for _, gone := range managed.Advance(now) {
				check(gone.Verdict, lastManaged)
				lastManaged = gone.Arrives
			}
		}
	})
}
