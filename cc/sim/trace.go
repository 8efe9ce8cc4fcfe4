package sim

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// OpportunityBytes is what one line of a trace may carry.
const OpportunityBytes cc.Bytes = 1500

// The bounds of a trace: 96 MB of numbers, and a day.
const (
	maxOpportunities = 12 << 20
	maxTraceMillis   = 24 * 60 * 60 * 1000
	maxTraceLine     = 32 // bytes
)

// Trace is a recorded link in Mahimahi's format: each line is the millisecond,
// from the start, at which 1500 bytes may leave; a line repeats when more may.
// A player loops it at its end: the last line is also the length of the loop.
// Lines that are blank, or begin with #, say nothing.
type Trace struct {
	Name  string
	times []int64 // milliseconds, ascending; the last is above zero
}

var errTraceLine = errors.New("too long for a number of milliseconds")

// ReadTrace parses a trace; an error names the line.
func ReadTrace(name string, r io.Reader) (*Trace, error) {
	var times []int64
	last := int64(0)
	n, err := readNumbers(name, r, func(at int64) error {
		if at < last {
			return fmt.Errorf("%d comes after %d; times must not go back", at, last)
		}
		last = at
		times = append(times, at)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if len(times) == 0 {
		return nil, fmt.Errorf("sim: trace %s is empty; it needs one line, a number of milliseconds, per 1500 bytes",
			name)
	}
	if last == 0 {
		return nil, fmt.Errorf("sim: trace %s: line %d: the last line is the length of the loop and must be above 0",
			name, n)
	}
	return &Trace{Name: name, times: slices.Clip(times)}, nil
}

// readNumbers hands over the number of each line that says something. It returns how
// many lines there are; an error names the line.
func readNumbers(name string, r io.Reader, take func(int64) error) (n int, err error) {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		n++
		line := lines.Bytes()
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		v, err := parseMillis(line)
		if err == nil && n > maxOpportunities {
			err = fmt.Errorf("a trace may have at most %d lines", maxOpportunities)
		}
		if err == nil {
			err = take(v)
		}
		if err != nil {
			return n, fmt.Errorf("sim: trace %s: line %d: %w", name, n, err)
		}
	}
	if err := lines.Err(); errors.Is(err, bufio.ErrTooLong) {
		return n, fmt.Errorf("sim: trace %s: line %d: %w", name, n+1, errTraceLine)
	} else if err != nil {
		return n, fmt.Errorf("sim: read trace %s: %w", name, err)
	}
	return n, nil
}

// parseMillis reads a line: decimal digits, nothing else.
func parseMillis(line []byte) (int64, error) {
	if len(line) > maxTraceLine {
		return 0, errTraceLine
	}
	v, err := strconv.ParseUint(string(line), 10, 63)
	switch {
	case errors.Is(err, strconv.ErrSyntax):
		return 0, fmt.Errorf("%q is not a whole number of milliseconds", line)
	case err != nil || v > maxTraceMillis:
		return 0, fmt.Errorf("%s ms is beyond the %d h a trace may last", line, maxTraceMillis/3_600_000)
	}
	return int64(v), nil //nolint:gosec // at most maxTraceMillis
}

// WriteLines writes the trace in the format that ReadTrace reads.
func (t *Trace) WriteLines(w io.Writer) error {
	buf := bufio.NewWriter(w) // which keeps its first error
	for _, at := range t.times {
		_, _ = buf.Write(append(strconv.AppendInt(buf.AvailableBuffer(), at, 10), '\n'))
	}
	if err := buf.Flush(); err != nil {
		return fmt.Errorf("sim: write trace %s: %w", t.Name, err)
	}
	return nil
}

// loop is the length of one loop in milliseconds.
func (t *Trace) loop() int64 { return t.times[len(t.times)-1] }

// Duration is the length of one loop.
func (t *Trace) Duration() time.Duration { return time.Duration(t.loop()) * time.Millisecond }

// MeanRate is the mean capacity of one loop.
func (t *Trace) MeanRate() cc.Rate {
	return cc.RateOf(cc.Bytes(len(t.times))*OpportunityBytes, t.Duration())
}

// at returns when opportunity k comes, counted from the first of the first loop.
func (t *Trace) at(k int64) time.Duration {
	n := int64(len(t.times))
	return time.Duration(k/n*t.loop()+t.times[k%n]) * time.Millisecond
}

// until counts the opportunities that have come at d, inclusive.
func (t *Trace) until(d time.Duration) int64 {
	if d < 0 {
		return 0
	}
	ms := int64(d / time.Millisecond)
	within, _ := slices.BinarySearch(t.times, ms%t.loop()+1)
	return ms/t.loop()*int64(len(t.times)) + int64(within)
}

// Carries is what the trace can carry after from and up to to, whole milliseconds.
func (t *Trace) Carries(from, to time.Duration) cc.Bytes {
	return cc.Bytes(t.until(to)-t.until(from)) * OpportunityBytes
}

// LongestGap is the longest time in one loop, or from one into the next, without an
// opportunity.
func (t *Trace) LongestGap() time.Duration {
	longest, last := t.times[0], int64(0)
	for _, at := range t.times {
		longest, last = max(longest, at-last), at
	}
	return time.Duration(longest) * time.Millisecond
}
