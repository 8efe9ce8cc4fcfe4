package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// member is one flow as its group knows it. The group's mutex guards it.
type member struct {
	sampler
	allocation
	gate
	id    uint64
	leg   Leg
	clock ticker // of the flow, for when it waits for its pacer
	terms Terms
	path  *path

	counts   cc.Bytes // what inflight counts in the group's window
	overflow bool     // that is more than the floor
	want     cc.Bytes // wanted and not granted, or waiting for the window in the transport
	asked    cc.Time  // when want was last heard of; 0: never
	lastBusy cc.Time  // when the flow last wanted to send, had bytes in flight or was acknowledged; 0: never
	active   bool     // it is in the group's list of active members
	rampEnd  cc.Time  // until then it is paced to its share; 0: it is not
	told     bool     // the leg has been told a limit, the newest of which the gate has
	limits   limitTimes

	maxRate *rateLimit // of its group; nil: none
	waiter  waiter     // at maxRate
	place   int        // in the group's list of members
	along   int        // in the path's
}

// leastWindow is floorSegments as they count in the group's window.
func (m *member) leastWindow() cc.Bytes { return m.path.toReference(floorSegments * m.segmentSize()) }

// wantsMore reports whether m can use more of the window than it has. A member that has sent
// ahead of its pacing rate does, until the rate has caught up: on a path of microseconds the
// kernel sends up to 64 KiB at once (tcp_tso_autosize), and a slow flow then pauses for long.
// One that was granted bytes and has not asked again for a retransmission timeout does not. A
// kernel that paces reports nothing for as long as what waits there takes at the rate.
func (m *member) wantsMore(now cc.Time, rtt *rttEstimator) bool {
	if m.gate.blocked && !m.enforced || m.pacer.creditBytes(now, m.segmentSize()) <= 0 {
		return true
	}
	silence := rtt.rto()
	if m.enforced && m.limit.PacingRate > 0 {
		silence += m.limit.PacingRate.TimeFor(m.want)
	}
	return m.want > 0 && now.Sub(m.asked) <= silence
}

// isSilent reports whether m has neither sent nor wanted to for a retransmission timeout.
func (m *member) isSilent(now cc.Time, rto time.Duration) bool {
	return !m.isBusy() && (m.lastBusy == 0 || now.Sub(max(m.lastBusy, m.pacer.tat)) > rto)
}

// isBusy reports whether m wants to send or has bytes in flight.
func (m *member) isBusy() bool { return m.want > 0 || m.inflight > 0 || m.gate.blocked }

// applyLimit puts a limit into force.
func (m *member) applyLimit(now cc.Time, l Limit) {
	if m.told && l.Cwnd == m.limit.Cwnd && l.PacingRate == m.limit.PacingRate {
		return
	}
	m.told = true
	m.gate.setLimit(now, l)
	if m.leg.Apply != nil {
		m.leg.Apply(l)
	}
}

// wakeRelay has the relay ask again.
func (m *member) wakeRelay() {
	m.gate.blocked, m.gate.retryAt = false, 0
	if m.leg.Wake != nil {
		m.leg.Wake()
	}
}

// limitTimes tells what held a flow back, and for how long so far.
type limitTimes struct {
	by    LimitedBy
	since cc.Time
	spent LimitedTime
}

func (l *limitTimes) enterState(now cc.Time, by LimitedBy) {
	if by == l.by {
		return
	}
	l.addElapsed(now)
	l.by = by
}

func (l *limitTimes) addElapsed(now cc.Time) {
	if now > l.since {
		l.spent[l.by] += now.Sub(l.since)
	}
	l.since = max(now, l.since)
}
