package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// grown is a flow whose Reno has grown to n segments over a path of 40 ms.
func grown(p *testbed, t Terms, n cc.Bytes) *leg {
	l := p.open(t)
	for l.Snapshot().Cwnd < n*mss {
		require.Positive(p.t, l.send(n*mss))
		p.wait(40 * time.Millisecond)
		l.ack(l.r.Pipe)
	}
	return l
}

func TestAWindowIsRememberedForAWhile(t *testing.T) {
	const rto = 200 * time.Millisecond // of steady round trips of 40 ms
	for _, tt := range []struct {
		name   string
		idle   time.Duration
		halved int
		known  bool // the path's base round trip and what it carried
	}{
		{"after 5 s all is as it was", 5 * time.Second, 0, true},
		{"until 10 s are over", linger, 0, true},
		{"then it halves once with each timeout", linger + rto, 1, true},
		{"a bit later, no more", linger + rto + rto/2, 1, true},
		{"twice", linger + 2*rto, 2, true},
		{"after 12 s it is at the usual first window, and stays", 12 * time.Second, 3, true},
		{"after 4 minutes still", 4 * time.Minute, 3, true},
		{"after 5 minutes nothing is known", 5*time.Minute + time.Second, 3, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := newTestbed(t)
			l := grown(p, reno(), 80)
			before := l.Snapshot()
			require.Equal(t, 80*mss, before.Cwnd)
			l.Close(p.now)
			p.wait(tt.idle)
			want := max(80*mss>>tt.halved, 10*mss)
			if tt.known {
				groups := p.mgr.Groups(p.now)
				require.Len(t, groups, 1)
				assert.Equal(t, want, groups[0].Cwnd)
				assert.Equal(t, tt.idle, groups[0].Idle)
			}

			l = p.open(reno())
			l.send(want)
			s := l.Snapshot()
			assert.Equal(t, want, s.Cwnd)
			if !tt.known {
				assert.Zero(t, s.MinRTT)
				return
			}
			assert.Equal(t, before.MinRTT, s.MinRTT)
			p.wait(40 * time.Millisecond)
			l.ack(l.r.Pipe)
			assert.LessOrEqual(t, l.Snapshot().Cwnd, 2*want)
			for range 10 {
				l.send(200 * mss)
				p.wait(40 * time.Millisecond)
				l.ack(l.r.Pipe)
			}
			if tt.halved > 0 {
				assert.InDelta(t, 88, float64(l.Snapshot().Cwnd)/float64(mss), 8,
					"slow start ends where the path was known to carry it")
			}
		})
	}
}

// As tcp_slow_start_after_idle has it: no algorithm is left, and the window halves once with each timeout.
func TestAWindowThatRestartsFadesAtOnce(t *testing.T) {
	const rto = 200 * time.Millisecond // of steady round trips of 40 ms
	for idle, want := range map[time.Duration]cc.Bytes{
		rto / 2: 80, rto + rto/2: 40, 2*rto + rto/2: 20, 5 * rto: 10, time.Minute: 10,
	} {
		p := newTestbed(t)
		terms := reno()
		terms.Restarts = true
		l := grown(p, terms, 80)
		l.Take(p.now, 0) // it wants no more
		p.wait(idle)
		l.send(want * mss)
		s := l.Snapshot()
		assert.Equal(t, want*mss, s.Cwnd, "%v", idle)
		assert.Equal(t, 40*time.Millisecond, s.MinRTT)
	}
}

func TestASlowPathIsRememberedForLonger(t *testing.T) {
	p := newTestbed(t)
	l := p.open(reno())
	l.send(10 * mss)
	p.wait(2 * time.Second) // RFC 6298: the first sample makes a timeout of three times as much
	l.ack(l.r.Pipe)
	window := l.Snapshot().Cwnd
	l.Close(p.now)
	p.wait(17 * time.Second)
	l = p.open(reno())
	l.send(mss)
	assert.Equal(t, window, l.Snapshot().Cwnd, "three timeouts of 6 s are not over")
}

func TestAFadedWindowIsNotForAnotherHost(t *testing.T) {
	p := newTestbed(t)
	l := grown(p, reno(), 80)
	l.Close(p.now)
	p.wait(linger + time.Millisecond)
	other := reno()
	other.Host = addr("192.0.2.2")
	l = p.open(other)
	l.send(mss)
	s := l.Snapshot()
	assert.Equal(t, 10*mss, s.Cwnd)
	assert.Zero(t, s.MinRTT)
}

func TestWhatHasFadedHoldsNoAlgorithm(t *testing.T) {
	p := newTestbed(t)
	for i := range 20 {
		terms := reno()
		terms.Group = string(rune('a' + i))
		l := p.open(terms)
		l.send(mss)
		l.Close(p.now)
	}
	p.wait(linger + 4*time.Second)
	p.open(reno()) // others' coming and going is when it is noticed
	for _, g := range p.mgr.groups {
		if len(g.members) == 0 {
			assert.Nil(t, g.algorithm)
		}
	}
	assert.Zero(t, p.mgr.idleGroups.Len())
	assert.Equal(t, 20, p.mgr.forgottenGroups.Len())
	p.wait(memoryLasts)
	p.open(reno())
	assert.Zero(t, p.mgr.forgottenGroups.Len())
	assert.Len(t, p.mgr.groups, 1)
	assert.Len(t, p.mgr.hosts, 1)
}
