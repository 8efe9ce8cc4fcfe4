package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/penstock-net/penstock/cc"
)

func TestOverALegThatEnforcesTheWindowBytesCountOnceTheyLeave(t *testing.T) {
	p := newTestbed(t)
	f := p.openEnforced(static(10))
	f.write(20*mss, 10*mss)
	limit := f.report()
	assert.Equal(t, 10*mss, limit.Cwnd)
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

func TestWhatHoldsAFlowBackOverALegThatEnforcesTheWindow(t *testing.T) {
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
		{"room for two segments in the window, and a rate: pacing", paced, 8 * mss, mss, false, LimitedByPacing, true},
		{"the window is nearly full, rate or not", paced, 8*mss + 1, mss, false, LimitedByCwnd, true},
		{"without a rate it is the window that is slow to open", static(10), 5 * mss, mss, false, LimitedByCwnd, true},
		{
			"the policy's rate is a rate",
			Terms{Algorithm: "static", MaxRate: 1e6},
			5 * mss, mss, false,
			LimitedByPacing, true,
		},
		{"the receiver before everything else", paced, 5 * mss, 10 * mss, true, LimitedByReceiver, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := newTestbed(t)
			f := p.openEnforced(tt.terms)
			f.report()
			f.write(tt.pipe+tt.unsent, tt.pipe)
			f.r.RwndFull = tt.rwndFull
			f.report()
			assert.Equal(t, tt.want, f.Snapshot().LimitedBy)
			assert.Equal(t, tt.windowLimited, f.group().cwndLimited())
			assert.Equal(t, tt.pipe, f.inflight())
		})
	}
}

func TestALegThatMeasuresTellsWhenTheNewestByteLeft(t *testing.T) {
	const rtt = 40 * time.Millisecond
	var acks []cc.Ack
	newest := func() cc.Ack { return acks[len(acks)-1] }
	begin := func(t *testing.T) (*testbed, *leg) {
		acks = nil
		watch(t, func(a cc.Ack) { acks = append(acks, a) })
		p := newTestbed(t)
		return p, p.openEnforced(Terms{Algorithm: "watched"})
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
		assert.Equal(t, newest().Sent.At, f.group().delivered.firstSentAt)
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

func TestOverALegThatEnforcesTheWindowTakeIsForMaximumRatesAlone(t *testing.T) {
	p := newTestbed(t)
	f := p.openEnforced(static(10))
	assert.Equal(t, 50*mss, f.Take(p.now, 50*mss).Bytes, "which it has not")
	assert.Zero(t, f.inflight(), "and nothing has left")
	f.write(50*mss, 10*mss)
	f.report()
	assert.Equal(t, 10*mss, f.inflight())
	assert.Equal(t, 10*mss, f.Snapshot().Taken)
	assert.Zero(t, f.woken)
}

// Four members of a group at 1 Mbit/s on a path of microseconds: each sends all that
// waits at once, and rests for as long as its part of the rate asks for.
func TestAMemberThatWaitsForItsRateKeepsItsPartWhileItSaysNothing(t *testing.T) {
	p := newTestbed(t)
	terms := Terms{
		Group: "host", Algorithm: "static",
		Params: cc.Params{"cwnd_packets": 80, "pacing_mbit": 1},
	}
	var legs []*leg
	for range 4 {
		f := p.openEnforced(terms)
		f.write(18*mss, 2*mss)
		f.r.RTT = 50 * time.Microsecond
		f.report()
		f.ack(2 * mss)
		legs = append(legs, f)
	}
	p.settle()
	rest := cc.Rate(250_000).TimeFor(16 * mss) // 740 ms
	for left := rest; left > 0; left -= tickInterval * 10 {
		p.wait(tickInterval * 10)
		var sum cc.Rate
		for _, f := range legs {
			sum += f.limit.PacingRate
		}
		assert.LessOrEqual(t, sum, cc.Rate(1_000_000+4), "%v before the end", left)
	}
	// What says nothing for a timeout more cannot send, and the others have its part.
	for range 100 {
		p.wait(10 * time.Millisecond)
		for _, f := range legs[:3] {
			f.report()
		}
	}
	assert.InEpsilon(t, 1e6/3, float64(legs[0].limit.PacingRate), .02)
}

// Thirty members at 1 Mbit/s: each has sent all that it had at once, ahead of its rate, and
// is filled again only when that has been made up for.
func TestMembersThatHaveSentAheadOfTheirRateKeepTheirPart(t *testing.T) {
	const members, ahead = 30, 16
	p := newTestbed(t)
	terms := Terms{
		Group: "host", Algorithm: "static",
		Params: cc.Params{"cwnd_packets": 20 * members, "pacing_mbit": 1},
	}
	var legs []*leg
	for range members {
		f := p.openEnforced(terms)
		f.r.RTT = 50 * time.Microsecond
		f.write(ahead*mss, 2*mss)
		f.report()
		legs = append(legs, f)
	}
	p.settle()
	for _, f := range legs {
		f.r.Pipe, f.r.Unsent = ahead*mss, 0
		f.report()
		f.ack(ahead * mss)
	}
	rest := cc.Rate(1_000_000 / members).TimeFor(ahead * mss) // 5.6 s
	for left := rest; left > rest/2; left -= 10 * time.Millisecond {
		p.wait(10 * time.Millisecond)
		var sum cc.Rate
		for _, f := range legs {
			sum += f.limit.PacingRate
		}
		assert.LessOrEqual(t, sum, cc.Rate(1_000_000+members), "%v before the end", left)
	}
	// Who has made up for all, and has nothing to send, leaves its part to others.
	p.wait(rest)
	legs[0].write(20*mss, mss)
	legs[0].report()
	p.settle()
	assert.Equal(t, cc.Rate(1e6), legs[0].limit.PacingRate)
}
