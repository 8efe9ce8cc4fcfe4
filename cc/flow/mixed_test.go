package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

// mixed is a group of members over legs that enforce the window, or do not, against a model
// that counts every byte.
type mixed struct {
	*testbed
	legs []*transport
}

// transport is a leg's model: written = acked + pipe + lost + unsent.
type transport struct {
	*leg
	rt                                 *rapid.T
	written, acked, pipe, lost, unsent cc.Bytes
	retransmitted                      cc.Bytes
	timeouts                           int
	rwndFull, hidden                   bool // hidden: it cannot tell its pipe
}

// write hands the transport up to n bytes, as far as the flow lets the relay.
func (s *transport) write(n cc.Bytes) {
	switch {
	case s.enforced:
		n = max(0, min(n, 64*mss-s.unsent)) // the transport's own queue is short
	case s.gate.waiting: // the relay waits to be woken
		return
	default:
		asked := n
		n = s.Take(s.p.now, asked).Bytes
		if 0 < n && n < asked {
			defer s.write(asked - n) // until it is refused
		}
	}
	s.written += n
	s.unsent += n
	s.transmit()
}

// transmit sends what the transport may: repairs first.
func (s *transport) transmit() {
	room := cc.MaxCwnd
	if s.enforced {
		room = s.limit.Cwnd - s.pipe
	}
	if s.rwndFull || room <= 0 {
		return
	}
	again := min(s.lost, room)
	s.lost -= again
	s.retransmitted += again
	fresh := min(s.unsent, room-again)
	s.unsent -= fresh
	s.pipe += again + fresh
}

func (s *transport) tell(rtt time.Duration) {
	pipe := s.pipe
	if s.hidden {
		pipe = -1
	}
	s.Report(Report{
		At: s.p.now, Written: s.written, Acked: s.acked, Lost: s.retransmitted, Timeouts: s.timeouts, RTT: rtt,
		Unsent: s.unsent, Pipe: pipe, MSS: mss, RwndFull: s.rwndFull,
	})
	require.Equal(s.rt, s.flies(), s.Snapshot().Inflight)
	s.transmit()
}

// arrive lets n bytes reach the peer.
func (s *transport) arrive(n cc.Bytes, rtt time.Duration) {
	n = min(n, s.pipe)
	s.pipe -= n
	s.acked += n
	s.transmit()
	s.tell(rtt)
}

// flies is what the flow should have in flight after a report.
func (s *transport) flies() cc.Bytes {
	switch {
	case s.enforced && !s.hidden:
		return s.pipe
	case !s.hidden:
		return s.pipe + s.unsent
	default:
		return s.taken - s.acked
	}
}

// pass lets time pass, in which legs get limits and act on them.
func (m *mixed) pass(d time.Duration) {
	m.wait(d)
	for _, s := range m.legs {
		if s != nil && s.enforced {
			s.transmit()
		}
	}
}

func (m *mixed) check(rt *rapid.T) {
	var sum, limits, floors cc.Bytes
	var g *group
	for i, s := range m.legs {
		if s == nil {
			continue
		}
		g = s.group()
		sum += s.counted
		snap := s.Snapshot()
		require.GreaterOrEqual(rt, snap.Taken, snap.Delivered, "member %d", i)
		require.LessOrEqual(rt, snap.Taken, s.written, "member %d: nothing counts that was never written", i)
		require.GreaterOrEqual(rt, snap.Inflight, cc.Bytes(0))
		require.Equal(rt, s.limit, s.gate.limit, "member %d: it is told what it may use", i)
		if s.enforced {
			require.False(rt, s.gate.waiting, "member %d", i)
		}
		if s.active && s.contends {
			limits += s.limit.Cwnd
			floors += s.minimum
			require.GreaterOrEqual(rt, s.limit.Cwnd, min(g.control.Cwnd, s.minimum), "member %d", i)
		}
	}
	if g == nil {
		return
	}
	require.Equal(rt, sum, g.inflight, "the group counts what its members do")
	if !g.needsDivision && g.algorithm != nil {
		require.LessOrEqual(rt, limits, max(g.control.Cwnd, floors)+cc.Bytes(len(m.legs)),
			"shares add up to what there is")
	}
}

