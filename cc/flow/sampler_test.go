package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

func TestInflightFollowsThePipeAndNotTheAcknowledgements(t *testing.T) {
	p := newTestbed(t)
	f := p.open(static(10))
	f.send(10 * mss)
	p.wait(20 * time.Millisecond)

	// The first segment is lost, four behind it arrive: the cumulative count
	// stands still, but five are off the wire and one of them goes again.
	f.r.Acked, f.r.Newest = 4*mss, 5*mss
	f.r.Pipe, f.r.Lost = 6*mss, mss
	f.report()
	assert.Equal(t, 6*mss, f.inflight())
	assert.Equal(t, 4*mss, f.send(10*mss), "what left the pipe may be replaced at once")

	// The hole is repaired: no burst, since nothing but one segment left the pipe.
	p.wait(20 * time.Millisecond)
	f.r.Acked, f.r.Newest, f.r.Pipe = 5*mss, 0, 9*mss
	f.report()
	assert.Equal(t, mss, f.send(10*mss))
}

func TestBytesTakenButNotYetWrittenCount(t *testing.T) {
	p := newTestbed(t)
	f := p.open(static(10))
	g := f.Take(p.now, 4*mss)
	require.Equal(t, 4*mss, g.Bytes)
	f.r.Written, f.r.Pipe, f.r.Unsent = 3*mss, 2*mss, mss
	f.report()
	assert.Equal(t, 4*mss, f.inflight())
}

func TestUnknownPipeFallsBackToTakenMinusAcknowledged(t *testing.T) {
	p := newTestbed(t)
	f := p.open(static(10))
	f.send(10 * mss)
	f.r.Pipe, f.r.Acked = -1, 3*mss
	f.report()
	assert.Equal(t, 7*mss, f.inflight())
}

func TestStaleReportsAreIgnored(t *testing.T) {
	p := newTestbed(t)
	f := p.open(static(10))
	f.send(5 * mss)
	p.wait(time.Millisecond)
	f.ack(3 * mss)
	old := f.r
	old.At, old.Acked, old.Pipe = p.now-1, mss, 4*mss
	f.Report(old)
	assert.Equal(t, 2*mss, f.inflight())
	assert.Equal(t, 3*mss, f.Snapshot().Delivered)
}

func TestRoundTripSamples(t *testing.T) {
	const rtt = 40 * time.Millisecond
	tests := []struct {
		name string
		run  func(p *testbed, f *leg)
		want time.Duration // of the newest sample; 0: none
	}{
		{"the newest acknowledged byte gives the sample", func(p *testbed, f *leg) {
			f.send(mss)
			p.wait(10 * time.Millisecond)
			f.send(mss)
			p.wait(rtt)
			f.ack(2 * mss)
		}, rtt},
		{"a chunk that has arrived in part gives none", func(p *testbed, f *leg) {
			f.send(100)
			f.send(mss)
			p.wait(rtt)
			f.ack(100)
			p.wait(time.Second)
			f.ack(mss / 2)
		}, rtt},
		{"time in the transport's own queue is not the network's", func(p *testbed, f *leg) {
			f.send(mss)
			f.r.Pipe, f.r.Unsent = 0, mss
			p.wait(30 * time.Millisecond)
			f.report()
			f.r.Pipe, f.r.Unsent = mss, 0
			p.wait(rtt)
			f.ack(mss)
		}, rtt},
		{"a retransmission without selective acknowledgements gives none", func(p *testbed, f *leg) {
			f.send(3 * mss)
			p.wait(rtt)
			f.r.Lost = mss
			f.report()
			p.wait(rtt)
			f.ack(3 * mss)
		}, 0},
		{"after a timeout what was in flight gives none", func(p *testbed, f *leg) {
			f.send(3 * mss)
			p.wait(rtt)
			f.r.Timeouts = 1
			f.report()
			p.wait(rtt)
			f.ack(3 * mss)
		}, 0},
		{"what is sent after a timeout gives one again", func(p *testbed, f *leg) {
			f.send(3 * mss)
			p.wait(rtt)
			f.r.Timeouts = 1
			f.report()
			f.ack(3 * mss)
			f.send(mss)
			p.wait(rtt)
			f.ack(mss)
		}, rtt},
		{"behind a hole selective acknowledgements still give samples", func(p *testbed, f *leg) {
			f.send(5 * mss)
			p.wait(rtt)
			f.r.Newest, f.r.Lost = 3*mss, mss
			f.ack(2 * mss)
		}, rtt},
		{"the repair of a hole is no sample", func(p *testbed, f *leg) {
			f.send(3 * mss)
			p.wait(rtt)
			f.r.Newest, f.r.Lost = 3*mss, mss
			f.ack(2 * mss)
			f.r.Newest = 0
			p.wait(rtt)
			f.ack(mss)
		}, rtt},
		{"a transport's own raw sample wins", func(p *testbed, f *leg) {
			f.send(mss)
			p.wait(rtt)
			f.r.RTT = 33 * time.Millisecond
			f.ack(mss)
		}, 33 * time.Millisecond},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := newTestbed(t)
			f := p.open(static(100))
			tt.run(p, f)
			assert.Equal(t, tt.want, f.Snapshot().LatestRTT)
		})
	}
}

