package sim

import (
	"io"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// OpportunityBytes is what one line of a trace may carry.
const OpportunityBytes cc.Bytes = 1500

// Trace is a recorded link in Mahimahi's format: each line is the millisecond,
// from the start, at which 1500 bytes may leave; a line repeats when more may.
// A player loops it at its end.
type Trace struct {
	Name  string
	times []int64 // milliseconds, ascending
}

// ReadTrace parses a trace; an error names the line.
func ReadTrace(name string, r io.Reader) (*Trace, error) { return nil, nil }

// Duration is the length of one loop.
func (t *Trace) Duration() time.Duration { return 0 }

// MeanRate is the mean capacity of one loop.
func (t *Trace) MeanRate() cc.Rate { return 0 }
