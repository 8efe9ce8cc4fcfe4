package sim

import (
	"cmp"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// Scoreboard is what a sender knows of all that it has sent: it finds out what was lost and keeps the retransmission
// timer. A transmission identifies a packet, so a lost retransmission is found like any other loss and every round
// trip counts. It is pure: time comes in with each call.
type Scoreboard struct {
	Pipe   cc.Bytes // on the wire as far as the sender knows
	Acked  cc.Bytes // known to have arrived, holes or not
	Newest cc.Bytes // highest stream offset that has arrived of segments that were sent once

	// Probing is the time after a timeout: the first retransmission is a probe (RFC 5682), for should an original
	// arrive after all, the rest was not lost either. Nothing else is sent until then.
	Probing  bool
	spurious bool  // an original has arrived
	probeTx  int64 // the last probe's transmission; 0: there was none

	segs    []segment      // sent and not yet cumulatively acknowledged
	base    int64          // number of segs[0]
	inOrder []transmission // outstanding, oldest first, with some that no longer matter
	count   int64          // transmissions so far
	highest int64          // the latest transmission known to have arrived; 0: none
	repairs []int64        // segments to send again, with some that need it no more
	timer   Timer
}

type transmission struct {
	segment, tx int64
}

// segment is a piece of the stream in one packet.
type segment struct {
	end     cc.Bytes // stream offset just past it
	size    cc.Bytes
	state   segState
	resent  bool
	pushed  bool    // the end of what was written
	givenUp bool    // lost only by the timer's word, which may prove wrong
	tx      int64   // its last transmission, counted over the flow
	sentAt  cc.Time // of the last transmission
}

type segState uint8

const (
	onWire segState = iota
	lost            // and waiting to be sent again
	arrived
)

// End is the number that the next new segment will have.
func (b *Scoreboard) End() int64 { return b.base + int64(len(b.segs)) }

// Extend adds a segment of the stream that ends at an offset; pushed: no more was written.
func (b *Scoreboard) Extend(end, size cc.Bytes, pushed bool) {
	b.segs = append(b.segs, segment{end: end, size: size, pushed: pushed})
}

// at is segment number n.
func (b *Scoreboard) at(n int64) *segment { return &b.segs[n-b.base] }

// Transmit notes that segment number n leaves now, and returns the number of the transmission, from 1.
func (b *Scoreboard) Transmit(now cc.Time, n int64) (tx int64) {
	seg := b.at(n)
	b.count++
	b.inOrder = append(b.inOrder, transmission{n, b.count})
	if seg.state == lost {
		seg.resent, seg.givenUp = true, false
	}
	seg.tx, seg.sentAt, seg.state = b.count, now, onWire
	if b.Pipe == 0 {
		b.timer.Start(now)
	}
	b.Pipe += seg.size
	return b.count
}

// Repair is the segment to be sent again first; false: there is none. What is new must wait until there is none.
func (b *Scoreboard) Repair() (n int64, ok bool) {
	for len(b.repairs) > 0 {
		if n = b.repairs[0]; n >= b.base && b.at(n).state == lost {
			return n, true
		}
		b.repairs = b.repairs[1:]
	}
	return 0, false
}

// Arrive notes that transmission tx of segment n has arrived. It reports whether the segment's arrival is news, and
// the round trip that it shows; 0: none.
func (b *Scoreboard) Arrive(now cc.Time, n, tx int64) (rtt time.Duration, news bool) {
	b.highest = max(b.highest, tx)
	b.spurious = b.spurious || b.Probing && tx < b.probeTx
	if n < b.base || b.at(n).state == arrived {
		return 0, false
	}
	seg := b.at(n)
	if seg.state == onWire {
		b.Pipe -= seg.size
	}
	seg.state = arrived
	b.Acked += seg.size
	if !seg.resent {
		b.Newest = max(b.Newest, seg.end)
	}
	if tx != seg.tx || tx < b.probeTx {
		// The time of an earlier transmission is forgotten; and what waited out a
		// timeout would stretch the timer for a path that is back to normal.
		return 0, true
	}
	return now.Sub(seg.sentAt), true
}

// Heard notes that an acknowledgement told of something new, and maybe a round trip. It reports whether an original
// sent before a timeout has arrived, so that what had been given up is on the wire again.
func (b *Scoreboard) Heard(now cc.Time, rtt time.Duration) (spurious bool) {
	k := 0
	for k < len(b.segs) && b.segs[k].state == arrived {
		k++
	}
	b.segs = b.segs[k:]
	b.base += int64(k)
	b.timer.Start(now)
	if rtt > 0 {
		b.timer.Measure(rtt)
	}
	if !b.Probing {
		return false
	}
	return b.settleProbe()
}

// settleProbe ends the wait for the news after a timeout: an acknowledgement
// has come. If it told of something sent before the timeout, only time was
// lost: what had been given up counts as on the wire again.
func (b *Scoreboard) settleProbe() (spurious bool) {
	spurious = b.spurious
	if spurious {
		b.inOrder = b.inOrder[:0]
		for i := range b.segs {
			seg := &b.segs[i]
			if seg.givenUp && seg.state == lost {
				seg.state = onWire
				b.Pipe += seg.size
			}
			if seg.state == onWire {
				b.inOrder = append(b.inOrder, transmission{b.base + int64(i), seg.tx})
			}
		}
		slices.SortFunc(b.inOrder, func(a, b transmission) int { return cmp.Compare(a.tx, b.tx) })
	}
	for i := range b.segs {
		b.segs[i].givenUp = false
	}
	b.Probing, b.spurious = false, false
	return spurious
}

// Detect marks what must be lost: later packets have arrived, three of them or
// a while ago (RFC 9002 §6.1). It reports whether it found any.
func (b *Scoreboard) Detect(now cc.Time) (found bool) {
	for len(b.inOrder) > 0 && b.inOrder[0].tx < b.highest {
		t := b.inOrder[0]
		if seg := b.outstanding(t); seg != nil {
			if b.highest-t.tx < ReorderPackets && now < seg.sentAt.Add(b.timer.Patience()) {
				break
			}
			b.lose(t.segment)
			found = true
		}
		b.inOrder = b.inOrder[1:]
	}
	return found
}

// lose gives up segment number n, which is on the wire.
func (b *Scoreboard) lose(n int64) {
	b.at(n).state = lost
	b.Pipe -= b.at(n).size
	b.repairs = append(b.repairs, n)
}

// outstanding returns the segment that was sent last by transmission t, if it is
// still on the wire; nil: it is not.
func (b *Scoreboard) outstanding(t transmission) *segment {
	if t.segment < b.base {
		return nil
	}
	seg := b.at(t.segment)
	if seg.tx != t.tx || seg.state != onWire {
		return nil
	}
	return seg
}

// LoseNewest gives up the newest segment on the wire, so that it is sent again whatever the window (RFC 8985 §7.3):
// what came before it and was lost is found by its arrival. false: nothing is on the wire.
func (b *Scoreboard) LoseNewest() bool {
	for n := b.End() - 1; n >= b.base; n-- {
		if b.at(n).state == onWire {
			b.lose(n)
			b.repairs = append([]int64{n}, b.repairs[:len(b.repairs)-1]...)
			return true
		}
	}
	return false
}

// Expired reports whether the retransmission timer has fired by now: everything on the wire counts as lost then, and
// the next transmission is a probe.
func (b *Scoreboard) Expired(now cc.Time) bool {
	if len(b.segs) == 0 || now < b.timer.Due() {
		return false
	}
	b.timer.Fire(now)
	b.inOrder, b.repairs = b.inOrder[:0], b.repairs[:0]
	for i := range b.segs {
		seg := &b.segs[i]
		if seg.state == onWire {
			seg.state, seg.givenUp = lost, true
		}
		if seg.state == lost {
			b.repairs = append(b.repairs, b.base+int64(i))
		}
	}
	b.Pipe = 0
	b.Probing, b.probeTx = true, b.count+1
	return true
}

// Deadline is when the clock alone brings something about: Expired, or Detect. cc.Never: nothing is outstanding.
func (b *Scoreboard) Deadline() cc.Time {
	if len(b.segs) == 0 {
		return cc.Never
	}
	at := b.timer.Due()
	if len(b.inOrder) > 0 && b.inOrder[0].tx < b.highest {
		if seg := b.outstanding(b.inOrder[0]); seg != nil {
			at = min(at, seg.sentAt.Add(b.timer.Patience()))
		}
	}
	return at
}

// Unacked is the stream offset below which everything has arrived.
func (b *Scoreboard) Unacked() cc.Bytes {
	if len(b.segs) == 0 {
		return b.Acked
	}
	return b.segs[0].end - b.segs[0].size
}

// SRTT is the smoothed round trip; 0: none has been measured.
func (b *Scoreboard) SRTT() time.Duration { return b.timer.srtt }

// Describe brings a report up to date with what is known now.
func (b *Scoreboard) Describe(r *flow.Report) {
	r.Pipe, r.Acked, r.Newest, r.Sacked = b.Pipe, b.Acked, b.Newest, b.Acked-b.Unacked()
}