func TestCumulativeAcknowledgementsMapToChunksOfAnySize(t *testing.T) {
	// 1448×3, 500, 1448 bytes; acknowledged at 1448, 3000, 4844 and 6292.
	p := newTestbed(t)
	f := p.open(static(100))
	for _, n := range []cc.Bytes{mss, mss, mss, 500, mss} {
		f.send(n)
		p.wait(time.Millisecond)
	}
	var samples []time.Duration
	for _, to := range []cc.Bytes{1448, 3000, 4844, 6292} {
		f.ack(to - f.r.Acked)
		samples = append(samples, f.Snapshot().LatestRTT)
	}
	ms := time.Millisecond
	assert.Equal(t, []time.Duration{5 * ms, 4 * ms, 2 * ms, ms}, samples)
}

func TestSmoothedRTTFollowsTheRFC(t *testing.T) {
	var e rttEstimator
	e.addSample(100 * time.Millisecond)
	assert.Equal(t, 100*time.Millisecond, e.srtt)
	assert.Equal(t, 50*time.Millisecond, e.rttvar)
	e.addSample(180 * time.Millisecond)
	assert.Equal(t, 110*time.Millisecond, e.srtt)
	assert.Equal(t, 57500*time.Microsecond, e.rttvar)
	e.addSample(60 * time.Millisecond)
	assert.Equal(t, 60*time.Millisecond, e.min)
}

func TestDeliveryRateIsMeasuredOverAFlight(t *testing.T) {
	p := newTestbed(t)
	f := p.open(static(20))
	// One segment a millisecond leaves, and comes back 20 ms later.
	for range 200 {
		f.send(mss)
		p.wait(time.Millisecond)
		if f.inflight() >= 20*mss {
			f.ack(mss)
		}
	}
	assert.InEpsilon(t, float64(cc.RateOf(mss, time.Millisecond)), float64(f.Snapshot().DeliveryRate), 0.06)
}

func TestApplicationLimitedFlights(t *testing.T) {
	var sent []cc.Sent
	watch(t, func(a cc.Ack) { sent = append(sent, a.Sent) })
	p := newTestbed(t)
	f := p.open(Terms{Algorithm: "watched"})
	f.send(mss) // asks for less than there is room for
	p.wait(10 * time.Millisecond)
	f.ack(mss)
	f.send(mss)
	p.wait(10 * time.Millisecond)
	f.ack(mss)
	require.Len(t, sent, 2)
	assert.True(t, sent[1].AppLimited, "it left while the window stood open")
}

func TestCwndLimited(t *testing.T) {
	tests := []struct {
		name   string
		want   cc.Bytes
		change func(*Report)
		limit  bool
	}{
		{"a flow that fills its window is limited by it", 100 * mss, func(*Report) {}, true},
		{"a flow that asks for less is not", mss, func(*Report) {}, false},
		{"bytes that pile up in the transport are its doing", 100 * mss, func(r *Report) {
			r.Unsent, r.Pipe = 5*mss, r.Pipe-5*mss
		}, false},
		{"a full receive window is the peer's doing", 100 * mss, func(r *Report) { r.RwndFull = true }, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got bool
			watch(t, func(a cc.Ack) { got = a.CwndLimited })
			p := newTestbed(t)
			f := p.open(Terms{Algorithm: "watched"})
			f.send(tt.want)
			p.wait(5 * time.Millisecond)
			tt.change(&f.r)
			f.ack(mss)
			assert.Equal(t, tt.limit, got)
		})
	}
}

