package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// quickAcks is how many acknowledgements in a row Linux does not delay: at first,
// after a retransmission timeout without data, and after data that it had
// (TCP_MAX_QUICKACKS).
const quickAcks = 16

// receiver takes packets and says when to acknowledge them. Each
// acknowledgement tells of all that has arrived so far, so losing one loses
// time, not news. Delayed acknowledgements are Linux's, with an application that
// reads at once: it does not wait with the end of what was written (since 6.7; the
// sender sets PSH), nor where a hole is filled (RFC 5681 §4.2).
type receiver struct {
	every   time.Duration
	delay   time.Duration
	newest  cc.Time // when the latest packet arrived; 0: none has
	quick   int     // acknowledgements that are not delayed yet
	urgent  bool    // nor is the next one
	planned bool    // an acknowledgement waits for its time
	said    int     // of the log, in acknowledgements
	round   int     // of acknowledgements: what was planned in an earlier one is off

	next  int64              // all segments below have arrived
	upTo  cc.Bytes           // their payload
	above map[int64]cc.Bytes // that of those that have arrived beyond a hole

	log    []arrival // what the sender may not know of yet
	before int       // entries already taken off the log
}

// arrival is one transmission of a segment that came through.
type arrival struct {
	n, tx  int64
	size   cc.Bytes
	pushed bool // the end of what was written
	ce     bool // it came with an ECN mark
}

// take notes an arrival at now and reports whether its segment is new.
func (r *receiver) take(now cc.Time, a arrival) bool {
	r.log = append(r.log, a)
	if r.newest == 0 || now.Sub(r.newest) > minRTO {
		r.quick = quickAcks
	}
	r.newest, r.urgent = now, r.urgent || a.pushed
	if _, has := r.above[a.n]; has || a.n < r.next {
		r.quick = quickAcks
		return false
	}
	if a.n > r.next {
		if r.above == nil {
			r.above = map[int64]cc.Bytes{}
		}
		r.above[a.n] = a.size
		return true
	}
	r.upTo += a.size
	for r.next++; len(r.above) > 0; r.next++ {
		size, has := r.above[r.next]
		if !has {
			break
		}
		r.upTo += size
		delete(r.above, r.next)
		r.urgent = r.urgent || len(r.above) == 0
	}
	return true
}

// acknowledges returns when to acknowledge what arrived at now, unless that has
// been done by then; false: an acknowledgement is planned already.
func (r *receiver) acknowledges(now cc.Time) (at cc.Time, ok bool) {
	switch {
	case r.every == 0 && r.delay == 0,
		r.delay > 0 && (r.quick > 0 || r.urgent || r.logged() > r.said+1 || len(r.above) > 0):
		return now, true
	case r.planned:
		return 0, false
	case r.delay > 0:
		r.planned = true
		return now.Add(r.delay), true
	}
	r.planned = true
	period := cc.Time(r.every)
	return (now + period - 1) / period * period, true
}

// acknowledge tells how much has arrived.
func (r *receiver) acknowledge() (news int) {
	r.said, r.planned, r.urgent = r.logged(), false, false
	r.quick = max(0, r.quick-1)
	r.round++
	return r.said
}

// logged counts the arrivals so far.
func (r *receiver) logged() int { return r.before + len(r.log) }

// since returns the arrivals from number from up to, not including, to.
func (r *receiver) since(from, to int) []arrival { return r.log[from-r.before : to-r.before] }

// forget drops the first n arrivals.
func (r *receiver) forget(n int) {
	r.log = r.log[n-r.before:]
	r.before = n
}
