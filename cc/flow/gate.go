package flow

import "github.com/penstock-net/penstock/cc"

// gate has the limit of a flow, and keeps it where the leg does not enforce it: the
// relay asks it before every write. It does what a kernel-enforced leg does by itself.
type gate struct {
	limit   Limit
	pacer   pacer
	blocked bool    // a Take was refused and nobody has been woken since
	retryAt cc.Time // pacing does not let the flow send before this; 0: pacing holds nothing back
}

// setLimit puts a limit into force.
func (g *gate) setLimit(now cc.Time, l Limit) {
	if l.PacingRate != g.limit.PacingRate {
		g.retryAt = 0 // it was for the old rate
	}
	g.limit = l
	g.pacer.setRate(now, l.PacingRate)
}

// grantQuantum is the least worth waking for: a segment, or all that is wanted; never more
// than a window that is smaller than a segment.
func (g *gate) grantQuantum(want, mss cc.Bytes) cc.Bytes { return min(want, mss, max(g.limit.Cwnd, 1)) }

// grantBytes returns how many of want bytes may go now, in whole quanta or all of them, and
// what holds the rest back.
func (g *gate) grantBytes(now cc.Time, want, inflight, mss cc.Bytes) (n cc.Bytes, by LimitedBy) {
	quantum, room, credit := g.grantQuantum(want, mss), g.limit.Cwnd-inflight, g.pacer.creditBytes(now, mss)
	g.retryAt = 0
	switch n = min(want, room, credit); n {
	case want:
		return n, LimitedByApplication
	case room:
		by = LimitedByCwnd
	default:
		by = LimitedByPacing
	}
	if n >= quantum {
		return n - n%quantum, by
	}
	if room >= quantum {
		g.retryAt = g.pacer.readyAt(now, quantum, mss)
	}
	return 0, by
}

// mayOpen reports whether a refused Take may succeed now. If only pacing refuses it,
// retryAt says until when.
func (g *gate) mayOpen(now cc.Time, want, inflight, mss cc.Bytes) bool {
	if !g.blocked || g.retryAt > now {
		return false
	}
	quantum := g.grantQuantum(want, mss)
	if g.limit.Cwnd-inflight < quantum {
		return false
	}
	if g.retryAt = g.pacer.readyAt(now, quantum, mss); g.retryAt > now {
		return false
	}
	g.retryAt = 0
	return true
}
