package flow

import (
	"math/rand/v2"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// startAlgorithm builds the algorithm on first use.
func (g *group) startAlgorithm(now cc.Time) {
	if g.alg != nil {
		return
	}
	g.mss = cc.DefaultMSS
	for _, m := range g.members {
		if m.last.MSS > 0 {
			g.mss = m.last.MSS
			break
		}
	}
	initial := g.initial
	switch {
	case initial > 0:
	case g.receives:
		initial = firstReceive
	default:
		initial = cc.InitialCwndPackets * g.mss
	}
	g.started, g.base = now, g.delivered.total
	g.starts++
	cfg := cc.Config{
		MSS: g.mss, InitialCwnd: initial, Ssthresh: g.ssthresh, Params: g.params, Receives: g.receives,
		Rand: rand.New(rand.NewPCG(g.seed, 0)), Wake: g.newWakeFunc(),
	}
	if len(g.members) > 0 {
		first := g.members[0]
		cfg.Ends.To = netip.AddrPortFrom(first.path.host, 0)
		if first.terms.Ends != nil {
			cfg.Ends = *first.terms.Ends
		}
	}
	g.alg = g.spec.New(cfg)
	g.adoptControl(now)
}

// closeAlgorithm drops the algorithm, if there is one.
func (g *group) closeAlgorithm() {
	if g.alg != nil {
		cc.Close(g.alg)
		g.alg = nil
	}
}

// smallRaise is the part of a window, one in so many, that an acknowledgement of the rest comes soon
// enough for: a window of as many segments has one in flight at any time.
const smallRaise = 8

// newWakeFunc has the algorithm that is about to be built look at what has changed outside it. Having the
// transport send what a small raise lets out costs as much as the rest of a decision, so that waits
// for an acknowledgement, as it does where the algorithm has decided by itself.
func (g *group) newWakeFunc() func(cc.Time) {
	number := g.starts
	return func(now cc.Time) {
		g.mu.Lock()
		if g.alg == nil || g.starts != number || len(g.members) == 0 {
			g.mu.Unlock()
			return
		}
		cwnd := g.ctl.Cwnd
		event := g.tickAlgorithm(now)
		g.sendNow = g.sendNow || g.ctl.Cwnd-cwnd >= cwnd/smallRaise
		g.divideAndUnlock(now)
		g.emitEvents(event)
	}
}

// tickAlgorithm has the algorithm's OnTick called.
func (g *group) tickAlgorithm(now cc.Time) Event {
	state := g.algorithmState(now)
	g.alg.OnTick(state)
	g.adoptControl(now)
	return g.makeEvent(nil, KindTick, state, 0, 0)
}

// adoptControl takes over the algorithm's limits after it has seen an event at now.
func (g *group) adoptControl(now cc.Time) {
	before := g.ctl
	g.ctl = g.alg.Control()
	if g.ctl.NextTick != 0 {
		g.timers.scheduleAt(g, max(g.ctl.NextTick, now.Add(leastTick)))
	}
	g.applyCaps(now)
	g.changed = g.changed || g.ctl.Cwnd != before.Cwnd || g.ctl.PacingRate != before.PacingRate
}

// adoptReduction is adopt after a loss or a mark. Where the window or the rate is smaller by now, it is
// divided soon, but not for each loss: many members lose packets in the same round trip.
func (g *group) adoptReduction(now cc.Time) {
	before := g.ctl
	g.adoptControl(now)
	if g.ctl.Cwnd < before.Cwnd || g.ctl.PacingRate < before.PacingRate {
		g.divideAt = min(g.divideAt, g.dividedAt.Add(time.Duration(len(g.alloc.members))*perMemberCut))
	}
}

// reapplyCaps applies what has become of the caps since the algorithm's last event, and
// reports whether there may be any.
func (g *group) reapplyCaps(now cc.Time) bool {
	if g.alg == nil || !g.caps.bind && g.caps.hintCap == 0 {
		return false
	}
	g.adoptControl(now)
	return true
}

// algorithmState is what the algorithm may know.
func (g *group) algorithmState(now cc.Time) cc.State {
	s := cc.State{
		Now:           now,
		MSS:           g.mss,
		Inflight:      g.ownInflight(),
		Delivered:     g.delivered.total - g.base,
		EdgeDelivered: cc.Bytes(g.delivered.edge.Load()),
		SRTT:          g.rtt.srtt,
		RTTVar:        g.rtt.rttvar,
		MinRTT:        g.rtt.min,
		CwndLimited:   g.cwndLimited(),
		OneWay:        g.oneWay,
	}
	if g.caps.hinted {
		s.Hint = &g.caps.sound
	}
	return s
}

// ownInflight is what the algorithm's window has put in flight. Where only the members'
// floors keep more there, that is not the algorithm's to take back: one that waits for
// it to go (BBR's ProbeRTT) would wait for ever.
func (g *group) ownInflight() cc.Bytes {
	switch {
	case g.inflight <= g.ctl.Cwnd:
		return min(g.inflight+g.datagramBytes(false), g.ctl.Cwnd)
	case g.overflow > 0:
		return g.inflight
	}
	return g.ctl.Cwnd
}

// cwndLimited tells whether the window was what held the sender back since the newest
// delivered byte left, a round trip ago. Bytes that pile up in the transport mean that
// it was not; nor was it where a cap leaves less, or where by now all members have all
// that their terms allow: the window would go on growing for a round trip, and fall into
// swings where it then meets the end of the path.
func (g *group) cwndLimited() bool {
	return g.cwndFullAt != 0 && !g.limitedBelow && !g.caps.bind && !g.allContent &&
		g.cwndFullAt >= g.delivered.firstSent
}

// noteAppLimited marks what is in flight as too little to probe the path, when there is
// room in the window and nobody wants it, or a cap does not let it be used.
func (g *group) noteAppLimited() {
	if g.delivered.total > g.delivered.appLimited {
		g.delivered.appLimited = 0
	}
	if !g.caps.bind && (g.wanting > 0 || g.inflight+g.mss > g.memberWindow()) {
		return
	}
	g.delivered.appLimited = max(g.delivered.total+g.inflight, 1)
}

// sinceStart is s as the algorithm may see it, which counts from its own start.
func (g *group) sinceStart(s cc.Sent) cc.Sent {
	s.Delivered = max(0, s.Delivered-g.base)
	return s
}

// makeEvent describes what g's algorithm has just been told.
func (g *group) makeEvent(m *member, kind Kind, s cc.State, rtt time.Duration, n cc.Bytes) Event {
	if g.emit == nil {
		return Event{}
	}
	e := Event{
		Kind: kind, Algorithm: g.spec.Name, State: s, RTT: rtt, Bytes: n, Control: g.ctl,
		Internals: g.algorithmInternals(),
	}
	e.State.Hint = nil // which is the group's to change
	if m != nil {
		e.Flow, e.Group = m.id, m.terms.Group
	}
	return e
}

// emitEvents emits events, outside all locks.
func (g *group) emitEvents(events ...Event) {
	if g.emit == nil {
		return
	}
	for _, e := range events {
		g.emit(e)
	}
}

// algorithmInternals is what g's algorithm shows.
func (g *group) algorithmInternals() cc.Internals {
	if a, ok := g.alg.(cc.Inspector); ok {
		return a.Inspect()
	}
	return cc.Internals{}
}
