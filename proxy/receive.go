package proxy

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/policy"
)

const (
	// Arrivals are read this often while the window is bounded, and while it is not. Reading them costs as much as moving
	// a piece.
	readBoundedEvery   = time.Millisecond
	readUnboundedEvery = 4 * time.Millisecond
	// leastQueue is the least delay above the least round trip that counts as a queue. It is the least
	// round trip divided by queueBases, if that is more: the kernel's clock has milliseconds, and the
	// round trips of long paths waver.
	leastQueue = 4 * time.Millisecond
	queueBases = 32
	// unboundAfter is how long a window stays bounded without a queue. It is longer than algorithms drain the queue on
	// purpose.
	unboundAfter = 5 * time.Second
)

// errNoAdvertiser is why a leg's window is left to its transport.
var errNoAdvertiser = errors.New("this transport's receive window cannot be bounded")

// receiveControl limits the receive window that a leg advertises while the path to it shows
// queueing. Without a queue there is nothing to gain, and a smaller window would
// cost rate whenever the relay is late. It is created once flow.ReceiveBulk bytes have come.
//
// The goroutine that reads from the leg calls onRead after each read, so that an idle leg costs nothing:
//
//	field           written by                          read by
//	readAt, minRTT  the reading goroutine               the same
//	bounded         the reading goroutine, under mu     any, under mu
//	window          the flow, on any goroutine          the reading goroutine
//	terms, flow     reloads and the reader, under mu    any, under mu
type receiveControl struct {
	leg     datapath.Advertiser // nil: its window cannot be bounded
	parts   *Parts
	readAt  cc.Time       // when arrivals were read last
	minRTT  time.Duration // 0: no round trip yet
	bounded bool          // the leg advertises no more than window
	window  atomic.Int64  // of the flow, in bytes
	// queueSeenAt is when a queue was last seen; 0: not within unboundAfter.
	queueSeenAt cc.Time

	mu     sync.Mutex      // guards what follows
	terms  *flow.Terms     // of a verdict, which is never changed
	flow   *flow.Receiving // nil: there is no algorithm, or not yet
	closed bool
	why    error // why the window cannot be bounded; nil: it can
}

// newReceiveControl returns the control of the window that conn advertises, under terms.
func newReceiveControl(conn datapath.Conn, parts *Parts, terms *flow.Terms) *receiveControl {
	h := &receiveControl{parts: parts, terms: terms}
	if h.leg, _ = conn.(datapath.Advertiser); h.leg == nil {
		h.why = errNoAdvertiser
	}
	return h
}

// onRead reads the leg's arrivals, if that is due. got is how many bytes the relay has read from the leg in all.
func (h *receiveControl) onRead(got int64) {
	if h.leg == nil {
		return
	}
	every := readUnboundedEvery
	if h.bounded {
		every = readBoundedEvery
	}
	now := h.parts.Clock()
	if now < h.readAt.Add(every) {
		return
	}
	h.readAt = now
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return
	}
	if h.why == nil && h.terms.Algorithm != policy.Unmanaged {
		if err := h.reportArrivals(now, got); err != nil {
			h.why = err
			h.dropFlow(now)
		}
	}
	if h.bounded && (h.flow == nil || h.queueSeenAt == 0) {
		h.bounded = false
		if err := h.leg.Advertise(0); err != nil {
			h.parts.Log.Debug("receive window stays bounded", "err", err)
		}
	}
}

// reportArrivals reports what has come to the flow, and bounds the window if there
// is a queue. The flow sees its own window even where the leg advertises more, so that its algorithm follows the
// path all the time.
func (h *receiveControl) reportArrivals(now cc.Time, got int64) error {
	a, err := h.leg.Arrivals()
	if err != nil {
		return err
	}
	if h.flow == nil {
		apply := func(n cc.Bytes) { h.window.Store(int64(n)) }
		if h.flow, err = h.parts.Flows.Receive(now, *h.terms, apply); err != nil {
			return fmt.Errorf("proxy: receive window: %w", err)
		}
	}
	a.At, a.Unread = now, max(0, a.Received-cc.Bytes(got))
	if !h.bounded {
		a.Window = min(a.Window, cc.Bytes(h.window.Load()))
	}
	h.flow.Arrived(a)
	h.addRTTSample(now, a.RTT)
	if h.queueSeenAt == 0 {
		return nil
	}
	h.bounded = true
	return h.leg.Advertise(cc.Bytes(h.window.Load()))
}

