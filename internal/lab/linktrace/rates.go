package linktrace

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// maxRates bounds a list of rates.
const maxRates = 1_000_000

const mark = "\ufeff"

// Read reads what a link carries: where the name ends in .csv rates, as ReadRates does, otherwise a trace
// in Mahimahi's format.
func Read(name string, r io.Reader) (*sim.Trace, error) {
	if strings.EqualFold(filepath.Ext(name), ".csv") {
		return ReadRates(name, r)
	}
	text, err := textOf(name, r)
	if err != nil {
		return nil, err
	}
	trace, err := sim.ReadTrace(name, text)
	if err != nil {
		err = fmt.Errorf("%w (if these are times and rates, end the file's name in .csv)", err)
	}
	return trace, err
}

// OpenTrace reads a file as read does.
func OpenTrace[T any](file string, read func(name string, r io.Reader) (*T, error)) (*T, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	v, err := read(filepath.Base(file), f)
	return v, errors.Join(err, f.Close())
}

// ReadDelays reads a trace of delays.
func ReadDelays(name string, r io.Reader) (*sim.DelayTrace, error) {
	text, err := textOf(name, r)
	if err != nil {
		return nil, err
	}
	return sim.ReadDelayTrace(name, text)
}

// compressed are programs that compress files, and how such files begin.
var compressed = [...]struct{ by, begins string }{
	{"gzip", "\x1f\x8b"}, {"bzip2", "BZh"}, {"xz", "\xfd7zXZ"}, {"zstd", "\x28\xb5\x2f\xfd"}, {"zip", "PK\x03\x04"},
}

// textOf leaves out the byte order mark with which some programs begin a text, and refuses what is compressed.
func textOf(name string, r io.Reader) (io.Reader, error) {
	b := bufio.NewReader(r)
	head, _ := b.Peek(len("\xfd7zXZ")) // the longest
	for _, c := range compressed {
		if strings.HasPrefix(string(head), c.begins) {
			return nil, fmt.Errorf("trace %s is compressed by %s: unpack it first", name, c.by)
		}
	}
	if strings.HasPrefix(string(head), mark) {
		_, _ = b.Discard(len(mark))
	}
	return b, nil
}

// ReadRates reads a link's rate over time: lines of a time in seconds and a rate in Mbit/s,
// between them a comma or blanks, each in force until the next; the last as long as the one
// before it. Blank lines, those that begin with # and one of titles say nothing. An error
// names the line.
func ReadRates(name string, r io.Reader) (*sim.Trace, error) {
	var steps []sim.Step
	text, err := textOf(name, r)
	if err != nil {
		return nil, err
	}
	lines, first := bufio.NewScanner(text), true
	for n := 1; lines.Scan(); n++ {
		words := strings.FieldsFunc(lines.Text(), func(c rune) bool { return strings.ContainsRune(",;\t ", c) })
		if len(words) == 0 || strings.HasPrefix(words[0], "#") {
			continue
		}
		titles := first
		first = false
		if _, err := strconv.ParseFloat(words[0], 64); err != nil && titles {
			continue
		}
		at, mbit, err := numbersOf(words)
		if err == nil && len(steps) == 0 && at != 0 {
			err = fmt.Errorf("the first time is %v s, but must be 0", at)
		}
		s := sim.Step{At: time.Duration(math.Round(at*1e3)) * time.Millisecond, Rate: cc.Rate(mbit * 1e6)}
		if err == nil && len(steps) > 0 && s.At <= steps[len(steps)-1].At {
			err = fmt.Errorf("the time %v is not after the one before", s.At)
		}
		if err == nil && len(steps) == maxRates {
			err = fmt.Errorf("more than %d rates", maxRates)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: line %d: %w", name, n, err)
		}
		steps = append(steps, s)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if len(steps) < 2 {
		return nil, fmt.Errorf("%s: it needs two lines at least, each a time in seconds and a rate in Mbit/s", name)
	}
	last := steps[len(steps)-1].At
	return sim.Steps(name, 2*last-steps[len(steps)-2].At, steps...)
}

func numbersOf(words []string) (at, mbit float64, err error) {
	if len(words) != 2 {
		return 0, 0, fmt.Errorf("expected a time in seconds and a rate in Mbit/s, "+
			"decimals with a point, not %d columns", len(words))
	}
	for i, to := range []*float64{&at, &mbit} {
		v, err := strconv.ParseFloat(words[i], 64)
		if err != nil || !(v >= 0 && v <= 1e6) {
			return 0, 0, fmt.Errorf("%q is not a number from 0 to 1000000", words[i])
		}
		*to = v
	}
	return at, mbit, nil
}

// WriteRates writes what one loop of a trace carries in each span as ReadRates reads it. The last span is
// as long as the others; it carries less where the trace ends before it.
func WriteRates(w io.Writer, t *sim.Trace, every time.Duration) error {
	buf := bufio.NewWriter(w)
	fmt.Fprintln(buf, "seconds,mbit")
	for at := time.Duration(0); at < t.Duration(); at += every {
		carried := t.Carries(at, min(at+every, t.Duration()))
		fmt.Fprintf(buf, "%g,%g\n", at.Seconds(), cc.RateOf(carried, every).Mbps())
	}
	return buf.Flush()
}

// Summary is what a trace says of its link.
type Summary struct {
	Length        time.Duration
	Mean          cc.Rate
	P5, P50, P95  cc.Rate       // of the rates by the second
	Gap           time.Duration // the longest without an opportunity
	Opportunities int64
}

// Summarise describes one loop of a trace.
func Summarise(t *sim.Trace) Summary {
	s := Summary{Length: t.Duration(), Mean: t.MeanRate(), Gap: t.LongestGap()}
	s.Opportunities = int64(t.Carries(0, s.Length) / sim.OpportunityBytes)
	var rates []cc.Rate
	for at := time.Duration(0); at+time.Second <= s.Length || at == 0; at += time.Second {
		rates = append(rates, cc.RateOf(t.Carries(at, at+time.Second), time.Second))
	}
	slices.Sort(rates)
	of := func(p float64) cc.Rate { return rates[int(p*float64(len(rates)-1)+0.5)] }
	s.P5, s.P50, s.P95 = of(0.05), of(0.5), of(0.95)
	return s
}
