package flow

import (
	"sort"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// openHeld opens a flow over a transport that holds the window by itself.
func (p *path) openHeld(terms Terms) *leg {
	p.t.Helper()
	l := p.open(terms)
	l.r.Held = true
	return l
}

// write hands n bytes to the transport, of which sent leave at once.
func (l *leg) write(n, sent cc.Bytes) {
	l.r.Written += n
	l.r.Unsent += n - sent
	l.r.Pipe += sent
}

// fill leaves the transport with a full window and more to send.
func (l *leg) fill() Limit {
	window := l.report().Cwnd
	l.write(max(0, window-l.r.Pipe)+20*mss, max(0, window-l.r.Pipe))
	return l.report()
}

func TestOverATransportThatHoldsTheWindowBytesCountOnceTheyLeave(t *testing.T) {
	p := newPath(t)
	f := p.openHeld(static(10))
	f.write(20*mss, 10*mss)
	limit := f.report()
	assert.Equal(t, 10*mss, limit.Cwnd)
	assert.True(t, limit.Waiting)
	s := f.Snapshot()
	assert.Equal(t, 10*mss, s.Inflight)
	assert.Equal(t, 10*mss, s.Unsent)
	assert.Equal(t, 10*mss, s.Taken)
	assert.Equal(t, 10*mss, s.Share)

	p.wait(30 * time.Millisecond)
	f.r.RTT = 30 * time.Millisecond
	f.r.Unsent -= mss
	f.r.Pipe += mss
	f.ack(mss)
	s = f.Snapshot()
	assert.Equal(t, 30*time.Millisecond, s.SRTT)
	assert.Equal(t, 10*mss, s.Inflight)
	assert.Equal(t, 11*mss, s.Taken)

	f.r.Pipe = -1
	f.report()
	assert.Equal(t, 10*mss, f.inflight(), "where the pipe is not known, what has left and was not acknowledged")
}

func TestWhatHoldsAFlowBackOverATransportThatHoldsTheWindow(t *testing.T) {
	paced := Terms{Algorithm: "static", Params: cc.Params{"cwnd_packets": 10, "pacing_mbit": 8}}
	tests := []struct {
		name          string
		terms         Terms
		pipe, unsent  cc.Bytes
		rwndFull      bool
		want          LimitedBy
		windowLimited bool
	}{
		{"nothing waits: the application", static(10), 10 * mss, 0, false, LimitedByApplication, false},
		{"less than a segment waits for its rest", static(10), 10 * mss, mss - 1, false, LimitedByApplication, false},
		{"a segment waits: the window", static(10), 10 * mss, mss, false, LimitedByCwnd, true},
		{"much waits, and it is still the window", static(10), 10 * mss, 100 * mss, false, LimitedByCwnd, true},
		{"the window has room for two segments and there is a rate: pacing", paced, 8 * mss, mss, false, LimitedByPacing, true},
		{"the window is nearly full, rate or not", paced, 8*mss + 1, mss, false, LimitedByCwnd, true},
		{"without a rate it is the window that is slow to open", static(10), 5 * mss, mss, false, LimitedByCwnd, true},
		{"the policy's rate is a rate", Terms{Algorithm: "static", MaxRate: 1e6}, 5 * mss, mss, false, LimitedByPacing, true},
		{"the receiver before everything else", paced, 5 * mss, 10 * mss, true, LimitedByReceiver, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := newPath(t)
			f := p.openHeld(tt.terms)
			f.report()
			f.write(tt.pipe+tt.unsent, tt.pipe)
			f.r.RwndFull = tt.rwndFull
			f.report()
			assert.Equal(t, tt.want, f.Snapshot().LimitedBy)
			assert.Equal(t, tt.windowLimited, f.macro.cwndLimited())
			assert.Equal(t, tt.pipe, f.inflight())
		})
	}
}

