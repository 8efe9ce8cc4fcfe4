package cc

import (
	"math"
	"time"
)

// H-TCP's congestion avoidance (draft-leith-tcp-htcp-06): the longer the last loss is ago, the
// faster the window grows, and a loss takes as little of it as the queue that it filled held.
// Janus can have it as its aggressive stage.

const (
	htcpLow    = time.Second // as Reno until then (§2.2, Delta_L)
	htcpLeast  = 0.5         // of the window that a loss leaves (§2.1)
	htcpMost   = 0.8
	htcpSteady = 0.2 // change of the throughput up to which a loss leaves more than the least (§2.1)
)

type htcp struct {
	cut        Time          // the last loss; 0: there was none
	low, high  time.Duration // round trips since then
	delivered  Bytes         // as the last loss came
	throughput float64       // bytes/s between the last two; 0: not known
	left       float64       // of the window by the last loss; 0: there was none
	heard      Time          // the first acknowledgement: from when Delta counts without a loss
}

// growthPerRound is how many packets a round trip adds (§2.2), scaled by 2(1-beta): a flow that keeps
// more of its window at a loss then grows no faster.
func (h *htcp) growthPerRound(now Time) float64 {
	since := max(h.cut, h.heard)
	d := (now.Sub(since) - htcpLow).Seconds()
	rise := 1.0
	if d > 0 {
		rise += 10*d + d*d/4
	}
	return max(1, 2*(1-max(h.left, htcpLeast))*rise)
}

func (h *htcp) onAck(w *lossWindow, a Ack) {
	n := w.growthCredit(a)
	if h.heard == 0 {
		h.heard = a.Now
	}
	if a.RTT > 0 {
		if h.low == 0 || a.RTT < h.low {
			h.low = a.RTT
		}
		h.high = max(h.high, a.RTT)
	}
	if w.inSlowStart() {
		n = w.growInSlowStart(n)
	}
	if n > 0 {
		w.cwnd = w.clampWindow(w.cwnd+h.growthPerRound(a.Now)*n/w.cwnd, timeoutWindow)
	}
}

// onLoss reports whether it opened a new congestion event.
func (h *htcp) onLoss(w *lossWindow, l Loss) (fresh bool) {
	left := htcpLeast
	rate := 0.0
	if took := l.Now.Sub(h.cut).Seconds(); h.cut > 0 && took > 0 {
		rate = float64(l.Delivered-h.delivered) / took
	}
	if h.throughput > 0 && math.Abs(rate-h.throughput) <= htcpSteady*h.throughput && h.high > 0 {
		left = min(max(float64(h.low)/float64(h.high), htcpLeast), htcpMost)
	}
	if fresh = w.cutWindow(l, left); fresh {
		*h = htcp{cut: l.Now, delivered: l.Delivered, throughput: rate, left: left, heard: h.heard}
	}
	return fresh
}