// addRTTSample updates minRTT and queueSeenAt. An rtt of 0 is no sample.
func (h *receiveControl) addRTTSample(now cc.Time, rtt time.Duration) {
	switch {
	case rtt > 0 && (h.minRTT == 0 || rtt < h.minRTT):
		h.minRTT = rtt
	case rtt-h.minRTT >= max(leastQueue, h.minRTT/queueBases):
		h.queueSeenAt = now
	}
	if h.queueSeenAt > 0 && now.Sub(h.queueSeenAt) > unboundAfter {
		h.queueSeenAt = 0
	}
}

// dropFlow closes the flow. The reading goroutine then lifts the bound, because the leg is its own.
func (h *receiveControl) dropFlow(now cc.Time) {
	if h.flow != nil {
		h.flow.Close(now)
		h.flow = nil
	}
}

// applyTerms puts other terms into force, and reports whether the window has other terms now.
func (h *receiveControl) applyTerms(now cc.Time, t *flow.Terms) (moved bool, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed || reflect.DeepEqual(t, h.terms) {
		return false, nil
	}
	switch {
	case h.flow == nil:
	case t.Algorithm == policy.Unmanaged:
		h.dropFlow(now)
	default:
		if err := h.flow.Move(now, *t); err != nil {
			return false, fmt.Errorf("proxy: receive window: %w", err)
		}
	}
	h.terms = t
	return h.leg != nil && h.why == nil, nil
}

// liftBound ends the control and lifts its bound. The reading goroutine calls it. h may be nil.
func (h *receiveControl) liftBound(now cc.Time) {
	if h == nil {
		return
	}
	h.closeFlow(now)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.bounded {
		h.bounded = false
		_ = h.leg.Advertise(0) // of a leg that has failed it does not matter
	}
}

// closeFlow ends the control. The leg is closed already, or is about to leave. h may be nil.
func (h *receiveControl) closeFlow(now cc.Time) {
	if h == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	h.dropFlow(now)
}

// currentInfo returns the present state.
func (h *receiveControl) currentInfo() HoldingInfo {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := HoldingInfo{Algorithm: cmp.Or(h.terms.Algorithm, policy.Unmanaged), Held: h.flow != nil, InForce: h.bounded}
	if h.flow != nil {
		out.Flow = h.flow.Snapshot()
	}
	if h.why != nil && h.terms.Algorithm != policy.Unmanaged {
		out.Why = h.why.Error()
	}
	return out
}

// usualInflow is how many bytes of a source may wait unread where its path needs no more. If the destination stalls,
// all of them wait here.
const usualInflow = 1 << 20

// inflow bounds what the transport of a leg takes in before the relay reads it. A reader that stalls then holds back
// its server instead of filling memory.
type inflow struct {
	from      datapath.Receiver
	bound     int64   // bytes
	checkedAt cc.Time // when growIfNeeded last compared the bound
	written   int64   // bytes passed on to the other leg until then
}

// growIfNeeded raises the bound when written bytes in all have been passed on. It reports whether the leg is still
// bounded. Up to usualInflow the bound is two to four times written, where half may be overhead: a sender in slow
// start has no more in flight than has arrived before. Beyond, it doubles if the path from the source needs it.
func (in *inflow) growIfNeeded(clock func() cc.Time, written int64) (bounded bool) {
	if written < in.written+in.bound/2 {
		return true
	}
	now, before := clock(), in.bound
	if in.bound >= usualInflow && in.isOutgrown(now, written) {
		in.bound *= 2
	}
	for in.bound < usualInflow && in.bound <= 2*written {
		in.bound *= 2
	}
	in.checkedAt, in.written = now, written
	return in.bound == before || in.from.LimitReceive(cc.Bytes(in.bound))
}

// isOutgrown reports whether twice the bytes passed on in one round trip, and overhead of the same size, exceed the
// bound. The rate is that since the last look, and the round trip is that of the source's path.
func (in *inflow) isOutgrown(now cc.Time, written int64) bool {
	passed := now.Sub(in.checkedAt).Seconds()
	return 4*float64(written-in.written)*in.from.LeastRTT().Seconds() > float64(in.bound)*passed
}
