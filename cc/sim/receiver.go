package sim

import (
	"math/rand/v2"
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
	clock   clock
	newest  cc.Time // when the latest packet arrived; 0: none has
	quick   int     // acknowledgements that are not delayed yet
	urgent  bool    // nor is the next one
	planned bool    // an acknowledgement waits for its time
	said    int     // of the log, in acknowledgements
	round   int     // of acknowledgements: what was planned in an earlier one is off

	next  int64              // all segments below have arrived
	upTo  cc.Bytes           // their payload
	above map[int64]cc.Bytes // payload of segments that have arrived beyond a hole

	log  []arrival // what the sender may not know of yet
	told int       // arrivals that it has heard of, which left the log
}

// clock is a receiver's. It shows another time on each connection (RFC 7323 §7.1).
type clock struct {
	tick   time.Duration // 0: it sends no timestamps
	skew   float64       // millionths by which it runs fast
	offset uint32        // ticks
}

// clockStream keeps the draws of receivers' clocks apart from those of other users of a seed.
const clockStream = 0x636c6f636b

// clock is that of the receiver of flow number i.
func (w *world) clock(i int) clock {
	s := w.scenario
	rng := rand.New(rand.NewPCG(s.Seed+uint64(i), clockStream))
	return clock{tick: s.Timestamps, skew: s.ClockSkew, offset: rng.Uint32()}
}

// reading is what the clock shows at now; nil: it is not told.
func (c clock) reading(now cc.Time) *uint32 {
	if c.tick == 0 {
		return nil
	}
	shown := float64(now) * (1 + c.skew/1e6)
	v := c.offset + uint32(int64(shown)/int64(c.tick))
	return &v
}

// arrival is one transmission of a segment that came through.
type arrival struct {
	n, tx  int64
	size   cc.Bytes
	pushed bool    // the end of what was written
	ce     bool    // it came with an ECN mark
	stamp  *uint32 // timestamp of its sender; nil: none
	echo   cc.Time // when the newest acknowledgement that its sender had heard was sent; 0: none

	forForecast cc.SproutPacket // where the receiver forecasts
}

// addArrival notes an arrival at now and reports whether its segment is new.
func (r *receiver) addArrival(now cc.Time, a arrival) bool {
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
func (r *receiver) logged() int { return r.told + len(r.log) }

// takeNews removes from the log the arrivals up to number upTo that the sender has not heard of, and returns them.
func (r *receiver) takeNews(upTo int) (news []arrival) {
	n := upTo - r.told
	news, r.log, r.told = r.log[:n], r.log[n:], upTo
	return news
}