// TestEnforcedAndGatedMembersShareOneWindow drives random mixes of transports.
func TestEnforcedAndGatedMembersShareOneWindow(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := &mixed{testbed: newTestbed(t)}
		terms := rapid.SampledFrom([]Terms{
			static(rapid.Float64Range(1, 80).Draw(rt, "window")),
			{Group: "host", Algorithm: "cubic"},
			{Group: "host", Algorithm: "copa"},
		}).Draw(rt, "algorithm")
		join := func() {
			terms.Weight = rapid.IntRange(0, 5).Draw(rt, "weight")
			terms.Priority = rapid.IntRange(0, 1).Draw(rt, "priority")
			terms.Class, terms.Target = Class(rapid.IntRange(0, 2).Draw(rt, "class")), 0
			if terms.Class == Guarantee {
				terms.Target = cc.Rate(rapid.IntRange(1, 100).Draw(rt, "target")) * 1e6
			}
			terms.MinRate = min(terms.Target, cc.Rate(rapid.IntRange(0, 20).Draw(rt, "minimum"))*1e6)
			l := m.openOver(terms, rapid.Bool().Draw(rt, "enforced"))
			m.legs = append(m.legs, &transport{leg: l, rt: rt, hidden: rapid.IntRange(0, 4).Draw(rt, "hidden") == 0})
		}
		for range rapid.IntRange(1, 5).Draw(rt, "members") {
			join()
		}
		// The first report comes before Observe returns.
		for _, s := range m.legs {
			s.tell(0)
		}
		for range rapid.IntRange(1, 60).Draw(rt, "steps") {
			m.pass(time.Duration(rapid.IntRange(0, 20_000).Draw(rt, "µs")) * time.Microsecond)
			i := rapid.IntRange(0, len(m.legs)-1).Draw(rt, "member")
			s := m.legs[i]
			if s == nil {
				continue
			}
			rtt := time.Duration(rapid.IntRange(0, 1).Draw(rt, "measured")*rapid.IntRange(1, 60).Draw(rt,
				"rtt")) * time.Millisecond
			switch rapid.IntRange(0, 9).Draw(rt, "what") {
			case 0, 1, 2:
				s.write(cc.Bytes(rapid.IntRange(1, 100_000).Draw(rt, "bytes")))
				if rapid.Bool().Draw(rt, "and tells") {
					s.tell(0)
				}
			case 3, 4, 5:
				s.arrive(cc.Bytes(rapid.IntRange(1, 40_000).Draw(rt, "acked")), rtt)
			case 6:
				n := min(mss, s.pipe)
				s.pipe -= n
				s.lost += n
				s.timeouts += rapid.IntRange(0, 1).Draw(rt, "timeout")
				s.transmit()
				s.tell(0)
			case 7:
				s.rwndFull = !s.rwndFull
				s.transmit()
				s.tell(0)
			case 8:
				s.tell(0)
			case 9:
				switch rapid.IntRange(0, 2).Draw(rt, "rarely") {
				case 0:
					s.Close(m.now)
					m.legs[i] = nil
				case 1:
					join()
					m.legs[len(m.legs)-1].tell(0)
				case 2:
					m.pass(time.Duration(rapid.IntRange(1, 15).Draw(rt, "silence")) * time.Second)
				}
			}
			m.check(rt)
		}
		m.settleDown(rt)
	})
}

// settleDown lets everybody send until each has got something through, then
// drains the path.
func (m *mixed) settleDown(rt *rapid.T) {
	const rtt = 10 * time.Millisecond
	before := make([]cc.Bytes, len(m.legs))
	for i, s := range m.legs {
		if s != nil {
			before[i], s.rwndFull = s.acked, false
		}
	}
	waiting := func() (some []int) {
		for i, s := range m.legs {
			if s != nil && s.acked == before[i] {
				some = append(some, i)
			}
		}
		return some
	}
	// A pacer takes seconds to forget a round trip of seconds.
	for round := 0; round < 200 || len(waiting()) > 0 && round < 20_000; round++ {
		m.pass(time.Millisecond)
		for i := range m.legs { // goroutines that are woken together run in any order
			s := m.legs[(i+round)%len(m.legs)]
			if s == nil {
				continue
			}
			if round%10 == 0 {
				s.arrive(s.pipe, rtt)
			}
			s.write(64 * mss)
		}
		m.check(rt)
	}
	require.Empty(rt, waiting(), "members starve")
	for range 150 { // a queue of 64 segments, and as many lost, by a window of one
		m.pass(rtt)
		for _, s := range m.legs {
			if s != nil {
				s.arrive(s.pipe, rtt)
			}
		}
	}
	for i, s := range m.legs {
		if s == nil {
			continue
		}
		snap := s.Snapshot()
		require.Equal(rt, s.written, snap.Taken, "member %d", i)
		require.Equal(rt, s.written, snap.Delivered, "member %d", i)
		require.Zero(rt, snap.Inflight, "member %d", i)
		require.Zero(rt, s.group().inflight)
	}
}
