package cc

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestRates(t *testing.T) {
	assert.Equal(t, Rate(12_000_000), RateOf(1500, ms), "1500 bytes in 1 ms are 12 Mbit/s")
	assert.Equal(t, Rate(0), RateOf(1500, 0), "no time, no rate")
	assert.Equal(t, Rate(0), RateOf(-1, ms), "nothing moved, no rate")
	assert.Equal(t, Rate(math.MaxInt64), RateOf(math.MaxInt64, 1), "saturates")
	assert.Equal(t, Rate(math.MaxInt64), RateOf(math.MaxInt64/8+1, ms), "n·8 alone would not fit")
	assert.Equal(t, Rate(8e9), RateOf(math.MaxInt64, math.MaxInt64), "large on both sides")

	assert.Equal(t, Bytes(1500), Rate(12e6).BytesIn(ms))
	assert.Equal(t, Bytes(0), Rate(12e6).BytesIn(-ms))
	assert.Equal(t, Bytes(0), Rate(0).BytesIn(time.Hour))

	assert.Equal(t, ms, Rate(12e6).TimeFor(1500))
	assert.Equal(t, time.Duration(1), Rate(math.MaxInt64).TimeFor(1), "rounds up")
	assert.Equal(t, time.Duration(0), Rate(0).TimeFor(0), "nothing takes no time")
	assert.Equal(t, time.Duration(math.MaxInt64), Rate(0).TimeFor(1), "no rate takes for ever")
	assert.Equal(t, time.Duration(math.MaxInt64), Rate(1).TimeFor(MaxCwnd), "saturates")
	assert.InDelta(t, 12.5, Rate(12_500_000).Mbps(), 0)
}

func TestTimeForIsTheShortestThatSuffices(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := Rate(rapid.Int64Range(1, 1e13).Draw(t, "rate"))
		n := Bytes(rapid.Int64Range(1, 1<<50).Draw(t, "bytes"))
		d := r.TimeFor(n)
		if d == math.MaxInt64 {
			return
		}
		assert.GreaterOrEqual(t, r.BytesIn(d), n)
		assert.Less(t, r.BytesIn(d-1), n)
	})
}

func TestParseUnits(t *testing.T) {
	rates := map[string]Rate{
		"20mbit": 20e6, "1.5gbit": 1.5e9, "64kbit": 64e3, "9bit": 9, " 20 Mbit ": 20e6, "0bit": 0,
	}
	for in, want := range rates {
		got, err := ParseRate(in)
		require.NoError(t, err, in)
		assert.Equal(t, want, got, in)
	}
	sizes := map[string]Bytes{
		"64KiB": 65536, "2MB": 2e6, "1500B": 1500, "1GiB": 1 << 30, "0.5MiB": 1 << 19, "3gb": 3e9, "7kb": 7e3,
	}
	for in, want := range sizes {
		got, err := ParseBytes(in)
		require.NoError(t, err, in)
		assert.Equal(t, want, got, in)
	}
	for _, in := range []string{
		"", "20", "mbit", "-1mbit", "nanmbit", "infbit", "1e30gbit", "20MB",
		"9223372036854775808bit", "1 2mbit",
	} {
		_, err := ParseRate(in)
		assert.ErrorContains(t, err, "20mbit", "rate %q: the error shows how to write one", in)
	}
	for _, in := range []string{"", "64", "KiB", "-1B", "nanB", "20mbit", "1e30GiB"} {
		_, err := ParseBytes(in)
		assert.ErrorContains(t, err, "64KiB", "size %q: the error shows how to write one", in)
	}
}

func TestUnitsReadBackAsWritten(t *testing.T) {
	assert.Equal(t, "20mbit", Rate(20e6).String())
	assert.Equal(t, "1500kbit", Rate(1_500_000).String())
	assert.Equal(t, "64KiB", Bytes(65536).String())
	assert.Equal(t, "1500B", Bytes(1500).String())
	rapid.Check(t, func(t *rapid.T) {
		v := rapid.Int64Range(0, 1<<53).Draw(t, "v")
		r, err := ParseRate(Rate(v).String())
		require.NoError(t, err)
		assert.Equal(t, Rate(v), r)
		b, err := ParseBytes(Bytes(v).String())
		require.NoError(t, err)
		assert.Equal(t, Bytes(v), b)
	})
}

func FuzzParseUnits(f *testing.F) {
	for _, s := range []string{"20mbit", "64KiB", "1e3b", "-0bit", "0x1p3b", "٣mbit"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if r, err := ParseRate(s); err == nil && r < 0 {
			t.Errorf("rate %q is %d", s, r)
		}
		if b, err := ParseBytes(s); err == nil && b < 0 {
			t.Errorf("size %q is %d", s, b)
		}
	})
}

func TestSegments(t *testing.T) {
	s := segments{DefaultMSS}
	assert.Equal(t, 10*DefaultMSS, s.toBytes(10))
	assert.Equal(t, DefaultMSS, s.toBytes(0), "never less than a segment")
	assert.Equal(t, DefaultMSS, s.toBytes(-5))
	assert.Equal(t, DefaultMSS, s.toBytes(math.NaN()))
	assert.Equal(t, MaxCwnd, s.toBytes(math.Inf(1)), "never more than the largest window")
	assert.Equal(t, MaxCwnd, s.toBytes(s.clampWindow(1e300, 1)))
	assert.InDelta(t, 1.5, s.toPackets(DefaultMSS*3/2), 1e-9, "fractions count")
	assert.Zero(t, s.toPackets(-1))
	assert.Zero(t, s.pacingRate(2, 10, 0), "no round trip, no rate")
	assert.Equal(t, s.pacingRate(2, 10, time.Microsecond), s.pacingRate(2, 10, 1), "no division by less than 1 µs")
	s.setMSS(0)
	assert.Equal(t, DefaultMSS, s.mss, "unknown leaves it as it is")
	s.setMSS(9000)
	assert.Equal(t, Bytes(90000), s.toBytes(10))
}

func TestARaiseOfTheRateShortensAPause(t *testing.T) {
	const now = Time(time.Second)
	for _, tt := range []struct {
		name     string
		left     time.Duration
		from, to Rate
		want     time.Duration
	}{
		{"raised", 400 * time.Millisecond, 1e6, 1e8, 4 * time.Millisecond},
		{"lowered", 4 * time.Millisecond, 1e8, 1e6, 400 * time.Millisecond},
		{"paced no more", 400 * time.Millisecond, 1e6, 0, 0},
		{"over already", -time.Millisecond, 1e6, 1e8, -time.Millisecond},
	} {
		t.Run(tt.name, func(t *testing.T) {
			assert.Equal(t, tt.want, Repace(now, now.Add(tt.left), tt.from, tt.to).Sub(now))
		})
	}
}