func TestATransportThatMeasuresTellsWhenTheNewestByteLeft(t *testing.T) {
	const rtt = 40 * time.Millisecond
	var acks []cc.Ack
	newest := func() cc.Ack { return acks[len(acks)-1] }
	begin := func(t *testing.T) (*path, *leg) {
		acks = nil
		watch(t, func(a cc.Ack) { acks = append(acks, a) })
		p := newPath(t)
		return p, p.openHeld(Terms{Algorithm: "watched"})
	}
	ackAfter := func(f *leg, n cc.Bytes, rtt time.Duration) {
		f.r.RTT = rtt
		f.ack(n)
	}

	t.Run("not when a report first showed it", func(t *testing.T) {
		p, f := begin(t)
		f.write(10*mss, 5*mss)
		f.report()
		p.wait(10 * time.Millisecond)
		f.r.Unsent, f.r.Pipe = 4*mss, 6*mss
		p.wait(700 * time.Microsecond) // the sixth left in the meantime
		f.report()
		p.wait(rtt)
		ackAfter(f, 6*mss, rtt+500*time.Microsecond)
		assert.Equal(t, p.now.Add(-rtt-500*time.Microsecond), newest().Sent.At)
		assert.Equal(t, newest().Sent.At, f.macro.firstSent)
		assert.Equal(t, rtt+500*time.Microsecond, newest().RTT)
	})
	t.Run("even when the report that shows it leave shows it arrive", func(t *testing.T) {
		p, f := begin(t)
		f.report()
		p.wait(time.Second)
		f.write(10*mss, 10*mss)
		p.wait(rtt)
		ackAfter(f, mss, rtt)
		assert.Equal(t, p.now.Add(-rtt), newest().Sent.At)
		assert.Equal(t, cc.RateOf(mss, rtt), newest().DeliveryRate)
		p.wait(10 * time.Millisecond)
		ackAfter(f, 9*mss, rtt+10*time.Millisecond)
		assert.Equal(t, cc.RateOf(10*mss, rtt+10*time.Millisecond), newest().DeliveryRate)
	})
	t.Run("but more than a window does not leave in one round trip", func(t *testing.T) {
		p, f := begin(t)
		f.report()
		p.wait(time.Millisecond)
		f.write(100*mss, 100*mss)
		ackAfter(f, 100*mss, 50*time.Microsecond)
		assert.Zero(t, newest().DeliveryRate)
		assert.Equal(t, 50*time.Microsecond, newest().RTT)
	})
	t.Run("but not before the last report, which did not show it", func(t *testing.T) {
		p, f := begin(t)
		f.report()
		p.wait(rtt)
		f.report()
		last := p.now
		p.wait(rtt)
		f.write(mss, mss)
		ackAfter(f, mss, rtt+time.Millisecond)
		assert.Equal(t, last, newest().Sent.At)
	})
	t.Run("but not before what had left earlier", func(t *testing.T) {
		p, f := begin(t)
		f.write(mss, mss)
		f.report()
		p.wait(rtt)
		ackAfter(f, mss, rtt+time.Hour)
		assert.Equal(t, cc.Time(time.Second), newest().Sent.At)
	})
	t.Run("also after a retransmission, of which it knows more than the ledger", func(t *testing.T) {
		p, f := begin(t)
		f.write(3*mss, 3*mss)
		f.report()
		p.wait(rtt)
		f.r.Lost = mss
		f.report()
		p.wait(rtt)
		ackAfter(f, 3*mss, rtt)
		assert.Equal(t, rtt, newest().RTT)
		assert.Equal(t, p.now.Add(-rtt), newest().Sent.At)
		assert.Zero(t, newest().DeliveryRate, "the ledger's chunk may have been sent twice")
	})
	t.Run("and has no sample where none is valid", func(t *testing.T) {
		p, f := begin(t)
		f.write(4*mss, 2*mss)
		f.report()
		p.wait(rtt)
		ackAfter(f, mss, rtt)
		ackAfter(f, mss, 0)
		assert.Zero(t, newest().RTT)
		assert.Equal(t, rtt, f.Snapshot().LatestRTT)
	})
	t.Run("while one that never measures leaves it to the ledger", func(t *testing.T) {
		p, f := begin(t)
		f.write(4*mss, 2*mss)
		f.report()
		p.wait(rtt)
		ackAfter(f, mss, 0)
		assert.Equal(t, rtt, newest().RTT)
	})
}

func TestATransportThatHoldsTheWindowGivesNoShareToThoseItCannotServe(t *testing.T) {
	p := newPath(t)
	a, b := p.openHeld(static(40)), p.openHeld(static(40))
	b.write(30*mss, 10*mss)
	b.r.RwndFull = true
	b.report()
	assert.Equal(t, 30*mss, a.fill().Cwnd, "what is on the wire is on the wire; the rest waits for the peer")
	b.r.RwndFull = false
	assert.Equal(t, 20*mss, b.report().Cwnd)
	assert.Equal(t, 20*mss, a.report().Cwnd)
}

