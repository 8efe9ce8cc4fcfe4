package flow

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

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

// TestLedgerForgetsDetailButNeverBytes compares a ledger that merges with one
// record for every byte.
func TestLedgerForgetsDetailButNeverBytes(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var l ledger
		var times []cc.Time // when each byte left
		acked := 0
		base := cc.Bytes(rapid.SampledFrom([]int64{0, 1 << 31, 1 << 32, 1<<40 + 7}).Draw(rt, "base"))
		l.startOffset = base
		for step := range rapid.IntRange(1, 2000).Draw(rt, "steps") {
			now := cc.Time(step+1) * cc.Time(time.Millisecond)
			if rapid.Bool().Draw(rt, "send") {
				n := rapid.IntRange(1, 40).Draw(rt, "bytes")
				l.addChunk(cc.Bytes(n), 7, chunk{sent: cc.Sent{At: now}})
				for range n {
					times = append(times, now)
				}
				continue
			}
			to := rapid.IntRange(acked, len(times)).Draw(rt, "ack")
			c, ok := l.dropArrived(base + cc.Bytes(to))
			if ok {
				require.LessOrEqual(rt, c.end, base+cc.Bytes(to), "only what has arrived in full")
				require.Equal(rt, times[int(c.end-base)-1], c.sent.At, "the record is exact for its newest byte")
			}
			acked = to
			require.Equal(rt, base+cc.Bytes(len(times)), l.endOffset())
			require.LessOrEqual(rt, len(l.ring), ledgerChunks)
		}
	})
}

func TestLedgerMergesWhenFull(t *testing.T) {
	var l ledger
	for i := range 10 * ledgerChunks {
		l.addChunk(100, 100, chunk{sent: cc.Sent{At: cc.Time(i + 1)}})
	}
	require.LessOrEqual(t, l.count, ledgerChunks)
	assert.Equal(t, cc.Bytes(10*ledgerChunks*100), l.endOffset())
	c, ok := l.dropArrived(l.endOffset())
	require.True(t, ok)
	assert.Equal(t, cc.Time(10*ledgerChunks), c.sent.At)
}

// TestSamplesKeepComing has a window go round and round: its segments leave evenly
// over a round trip, are pushed and acknowledged a few at a time, and each of the
// latter tells of a send that is at most a chunk older than what has arrived.
func TestSamplesKeepComing(t *testing.T) {
	for _, tt := range []struct {
		packets, pushed, acked int // in flight, with one Take, with one report
		least                  int // samples in a round trip
	}{
		{packets: 100, pushed: 1, acked: 1, least: 100},
		{packets: 250, pushed: 1, acked: 1, least: 250},
		{packets: 600, pushed: 1, acked: 1, least: 180},
		{packets: 600, pushed: 4, acked: 4, least: 140},
		{packets: 5000, pushed: 1, acked: 1, least: 200},
		{packets: 5000, pushed: 1, acked: 50, least: 100},
		{packets: 20_000, pushed: 1, acked: 1, least: 200},
		{packets: 20_000, pushed: 1, acked: 200, least: 100},
		{packets: 20_000, pushed: 16, acked: 2, least: 200},
		{packets: 20_000, pushed: 200, acked: 200, least: 100},
	} {
		t.Run(fmt.Sprintf("%d in flight, %d pushed and %d acknowledged at a time", tt.packets, tt.pushed, tt.acked),
			func(t *testing.T) {
				p := newTestbed(t)
				gap := 100 * time.Millisecond / time.Duration(tt.packets)
				rtt := gap * time.Duration(tt.packets)
				chunk := time.Duration(max(tt.pushed, 1+3*tt.packets/ledgerChunks*2)) * gap
				samples := 0
				p.trace = func(e Event) {
					if e.Kind != KindAck || e.RTT == 0 {
						return
					}
					samples++
					require.GreaterOrEqual(t, e.RTT, rtt)
					require.LessOrEqual(t, e.RTT, rtt+chunk+time.Duration(tt.pushed+tt.acked)*gap)
				}
				l := p.open(static(float64(tt.packets + tt.pushed + tt.acked)))
				sent, acked := 0, 0
				for k := range 6*tt.packets + 1 {
					p.wait(gap)
					if n := k - tt.packets - acked; n >= tt.acked { // what left a round trip ago
						l.ack(cc.Bytes(n) * mss)
						acked += n
					}
					if k-sent >= tt.pushed {
						require.Equal(t, cc.Bytes(tt.pushed)*mss, l.send(cc.Bytes(tt.pushed)*mss))
						sent += tt.pushed
					}
					if k == 3*tt.packets {
						samples = 0
					}
				}
				assert.GreaterOrEqual(t, samples, 3*tt.least)
				assert.InEpsilon(t, float64(cc.RateOf(mss, gap)), float64(l.Snapshot().DeliveryRate), 0.1)
				assert.LessOrEqual(t, len(l.ledger.ring), ledgerChunks)
			})
	}
}

func TestAChunkWaitsWhileItsNewestByteDoes(t *testing.T) {
	for left, want := range map[cc.Bytes]cc.Time{0: 9, 50: 9, 99: 9, 100: 1} {
		var l ledger
		l.addChunk(100, 100, chunk{sent: cc.Sent{At: 1}})
		l.markUnsent(left, 9)
		c, ok := l.dropArrived(100)
		require.True(t, ok)
		assert.Equal(t, want, c.sent.At, "%d of 100 bytes have left", left)
	}
}

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
	assert.Zero(t, f.wakes)
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
	p.waitForDivision()
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
	p.waitForDivision()
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
	p.waitForDivision()
	assert.Equal(t, cc.Rate(1e6), legs[0].limit.PacingRate)
}
