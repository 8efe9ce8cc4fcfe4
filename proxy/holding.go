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
	// lookEvery is how often what has come over a leg is looked at while its window is
	// held, and watchEvery while no queue is seen: a look costs what moving a piece does.
	lookEvery  = time.Millisecond
	watchEvery = 4 * time.Millisecond
	// leastQueue is how much longer than the least a round trip is that tells of a queue,
	// and queueBases the part of the least, if that is more: the kernel's clock has
	// milliseconds, and long paths waver.
	leastQueue = 4 * time.Millisecond
	queueBases = 32
	// letGoAfter is how long no queue was seen when a window is held no longer: who drains
	// the queue on purpose does so for less.
	letGoAfter = 5 * time.Second
)

// errNoAdvertiser says why a leg's window is as its transport likes.
var errNoAdvertiser = errors.New("this transport's receive window cannot be bounded")

// receiveControl keeps the window that a leg advertises to whom it receives from, while a queue
// is seen to stand in front of it: where there is none, there is nothing to take away, and a
// smaller window only costs rate whenever the relay is late. The relay's goroutine
// looks after each read, so that legs that bring nothing cost nothing. There is none
// before flow.ReceiveBulk bytes have come.
type receiveControl struct {
	leg    datapath.Advertiser // nil: its window cannot be bounded
	parts  *Parts
	looked cc.Time
	least  time.Duration // round trip
	queued cc.Time       // a queue was last seen; 0: not in letGoAfter
	held   bool          // leg's window is bounded; the relay's goroutine writes it, with mu held
	window atomic.Int64  // the newest of flow

	mu     sync.Mutex      // guards what follows
	terms  *flow.Terms     // those of a verdict, which nobody changes
	flow   *flow.Receiving // nil: nothing is held, or not yet
	closed bool
	why    error // nothing will be held; nil: it is, or will be
}

// onArrived bounds the window that d's source advertises, as d.receives says, once got bytes have come
// from it and that is much.
func (d *direction) onArrived(got int64) {
	if cc.Bytes(got) < flow.ReceiveBulk {
		return
	}
	if d.hold == nil {
		h := &receiveControl{parts: &d.conn.srv.parts}
		if h.leg, _ = d.src.conn.(datapath.Advertiser); h.leg == nil {
			h.why = errNoAdvertiser
		}
		d.conn.mu.Lock()
		h.terms, d.hold = d.receives, h
		d.conn.mu.Unlock()
	}
	d.hold.onRead(got)
}

// onRead looks at what has come, of which the relay has read so much.
func (h *receiveControl) onRead(got int64) {
	if h.leg == nil {
		return
	}
	every := watchEvery
	if h.held {
		every = lookEvery
	}
	now := h.parts.Clock()
	if now < h.looked.Add(every) {
		return
	}
	h.looked = now
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return
	}
	if h.why == nil && h.terms.Algorithm != policy.Unmanaged {
		if err := h.reportArrivals(now, got); err != nil {
			h.why = err
			h.stopHolding(now)
		}
	}
	if h.held && (h.flow == nil || h.queued == 0) {
		h.held = false
		if err := h.leg.Advertise(0); err != nil {
			h.parts.Log.Debug("receive window stays bounded", "err", err)
		}
	}
}

// reportArrivals tells the flow what has come, and puts the window that follows into force where
// there is a queue. The flow knows no other window than its own, so that it follows the
// path all the time.
func (h *receiveControl) reportArrivals(now cc.Time, got int64) error {
	a, err := h.leg.Arrivals()
	if err != nil {
		return err
	}
	if h.flow == nil {
		into := func(n cc.Bytes) { h.window.Store(int64(n)) }
		if h.flow, err = h.parts.Flows.Receive(now, *h.terms, into); err != nil {
			return fmt.Errorf("proxy: receive window: %w", err)
		}
	}
	a.At, a.Unread = now, max(0, a.Received-cc.Bytes(got))
	if !h.held {
		a.Window = min(a.Window, cc.Bytes(h.window.Load()))
	}
	h.flow.Arrived(a)
	h.addRTTSample(now, a.RTT)
	if h.queued == 0 {
		return nil
	}
	h.held = true
	return h.leg.Advertise(cc.Bytes(h.window.Load()))
}

// addRTTSample takes in a round trip, and finds out whether there is a queue.
func (h *receiveControl) addRTTSample(now cc.Time, rtt time.Duration) {
	switch {
	case rtt > 0 && (h.least == 0 || rtt < h.least):
		h.least = rtt
	case rtt-h.least >= max(leastQueue, h.least/queueBases):
		h.queued = now
	}
	if h.queued > 0 && now.Sub(h.queued) > letGoAfter {
		h.queued = 0
	}
}

// stopHolding has nothing be held. The relay, whose goroutine the leg is for, frees the window.
func (h *receiveControl) stopHolding(now cc.Time) {
	if h.flow != nil {
		h.flow.Close(now)
		h.flow = nil
	}
}

// reconsiderHold replaces the terms by which the window of d's source is bounded, and reports whether
// that changes anything. The connection's mu is held.
func (d *direction) reconsiderHold(t *flow.Terms) (moved bool, err error) {
	if d.hold != nil {
		return d.hold.applyTerms(d.conn.srv.clock(), t)
	}
	_, can := d.src.conn.(datapath.Advertiser)
	moved = can && !reflect.DeepEqual(t, d.receives)
	d.receives = t
	return moved, nil
}

// applyTerms puts other terms into force, and reports whether they are others.
func (h *receiveControl) applyTerms(now cc.Time, t *flow.Terms) (moved bool, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed || reflect.DeepEqual(t, h.terms) {
		return false, nil
	}
	switch {
	case h.flow == nil:
	case t.Algorithm == policy.Unmanaged:
		h.stopHolding(now)
	default:
		if err := h.flow.Move(now, *t); err != nil {
			return false, fmt.Errorf("proxy: receive window: %w", err)
		}
	}
	h.terms = t
	return h.leg != nil && h.why == nil, nil
}

// closeFlow ends it; the leg is closed already.
func (h *receiveControl) closeFlow(now cc.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	h.stopHolding(now)
}

// HoldingInfo is how a leg's receive window is held.
type HoldingInfo struct {
	Algorithm string        // "none": it is left to the transport
	Held      bool          // Flow is meaningful
	InForce   bool          // a queue is seen, so that the transport has no wider window
	Why       string        // it will not be held; empty: it is, or there was no reason yet
	Flow      flow.Snapshot // of what decides it; Share is the window
}

// holdingInfo is how the window of d's source is held. The connection's mu is held.
func (d *direction) holdingInfo() HoldingInfo {
	if d.hold != nil {
		return d.hold.holdingInfo()
	}
	return HoldingInfo{Algorithm: cmp.Or(d.receives.Algorithm, policy.Unmanaged)}
}

func (h *receiveControl) holdingInfo() HoldingInfo {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := HoldingInfo{Algorithm: cmp.Or(h.terms.Algorithm, policy.Unmanaged), Held: h.flow != nil, InForce: h.held}
	if h.flow != nil {
		out.Flow = h.flow.Snapshot()
	}
	if h.why != nil && h.terms.Algorithm != policy.Unmanaged {
		out.Why = h.why.Error()
	}
	return out
}
