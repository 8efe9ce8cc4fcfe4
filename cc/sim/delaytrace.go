package sim

import (
	"fmt"
	"io"
	"slices"
	"time"
)

// DelayStep is how long each line of a trace of delays holds (LeoCC, SIGCOMM 2025: the
// format of LeoReplayer).
const DelayStep = 10 * time.Millisecond

// DelayTrace is a recorded propagation delay that moves, such as that of a path by satellite:
// each line is the delay one way, in milliseconds, for DelayStep. A player loops it at its
// end. Lines that are blank, or begin with #, say nothing.
type DelayTrace struct {
	Name  string
	steps []time.Duration
}

// ReadDelayTrace parses a trace of delays; an error names the line.
func ReadDelayTrace(name string, r io.Reader) (*DelayTrace, error) {
	d := &DelayTrace{Name: name}
	_, err := readNumbers(name, r, func(ms int64) error {
		delay := time.Duration(ms) * time.Millisecond
		if delay > maxDelay {
			return fmt.Errorf("%v is beyond the %v that a delay may be", delay, maxDelay)
		}
		d.steps = append(d.steps, delay)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if len(d.steps) == 0 {
		return nil, fmt.Errorf("sim: trace %s is empty; it needs one line, a number of milliseconds, per %v", name,
			DelayStep)
	}
	d.steps = slices.Clip(d.steps)
	return d, nil
}

// maxDelay bounds a line of a DelayTrace: the way to the Moon and back, and more.
const maxDelay = 10 * time.Second

// Duration is the length of one loop.
func (d *DelayTrace) Duration() time.Duration { return time.Duration(len(d.steps)) * DelayStep }

// First is the delay at the start.
func (d *DelayTrace) First() time.Duration { return d.steps[0] }

// at is the delay of what leaves that long after the start.
func (d *DelayTrace) at(since time.Duration) time.Duration {
	return d.steps[max(0, int64(since/DelayStep))%int64(len(d.steps))]
}