func TestMembersHoldTheirSharesThemselves(t *testing.T) {
	limits := func(legs ...*leg) (all []float64) {
		for _, l := range legs { // each learns of the others
			l.report()
		}
		for _, l := range legs {
			all = append(all, float64(l.report().Cwnd)/float64(mss))
		}
		return all
	}
	weighted := func(w int) Terms {
		terms := static(100)
		terms.Weight = w
		return terms
	}

	t.Run("one alone has the window", func(t *testing.T) {
		p := newPath(t)
		f := p.openHeld(static(10.5))
		assert.Equal(t, cc.Bytes(10.5*float64(mss)), f.fill().Cwnd)
	})
	t.Run("a newcomer has its level at once", func(t *testing.T) {
		p := newPath(t)
		a, b := p.openHeld(static(100)), p.openHeld(static(100))
		assert.Equal(t, 100*mss, a.fill().Cwnd, "alone it has the whole window")
		b.write(mss, 0)
		assert.Equal(t, 50*mss, b.report().Cwnd)
		assert.Equal(t, 50*mss, a.report().Cwnd)
	})
	t.Run("a newcomer that has not said so yet, too", func(t *testing.T) {
		p := newPath(t)
		a, b := p.openHeld(static(100)), p.openHeld(static(100))
		a.fill()
		assert.Equal(t, 50*mss, b.report().Cwnd)
	})
	t.Run("who uses less leaves the rest to those that want it", func(t *testing.T) {
		p := newPath(t)
		a, b, c := p.openHeld(static(100)), p.openHeld(static(100)), p.openHeld(static(100))
		a.fill()
		b.fill()
		c.write(10*mss, 10*mss)
		c.report()
		assert.ElementsMatch(t, []float64{44, 46}, limits(a, b), "in pairs")
		assert.InDelta(t, 33, float64(c.report().Cwnd)/float64(mss), 1, "its own level stays open to it")
	})
	t.Run("who has more in flight than its level and wants no more is due its level", func(t *testing.T) {
		p := newPath(t)
		a, b := p.openHeld(static(100)), p.openHeld(static(100))
		a.fill()
		a.r.Unsent = 0
		a.r.Written = a.r.Pipe
		a.report()
		assert.Equal(t, 50*mss, b.fill().Cwnd)
	})
	t.Run("by weight", func(t *testing.T) {
		p := newPath(t)
		a, b, c := p.openHeld(weighted(1)), p.openHeld(weighted(2)), p.openHeld(weighted(7))
		for _, l := range []*leg{a, b, c} {
			l.fill()
		}
		assert.Equal(t, []float64{10, 20, 70}, limits(a, b, c))
	})
	t.Run("the floor of the light is taken from the heavy", func(t *testing.T) {
		p := newPath(t)
		legs := []*leg{p.openHeld(weighted(1000))}
		for range 10 {
			legs = append(legs, p.openHeld(weighted(1)))
		}
		for _, l := range legs {
			l.fill()
		}
		assert.Equal(t, []float64{80, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2}, limits(legs...))
	})
	t.Run("nobody has less than the floor, whatever the window", func(t *testing.T) {
		p := newPath(t)
		a, b, c := p.openHeld(static(3)), p.openHeld(static(3)), p.openHeld(static(3))
		for _, l := range []*leg{a, b, c} {
			l.fill()
		}
		assert.Equal(t, []float64{2, 2, 2}, limits(a, b, c))
	})
	t.Run("lower priorities first, and the floor for the rest", func(t *testing.T) {
		p := newPath(t)
		later := static(100)
		later.Priority = 1
		a, b := p.openHeld(later), p.openHeld(static(100))
		a.fill()
		b.write(mss, 0)
		assert.Equal(t, 98*mss, b.report().Cwnd, "at once, though the other has a window in flight")
		assert.Equal(t, 2*mss, a.report().Cwnd)
		a.r.Written, a.r.Unsent = a.r.Pipe, 0
		a.report()
		assert.Equal(t, 98*mss, b.report().Cwnd, "also when that wants no more")
		b.r.Unsent, b.r.Pipe = 0, mss
		b.report()
		assert.Equal(t, 99*mss, a.report().Cwnd)
	})
	t.Run("the odd pairs go round, and all of them are told of", func(t *testing.T) {
		p := newPath(t)
		var legs []*leg
		for range 5 {
			legs = append(legs, p.openHeld(static(18)))
		}
		for i, l := range legs {
			l.write(10*mss, cc.Bytes(i+1)*mss/2)
			l.report()
		}
		had := make([]float64, len(legs))
		for range 5 {
			told := limits(legs...)
			sort.Float64s(told)
			assert.Equal(t, []float64{2, 4, 4, 4, 4}, told)
			for i, n := range limits(legs...) {
				had[i] += n
			}
			p.wait(turnRTTs * time.Millisecond) // there has been no round trip
		}
		assert.Equal(t, []float64{18, 18, 18, 18, 18}, had)
	})
	t.Run("who has just sent is told as much as others are", func(t *testing.T) {
		p := newPath(t)
		a, b := p.openHeld(static(22)), p.openHeld(static(22))
		a.fill()
		b.fill()
		told := limits(a, b)
		assert.Equal(t, 22.0, told[0]+told[1])
	})
	t.Run("no segment is left by itself", func(t *testing.T) {
		for window := cc.Bytes(6); window < 40; window++ {
			p := newPath(t)
			legs := []*leg{p.openHeld(static(float64(window))), p.openHeld(static(float64(window))), p.openHeld(static(float64(window)))}
			for _, l := range legs {
				l.fill()
			}
			sum := 0.0
			for _, n := range limits(legs...) {
				assert.Zero(t, int(n)%ackedTogether, "window of %d", window)
				sum += n
			}
			assert.LessOrEqual(t, sum, float64(window))
			assert.GreaterOrEqual(t, sum, float64(window-1), "window of %d", window)
		}
	})
	t.Run("who falls silent while it wants to send is not waited for", func(t *testing.T) {
		p := newPath(t)
		a, b := p.openHeld(static(100)), p.openHeld(static(100))
		a.fill()
		b.write(10*mss, mss)
		b.report()
		assert.Equal(t, 50*mss, a.report().Cwnd)
		p.wait(2 * time.Second)
		assert.Equal(t, 99*mss, a.report().Cwnd)
	})
	t.Run("who leaves gives its share back", func(t *testing.T) {
		p := newPath(t)
		a, b := p.openHeld(static(100)), p.openHeld(static(100))
		a.fill()
		b.fill()
		assert.Equal(t, 50*mss, a.report().Cwnd)
		b.Close(p.now)
		assert.Equal(t, 100*mss, a.report().Cwnd)
		assert.Equal(t, a.r.Pipe, a.macro.inflight)
	})
	t.Run("the rate is shared as the window is", func(t *testing.T) {
		p := newPath(t)
		terms := Terms{Group: "host", Algorithm: "static", Weight: 3, Params: cc.Params{"cwnd_packets": 100, "pacing_mbit": 8}}
		a := p.openHeld(terms)
		terms.Weight = 1
		b := p.openHeld(terms)
		terms.MaxRate = 1e6
		c := p.openHeld(terms)
		assert.Equal(t, cc.Rate(8e6), p.openHeld(Terms{Algorithm: "static", Params: terms.Params}).fill().PacingRate)
		for _, l := range []*leg{a, b, c} {
			l.fill()
		}
		assert.Equal(t, cc.Rate(4.8e6), a.report().PacingRate)
		assert.Equal(t, cc.Rate(1.6e6), b.report().PacingRate)
		assert.Equal(t, cc.Rate(1e6), c.report().PacingRate)

		terms = Terms{Group: "slow", Algorithm: "static", Weight: 1000, Params: cc.Params{"cwnd_packets": 1e6, "pacing_mbit": 0.001}}
		heavy := p.openHeld(terms)
		terms.Weight = 1
		light := p.openHeld(terms)
		heavy.fill()
		light.fill()
		assert.Equal(t, cc.Rate(1), light.report().PacingRate, "a rate of 0 would not pace")
	})
}

