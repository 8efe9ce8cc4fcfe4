package sim

import (
	"cmp"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// recovery finds out what was lost and keeps the retransmission timer. A transmission
// identifies a packet, so a lost retransmission is found like
// any other loss and every round trip counts.
type recovery struct {
	inOrder []transmission // outstanding, oldest first, with some that no longer matter
	count   int64          // transmissions so far
	highest int64          // the latest transmission known to have arrived; 0: none
	repairs []int64        // segments to send again, with some that need it no more

	timer Timer
	alarm cc.Time // when the next look at the clock is planned; 0: none is

	// After a timeout the first retransmission is a probe (RFC 5682): should an
	// original arrive after all, the rest was not lost either.
	probing  bool
	probeTx  int64 // the last probe's transmission; 0: there was none
	spurious bool  // an original has arrived
}

type transmission struct {
	segment, tx int64
}

// pending reports whether something waits to be sent again; what is new must
// wait until it has been.
func (r *recovery) pending() bool { return len(r.repairs) > 0 }

// sending numbers a transmission of a segment.
func (r *recovery) sending(segment int64) int64 {
	r.count++
	r.inOrder = append(r.inOrder, transmission{segment, r.count})
	return r.count
}

// delivered notes that a transmission has arrived.
func (r *recovery) delivered(tx int64) {
	r.highest = max(r.highest, tx)
	r.spurious = r.spurious || r.probing && tx < r.probeTx
}

// heard notes that an acknowledgement told of something new, and maybe a round trip.
func (r *recovery) heard(now cc.Time, rtt time.Duration) {
	r.timer.Start(now)
	if rtt > 0 {
		r.timer.Measure(rtt)
	}
}

// detect marks what must be lost: later packets have arrived, three of them or
// a while ago. It reports whether it found any.
func (s *sender) detect() (found bool) {
	r := &s.recovery
	for len(r.inOrder) > 0 && r.inOrder[0].tx < r.highest {
		t := r.inOrder[0]
		seg := s.outstanding(t)
		if seg != nil {
			if r.highest-t.tx < ReorderPackets && s.w.now < seg.sentAt.Add(r.timer.Patience()) {
				break
			}
			seg.state = lost
			s.pipe -= seg.size
			r.repairs = append(r.repairs, t.segment)
			found = true
		}
		r.inOrder = r.inOrder[1:]
	}
	return found
}

// outstanding returns the segment that was sent last by transmission t, if it is
// still on the wire; nil: it is not.
func (s *sender) outstanding(t transmission) *segment {
	if t.segment < s.base {
		return nil
	}
	seg := &s.segs[t.segment-s.base]
	if seg.tx != t.tx || seg.state != onWire {
		return nil
	}
	return seg
}

// settleProbe ends the wait for the news after a timeout: an acknowledgement
// has come. If it told of something sent before the timeout, only time was
// lost: what had been given up counts as on the wire again.
func (s *sender) settleProbe() (spurious bool) {
	r := &s.recovery
	spurious = r.spurious
	if spurious {
		r.inOrder = r.inOrder[:0]
		for i := range s.segs {
			seg := &s.segs[i]
			if seg.givenUp && seg.state == lost {
				seg.state = onWire
				s.pipe += seg.size
			}
			if seg.state == onWire {
				r.inOrder = append(r.inOrder, transmission{s.base + int64(i), seg.tx})
			}
		}
		slices.SortFunc(r.inOrder, func(a, b transmission) int { return cmp.Compare(a.tx, b.tx) })
	}
	for i := range s.segs {
		s.segs[i].givenUp = false
	}
	r.probing, r.spurious = false, false
	return spurious
}

// sendNewest sends the newest segment on the wire again, whatever the window
// (RFC 8985 §7.3): what came before it and was lost is found by its arrival.
func (s *sender) sendNewest() {
	for n := len(s.segs) - 1; n >= 0; n-- {
		if seg := &s.segs[n]; seg.state == onWire {
			s.pipe -= seg.size
			s.retransmit(s.base + int64(n))
			return
		}
	}
}

// timeout is the retransmission timer: everything on the wire counts as lost.
func (s *sender) timeout() {
	r := &s.recovery
	r.timer.Fire(s.w.now)
	r.inOrder, r.repairs = r.inOrder[:0], r.repairs[:0]
	for i := range s.segs {
		seg := &s.segs[i]
		if seg.state == onWire {
			seg.state, seg.givenUp = lost, true
		}
		if seg.state == lost {
			r.repairs = append(r.repairs, s.base+int64(i))
		}
	}
	s.pipe = 0
	s.report.Timeouts++
	s.stats.timeout(s.w.now)
	r.probing = true
	s.repair(1)
	r.probeTx = r.count
	s.tell(0)
	s.setAlarm()
}

// setAlarm plans the next look at the clock.
func (s *sender) setAlarm() {
	r := &s.recovery
	at := s.deadline()
	if at == cc.Never || r.alarm != 0 && r.alarm <= at {
		return
	}
	r.alarm = at
	s.w.at(at, func() {
		if r.alarm == at {
			r.alarm = 0
			s.look()
		}
	})
}

// deadline is when the clock alone brings something about.
func (s *sender) deadline() cc.Time {
	r := &s.recovery
	if s.closed || len(s.segs) == 0 {
		return cc.Never
	}
	at := r.timer.Due()
	if len(r.inOrder) > 0 && r.inOrder[0].tx < r.highest {
		if seg := s.outstanding(r.inOrder[0]); seg != nil {
			at = min(at, seg.sentAt.Add(r.timer.Patience()))
		}
	}
	return at
}

// look does what is due by the clock.
func (s *sender) look() {
	if s.closed || len(s.segs) == 0 {
		return
	}
	r := &s.recovery
	switch {
	case s.w.now >= r.timer.Due():
		s.timeout()
	case s.detect():
		s.repair(1)
		s.tell(0)
		s.repair(0)
		s.setAlarm()
		s.pump()
	default:
		s.setAlarm()
	}
}
