package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// receiver takes packets and says when to acknowledge them. Each
// acknowledgement tells of all that has arrived so far, so losing one loses
// time, not news.
type receiver struct {
	every   time.Duration
	planned bool // an acknowledgement waits for its time

	next  int64              // all segments below have arrived
	upTo  cc.Bytes           // their payload
	above map[int64]cc.Bytes // that of those that have arrived beyond a hole

	log    []arrival // what the sender may not know of yet
	before int       // entries already taken off the log
}

// arrival is one transmission of a segment that came through.
type arrival struct {
	n, tx int64
	size  cc.Bytes
}

// take notes an arrival and reports whether its segment is new.
func (r *receiver) take(a arrival) bool {
	r.log = append(r.log, a)
	if _, has := r.above[a.n]; has || a.n < r.next {
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
	}
	return true
}

// acknowledges returns when to acknowledge what arrived at now; false: an
// acknowledgement is planned already.
func (r *receiver) acknowledges(now cc.Time) (at cc.Time, ok bool) {
	if r.every == 0 {
		return now, true
	}
	if r.planned {
		return 0, false
	}
	r.planned = true
	period := cc.Time(r.every)
	return (now + period - 1) / period * period, true
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