func TestLossesAreToldOncePerReport(t *testing.T) {
	losses := watchLosses(t)
	p := newTestbed(t)
	f := p.open(Terms{Algorithm: "watched"})
	f.send(10 * mss)
	p.wait(20 * time.Millisecond)
	f.ack(mss)
	p.wait(5 * time.Millisecond)
	f.r.Lost = 2 * mss
	f.report()
	f.report()
	f.r.Timeouts = 1
	f.report()
	require.Len(t, *losses, 2)
	assert.Equal(t, 2*mss, (*losses)[0].Lost)
	assert.Equal(t, p.now.Add(-20*time.Millisecond), (*losses)[0].SentAt, "a round trip ago, where it is hidden")
	assert.False(t, (*losses)[0].Timeout)
	assert.True(t, (*losses)[1].Timeout)
	assert.Equal(t, 2, f.Snapshot().LossEvents)
}

func TestALossEventLastsUntilItsHolesAreFilled(t *testing.T) {
	losses := watchLosses(t)
	p := newTestbed(t)
	f := p.open(Terms{Algorithm: "watched"})
	f.send(10 * mss)
	p.wait(20 * time.Millisecond)
	f.ack(mss)

	// Two segments of one window are lost; the second is found a round trip later.
	f.r.Acked, f.r.Sacked, f.r.Newest, f.r.Lost = 5*mss, 4*mss, 7*mss, mss
	f.report()
	first := p.now
	f.send(4 * mss)
	p.wait(25 * time.Millisecond)
	f.r.Acked, f.r.Sacked, f.r.Lost = 9*mss, 2*mss, 2*mss
	f.report()
	require.Len(t, *losses, 2)
	assert.Equal(t, first, (*losses)[1].SentAt, "before the sender had reacted to the first")

	// Once all that had been sent by then has arrived, a loss is a new one.
	p.wait(25 * time.Millisecond)
	f.r.Acked, f.r.Sacked, f.r.Newest = 11*mss, 0, 0
	f.report()
	p.wait(25 * time.Millisecond)
	f.r.Sacked, f.r.Acked, f.r.Newest, f.r.Lost = mss, 12*mss, 13*mss, 3*mss
	f.report()
	require.Len(t, *losses, 3)
	assert.Greater(t, (*losses)[2].SentAt, first)
}

func TestBatchedAcknowledgementsFindTheWindowFull(t *testing.T) {
	limited := 0
	watch(t, func(a cc.Ack) {
		if a.CwndLimited {
			limited++
		}
	})
	p := newTestbed(t)
	f := p.open(Terms{Algorithm: "watched"})
	for range 10 { // a whole window leaves, and is acknowledged, at once
		f.send(100 * mss)
		p.wait(50 * time.Millisecond)
		f.ack(10 * mss)
	}
	assert.Equal(t, 10, limited)
}

// What was sent before a timeout is sent again by it, however much of it an earlier
// loss event did not cover.
func TestATimeoutTakesAllThatWasSentUntilThen(t *testing.T) {
	losses := watchLosses(t)
	p := newTestbed(t)
	f := p.open(Terms{Algorithm: "watched"})
	f.send(4 * mss)
	p.wait(20 * time.Millisecond)
	f.ack(mss)
	f.r.Acked, f.r.Sacked, f.r.Newest, f.r.Lost = 2*mss, mss, 3*mss, mss
	f.report() // one of the first four
	f.send(4 * mss)
	p.wait(300 * time.Millisecond)
	f.r.Lost, f.r.Timeouts = 2*mss, 1
	f.report()
	fired := p.now
	p.wait(100 * time.Millisecond)
	f.r.Acked, f.r.Sacked = 5*mss, 0 // the first four are there
	f.report()
	f.r.Lost = 4 * mss
	f.report()
	require.Len(t, *losses, 3)
	assert.Equal(t, fired, (*losses)[2].SentAt, "which the timer knew")
}

// A link is gone for ten seconds. The rate of what leaves afterwards is not measured
// over them.
func TestDeliveryRatesLeaveOutHowLongATimerRan(t *testing.T) {
	p := newTestbed(t)
	f := p.open(static(20))
	flow := func(n int) {
		for range n {
			f.send(mss)
			p.wait(time.Millisecond)
			if f.inflight() >= 20*mss {
				f.ack(mss)
			}
		}
	}
	flow(100)
	p.wait(10 * time.Second)
	f.r.Timeouts, f.r.Lost = 1, mss
	f.report()
	for f.deliveryRate = 0; f.deliveryRate == 0; p.wait(time.Millisecond) { // sent again, and what leaves behind it
		f.ack(mss)
		f.send(mss)
	}
	assert.Greater(t, f.deliveryRate, cc.RateOf(mss, time.Millisecond)/2, "the first rate behind the gap")
}
