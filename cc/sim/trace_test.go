package sim

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

func readTrace(tb testing.TB, lines string) *Trace {
	tb.Helper()
	trace, err := ReadTrace("test", strings.NewReader(lines))
	require.NoError(tb, err)
	return trace
}

func TestReadTrace(t *testing.T) {
	for _, c := range []struct {
		lines    string
		duration time.Duration
		mbps     float64
	}{
		{"1\n", time.Millisecond, 12},
		{"1", time.Millisecond, 12},
		{"1\r\n2\r\n", 2 * time.Millisecond, 12},
		{"0\n1\n", time.Millisecond, 24},
		{"5\n5\n5\n10\n", 10 * time.Millisecond, 4.8},
		{"# a drive\n\n5\n5\n#\n5\n10\n\n", 10 * time.Millisecond, 4.8},
	} {
		trace := readTrace(t, c.lines)
		assert.Equal(t, c.duration, trace.Duration(), "%q", c.lines)
		assert.InDelta(t, c.mbps, trace.MeanRate().Mbps(), 1e-3, "%q", c.lines)
	}
}

func TestReadTraceRefuses(t *testing.T) {
	for lines, complaint := range map[string]string{
		"":                               "trace bad is empty",
		"0\n0\n":                         "line 2: the last line is the length of the loop",
		"\n# nothing\n":                  "trace bad is empty",
		"1\n\n3\n2\n":                    "line 4: 2 comes after 3",
		"1\n3\n2\n":                      "line 3: 2 comes after 3",
		"1\n-2\n":                        `line 2: "-2" is not a whole number`,
		"1\n2.5\n":                       `line 2: "2.5" is not a whole number`,
		"1\n 2\n":                        `line 2: " 2" is not a whole number`,
		"86400001\n":                     "line 1: 86400001 ms is beyond the 24 h",
		"99999999999999999999999\n":      "line 1: 99999999999999999999999 ms is beyond",
		"1\n" + strings.Repeat("1", 100): "line 2: too long",
		"1\n" + strings.Repeat("1", 1e6): "line 2: too long",
	} {
		_, err := ReadTrace("bad", strings.NewReader(lines))
		assert.ErrorContains(t, err, complaint, "%.20q", lines)
	}
}

func TestReadTraceTellsOfAReaderThatFails(t *testing.T) {
	_, err := ReadTrace("gone", failingReader{})
	assert.ErrorIs(t, err, os.ErrDeadlineExceeded)
}

type failingReader struct{}

func (failingReader) Read([]byte) (int, error) { return 0, os.ErrDeadlineExceeded }

// The figures were measured by other means.
func TestRecordedTraces(t *testing.T) {
	for _, c := range []struct {
		file string
		mbps float64
		loop time.Duration
	}{
		{"mahimahi/Verizon-LTE-short.down", 5.03, 140_000 * time.Millisecond},
		{"mahimahi/ATT-LTE-driving-2016.down", 4.56, 120_002 * time.Millisecond},
		{"alcc/highwayGold", 15.86, 300_001 * time.Millisecond},
		{"fixed/12mbps", 12, time.Millisecond},
	} {
		t.Run(c.file, func(t *testing.T) {
			trace := recorded(t, c.file)
			assert.Equal(t, c.loop, trace.Duration())
			assert.InDelta(t, c.mbps, trace.MeanRate().Mbps(), 0.005)
		})
	}
}

// recorded reads a trace of a folder beside the repository, where there is one.
func recorded(tb testing.TB, file string) *Trace {
	tb.Helper()
	path := filepath.Join("../../../shared/traces", file)
	f, err := os.Open(path)
	if err != nil {
		tb.Skipf("no recorded trace %s here", file)
	}
	defer f.Close()
	trace, err := ReadTrace(file, f)
	require.NoError(tb, err)
	return trace
}

func TestTraceRepeats(t *testing.T) {
	trace := readTrace(t, "0\n2\n2\n5\n")
	var times []time.Duration
	for k := range int64(9) {
		times = append(times, trace.at(k)/time.Millisecond)
	}
	assert.Equal(t, []time.Duration{0, 2, 2, 5, 5, 7, 7, 10, 10}, times)
	for d, n := range map[float64]int64{-1: 0, 0: 1, 0.9: 1, 1.9: 1, 2: 3, 4.999: 3, 5: 5, 6.5: 5, 7: 7, 10: 9} {
		assert.Equal(t, n, trace.until(time.Duration(d*1e6)), "%v ms", d)
	}
}

func FuzzReadTrace(f *testing.F) {
	for _, seed := range []string{
		"1\n", "0\n5\n5\n9\n", "", "0\n", "7\n3\n", "x", "1\n\n", "1\r\n2\r\n",
		"18446744073709551617\n",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, lines []byte) {
		trace, err := ReadTrace("fuzz", bytes.NewReader(lines))
		if err != nil {
			assert.Nil(t, trace)
			return
		}
		assert.Positive(t, trace.Duration())
		assert.GreaterOrEqual(t, trace.MeanRate(), cc.Rate(0))
		var out bytes.Buffer
		require.NoError(t, trace.WriteLines(&out))
		again, err := ReadTrace("fuzz", &out)
		require.NoError(t, err)
		assert.Equal(t, trace, again, fmt.Sprintf("%q", lines))
	})
}
