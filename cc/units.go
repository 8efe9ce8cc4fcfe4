package cc

import (
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"
	"time"
)

// Bytes counts bytes.
type Bytes int64

// Rate is in bits per second.
type Rate int64

// Time is a reading of the caller's monotonic clock, in nanoseconds. Clocks start above zero, which
// stands for "unset".
type Time int64

// Never is later than every other Time.
const Never Time = math.MaxInt64

// MaxCwnd is the window that never binds: 1 TiB.
const MaxCwnd Bytes = 1 << 40

// DefaultMSS is the payload of a 1500-byte TCP segment with timestamps.
const DefaultMSS Bytes = 1448

// InitialCwndPackets is the initial window of RFC 6928, in segments.
const InitialCwndPackets = 10

// Add returns t moved by d.
func (t Time) Add(d time.Duration) Time { return t + Time(d) }

// Sub returns t−u.
func (t Time) Sub(u Time) time.Duration { return time.Duration(t - u) }

// RateOf returns the rate that moves n bytes in d; 0 when either is not positive.
func RateOf(n Bytes, d time.Duration) Rate {
	if n <= 0 || d <= 0 {
		return 0
	}
	return Rate(mulDiv(uint64(n), 8*uint64(time.Second), uint64(d)))
}

// BytesIn returns how many whole bytes the rate moves in d.
func (r Rate) BytesIn(d time.Duration) Bytes {
	if r <= 0 || d <= 0 {
		return 0
	}
	return Bytes(mulDiv(uint64(r), uint64(d), 8*uint64(time.Second)))
}

// TimeFor returns how long the rate needs for n bytes, rounded up; the longest
// duration for a rate of zero.
func (r Rate) TimeFor(n Bytes) time.Duration {
	if n <= 0 {
		return 0
	}
	if r <= 0 {
		return math.MaxInt64
	}
	d := mulDiv(uint64(n), 8*uint64(time.Second), uint64(r))
	if d == math.MaxInt64 {
		return math.MaxInt64
	}
	if r.BytesIn(time.Duration(d)) < n {
		d++
	}
	return time.Duration(d)
}

// Repace returns the end of a sender's pause when its rate changes now. The rest of the pause is scaled
// to the new rate, so that a raise counts at once. A rate of zero does not pace.
func Repace(now, until Time, from, to Rate) Time {
	if until <= now || to == 0 {
		return min(until, now)
	}
	return now.Add(to.TimeFor(from.BytesIn(until.Sub(now))))
}

// mulDiv returns a·b/c without overflow, saturating at the largest int64.
func mulDiv(a, b, c uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	if hi >= c {
		return math.MaxInt64
	}
	q, _ := bits.Div64(hi, lo, c)
	return min(q, math.MaxInt64)
}

// Mbps returns the rate in Mbit/s.
func (r Rate) Mbps() float64 { return float64(r) / 1e6 }

// unit is one accepted suffix, in lower case.
type unit struct {
	suffix string
	factor float64
}

// Longer suffixes first, so that "kbit" is not read as "bit".
var (
	rateUnits = []unit{{"gbit", 1e9}, {"mbit", 1e6}, {"kbit", 1e3}, {"bit", 1}}
	byteUnits = []unit{
		{"gib", 1 << 30},
		{"mib", 1 << 20},
		{"kib", 1 << 10},
		{"gb", 1e9},
		{"mb", 1e6},
		{"kb", 1e3},
		{"b", 1},
	}
)

// ParseRate reads a rate such as "20mbit", "1.5gbit" or "64kbit"; the unit is required.
func ParseRate(s string) (Rate, error) {
	v, err := parseUnit(s, rateUnits, "20mbit")
	return Rate(v), err
}

// ParseBytes reads a size such as "64KiB", "2MB" or "1500B"; the unit is required.
func ParseBytes(s string) (Bytes, error) {
	v, err := parseUnit(s, byteUnits, "64KiB")
	return Bytes(v), err
}

func parseUnit(s string, units []unit, example string) (int64, error) {
	t := strings.ToLower(strings.TrimSpace(s))
	for _, u := range units {
		num, ok := strings.CutSuffix(t, u.suffix)
		if !ok {
			continue
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(num), 64)
		if err != nil || math.IsNaN(v) || v < 0 || v*u.factor >= math.MaxInt64 {
			return 0, fmt.Errorf("%q is not a number with a unit, such as %s", s, example)
		}
		return int64(math.Round(v * u.factor)), nil
	}
	return 0, fmt.Errorf("%q needs a unit, such as %s", s, example)
}

// String writes the rate with the largest unit that keeps it exact, readable by ParseRate.
func (r Rate) String() string { return formatUnit(int64(r), rateUnits) }

// String writes the size with the largest binary unit that keeps it exact, readable by ParseBytes.
func (b Bytes) String() string {
	s := formatUnit(int64(b), []unit{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}})
	return s
}

func formatUnit(v int64, units []unit) string {
	for _, u := range units {
		f := int64(u.factor)
		if v != 0 && v%f == 0 {
			return strconv.FormatInt(v/f, 10) + u.suffix
		}
	}
	return strconv.FormatInt(v, 10) + units[len(units)-1].suffix
}
