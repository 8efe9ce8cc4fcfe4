package sim

import (
	"fmt"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Step is a rate that holds from a moment on.
type Step struct {
	At   time.Duration
	Rate cc.Rate // 0: an outage
}

// Steps returns a trace that lasts d and follows the steps, which are in order;
// the first is at zero. Each opportunity comes when the link has had the time
// for its bytes, in the first whole millisecond after; what a step leaves of
// one counts in the next. Times below a microsecond are dropped.
func Steps(name string, d time.Duration, steps ...Step) (*Trace, error) {
	if len(steps) == 0 || steps[0].At != 0 {
		return nil, fmt.Errorf("sim: trace %s: the first step must be at 0 s", name)
	}
	if d < time.Millisecond || d > maxGenerated || d%time.Millisecond != 0 {
		return nil, fmt.Errorf("sim: trace %s must last a whole number of milliseconds, between 1 and %d, not %v",
			name, maxGenerated.Milliseconds(), d)
	}
	const opportunity = int64(OpportunityBytes) * 8 * 1e6 // in bits per second, times microseconds
	t := &Trace{Name: name}
	left := int64(0) // of an opportunity, in the same unit
	for i, s := range steps {
		end := d
		if i+1 < len(steps) {
			end = min(d, steps[i+1].At)
			if steps[i+1].At < s.At {
				return nil, fmt.Errorf("sim: trace %s: the step at %v comes after the one at %v", name, steps[i+1].At,
					s.At)
			}
		}
		if end <= s.At {
			continue
		}
		if n := int64(s.Rate.BytesIn(end-s.At) / OpportunityBytes); n > maxOpportunities-int64(len(t.times)) {
			return nil, fmt.Errorf("sim: trace %s has more than %d opportunities; lower the rate or shorten it", name,
				maxOpportunities)
		}
		rate := max(0, int64(s.Rate))
		made := left + rate*(end-s.At).Microseconds()
		for n := opportunity; n <= made; n += opportunity {
			at := s.At.Microseconds() + (n-left+rate-1)/rate
			t.times = append(t.times, (at+999)/1000)
		}
		left = made % opportunity
	}
	return t.closeAt(d)
}

// Without returns the trace, played for the length d, with the opportunities
// after from and up to to taken out of it.
func (t *Trace) Without(from, to, d time.Duration) (*Trace, error) {
	if d < time.Millisecond || d > maxGenerated {
		return nil, fmt.Errorf("sim: trace %s cannot be cut for a run of %v", t.Name, d)
	}
	cut := &Trace{Name: t.Name}
	for k := int64(0); t.at(k) <= d; k++ {
		if len(cut.times) == maxOpportunities-1 {
			return nil, fmt.Errorf("sim: trace %s has more than %d opportunities in %v", t.Name, maxOpportunities, d)
		}
		if at := t.at(k); at <= from || at > to {
			cut.times = append(cut.times, int64(at/time.Millisecond))
		}
	}
	return cut.closeAt(d)
}

// From returns the trace that begins with the first opportunity after a moment of its loop, and loops as t does.
func (t *Trace) From(moment time.Duration) *Trace {
	k := int(t.until(moment % t.Duration()))
	if k == 0 {
		k = len(t.times)
	}
	begin := t.times[k-1]
	moved := &Trace{Name: t.Name}
	for _, at := range t.times[k:] {
		moved.times = append(moved.times, at-begin)
	}
	for _, at := range t.times[:k] {
		moved.times = append(moved.times, at+t.loop()-begin)
	}
	return moved
}

// closeAt makes the loop last d: its last line is its length. A trace without an opportunity is refused, because that
// line would be its only one, and a link that carries one packet in d would pass for one that is used.
func (t *Trace) closeAt(d time.Duration) (*Trace, error) {
	if len(t.times) == 0 {
		return nil, fmt.Errorf("sim: trace %s carries nothing in %v: give it a rate above 0, at which a packet of %d bytes "+
			"leaves in that time", t.Name, d, OpportunityBytes)
	}
	if end := d.Milliseconds(); len(t.times) == 0 || t.times[len(t.times)-1] < end {
		t.times = append(t.times, end)
	}
	return t, nil
}
