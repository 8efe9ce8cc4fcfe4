package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// capped is a static window of n segments, of which hints leave the part c.
func capped(n, c float64) Terms {
	t := static(n)
	t.HintCap = c
	return t
}

// warm lets l know its path's round trip of 40 ms.
func (l *leg) warm() *leg {
	l.send(mss)
	l.p.wait(40 * time.Millisecond)
	l.ack(mss)
	return l
}

func TestAHintCapsAnAlgorithmThatKnowsNothingOfHints(t *testing.T) {
	p := newTestbed(t)
	l := p.open(capped(1000, 0.5)).warm()
	require.Equal(t, 1000*mss, l.Snapshot().Cwnd)
	host := to("192.0.2.1")
	p.mgr.Hint(host, cc.Hint{At: p.now, Capacity: 20e6})
	p.wait(0)

	s := l.Snapshot()
	assert.Equal(t, cc.Rate(10e6).BytesIn(40*time.Millisecond)+2*mss, s.Cwnd,
		"half of the capacity for a round trip, and two segments")
	assert.Equal(t, cc.Rate(10e6), s.PacingRate)
	assert.True(t, p.mgr.Groups(p.now)[0].Capped)
	assert.LessOrEqual(t, l.send(1000*mss), s.Cwnd)

	p.mgr.Hint(host, cc.Hint{At: p.now, Capacity: 200e9})
	p.wait(0)
	assert.Equal(t, 1000*mss, l.Snapshot().Cwnd, "one that leaves more than the algorithm asks for")
	assert.False(t, p.mgr.Groups(p.now)[0].Capped)
	assert.EqualValues(t, 200e9/2, l.Snapshot().PacingRate, "it is only spread out")
}

func TestAStaleHintFreesTheWindowByItself(t *testing.T) {
	p := newTestbed(t)
	l := p.open(capped(1000, 1)).warm()
	p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 1e6})
	p.wait(0)
	for l.send(1000*mss) > 0 {
		p.wait(100 * time.Millisecond)
	}
	require.True(t, l.gate.waiting)
	woken := l.woken
	p.wait(2 * time.Second)
	assert.Greater(t, l.woken, woken, "no acknowledgement has come")
	assert.Equal(t, 1000*mss, l.Snapshot().Cwnd)
	assert.Zero(t, l.Snapshot().PacingRate)
	assert.False(t, p.mgr.Groups(p.now)[0].Capped)
}

func TestACellWithoutCapacityDoesNotStopAFlowForLong(t *testing.T) {
	p := newTestbed(t)
	terms := Terms{Group: "host", Host: addr("192.0.2.1"), Algorithm: "copa", HintCap: 1}
	l := p.open(terms).warm()
	host := to("192.0.2.1")
	for range 100 {
		p.mgr.Hint(host, cc.Hint{At: p.now, Capacity: 1}) // nothing, as told
		p.wait(0)
		l.send(mss)
		p.wait(10 * time.Millisecond)
	}
	assert.Less(t, l.r.Pipe, 10*mss)
	p.mgr.Hint(host, cc.Hint{At: p.now, Capacity: 100e6})
	p.wait(time.Second)
	p.wait(0)
	l.ack(l.r.Pipe)
	assert.Positive(t, l.send(100*mss))
}

func TestWithoutACapHintsChangeNoWindow(t *testing.T) {
	p := newTestbed(t)
	l := p.open(static(1000)).warm()
	p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 1e6})
	p.wait(0)
	assert.Equal(t, 1000*mss, l.Snapshot().Cwnd)
	assert.False(t, p.mgr.Groups(p.now)[0].Capped)

	l.moveTo(capped(1000, 1))
	assert.Less(t, l.Snapshot().Cwnd, 10*mss, "terms that bring one act at once")
	l.moveTo(static(1000))
	assert.Equal(t, 1000*mss, l.Snapshot().Cwnd)
}

func TestTheLeastCapOfTheMembersCounts(t *testing.T) {
	p := newTestbed(t)
	a := p.open(capped(1000, 1)).warm()
	b := p.open(capped(1000, 0.5))
	p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 20e6})
	p.wait(0)
	assert.Equal(t, cc.Rate(10e6).BytesIn(40*time.Millisecond)+4*mss, a.Snapshot().Cwnd)
	b.Close(p.now)
	a.warm()
	assert.Equal(t, cc.Rate(20e6).BytesIn(40*time.Millisecond)+2*mss, a.Snapshot().Cwnd)
}

func TestACapDoesNotLetAWindowGrowBehindIt(t *testing.T) {
	terms := reno()
	terms.HintCap = 1
	p := newTestbed(t)
	l := p.open(terms).warm()
	host := to("192.0.2.1")
	for range 200 {
		p.mgr.Hint(host, cc.Hint{At: p.now, Capacity: 4e6})
		p.wait(0)
		l.send(1000 * mss)
		p.wait(40 * time.Millisecond)
		p.wait(0)
		l.ack(l.r.Pipe)
	}
	p.wait(5 * time.Second)
	p.wait(0)
	assert.Less(t, l.Snapshot().Cwnd, 40*mss, "what was held back by the hint proves nothing of the path")
}
