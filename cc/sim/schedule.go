package sim

import "github.com/penstock-net/penstock/cc"

// schedule is when the server of a link has sent what it is given. An opportunity of a trace sends up to 1500 bytes; a
// packet may need several, and several packets may share one.
type schedule struct {
	rate    cc.Rate // where there is no trace; 0: all is sent at once
	trace   *Trace
	start   cc.Time // of the trace
	departs cc.Time // when the last packet has left

	// With a fixed rate: the present busy period. Counting from its start keeps
	// rounding from adding up.
	busyFrom  cc.Time
	busyBytes cc.Bytes

	// With a trace: the opportunity that sends the last byte.
	opportunity int64
	left        cc.Bytes // what it can still carry
}

func newSchedule(cfg LinkConfig, start cc.Time) schedule {
	return schedule{rate: cfg.Rate, trace: cfg.Trace, start: start}
}

// begin ends a time in which nothing was to be sent.
func (s *schedule) begin(now cc.Time) {
	s.departs, s.busyFrom, s.busyBytes = now, now, 0
	if s.trace != nil {
		s.opportunity, s.left = s.trace.until(now.Sub(s.start)), OpportunityBytes
	}
}

// send sends size bytes behind all that was sent since the last begin.
func (s *schedule) send(size cc.Bytes) {
	switch {
	case s.trace != nil:
		if more := size - s.left; more > 0 {
			opportunities := (more + OpportunityBytes - 1) / OpportunityBytes
			s.opportunity += int64(opportunities)
			s.left += opportunities * OpportunityBytes
		}
		s.left -= size
		s.departs = s.start.Add(s.trace.at(s.opportunity))
	case s.rate > 0:
		s.busyBytes += size
		s.departs = s.busyFrom.Add(s.rate.TimeFor(s.busyBytes))
	}
}

// next is when the next byte is taken to be sent.
func (s *schedule) next() cc.Time {
	switch {
	case s.trace == nil:
		return s.departs
	case s.left == 0:
		return s.start.Add(s.trace.at(s.opportunity + 1))
	}
	return s.start.Add(s.trace.at(s.opportunity))
}