func TestATransportThatBeginsToHoldTheWindowNeedsNoGrants(t *testing.T) {
	p := newPath(t)
	f := p.open(static(10))
	require.Equal(t, 10*mss, f.send(20*mss))
	require.Zero(t, f.send(mss), "and now it waits")

	f.r.Held = true
	f.report()
	assert.Equal(t, 1, f.woken)
	assert.Equal(t, 50*mss, f.Take(p.now, 50*mss).Bytes)
	f.write(50*mss, 0)
	f.report()
	assert.Equal(t, 10*mss, f.inflight())
	f.r.Unsent -= 5 * mss
	f.r.Pipe += 5 * mss
	p.wait(time.Millisecond)
	f.ack(10 * mss)
	assert.Equal(t, 5*mss, f.inflight())
	assert.Equal(t, 15*mss, f.Snapshot().Taken)
	assert.Equal(t, 1, f.woken)

	// And back: what waits in the transport now counts, as for any other.
	f.r.Held = false
	f.report()
	assert.Equal(t, 50*mss, f.inflight())
	assert.Zero(t, f.send(mss))
	f.r.Pipe, f.r.Unsent = 50*mss, 0
	p.wait(time.Millisecond)
	f.ack(50 * mss)
	assert.Zero(t, f.inflight())
	assert.Equal(t, 2, f.woken)
	assert.Equal(t, 10*mss, f.send(20*mss))
	assert.Equal(t, 70*mss, f.Snapshot().Taken)
}

func TestTheAlgorithmsWishForEveryAcknowledgementIsPassedOn(t *testing.T) {
	p := newPath(t)
	assert.True(t, p.open(Terms{Algorithm: "picky"}).report().EveryAck)
	assert.False(t, p.open(Terms{Algorithm: "watched"}).report().EveryAck)
}

func init() {
	cc.Register(cc.Spec{
		Name: "picky", About: "test double", EveryAck: true,
		New: func(cc.Config) cc.Algorithm { return watched{} },
	})
}
