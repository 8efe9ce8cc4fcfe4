package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

func TestTakeGrantsWholeSegmentsUpToTheWindow(t *testing.T) {
	p := newPath(t)
	f := p.open(static(10))
	assert.Equal(t, 3*mss+100, f.send(3*mss+100), "all it asks for, when there is room")
	assert.Equal(t, 6*mss, f.send(100*mss), "the rest of the window, in whole segments")
	assert.Zero(t, f.send(mss), "the window is full")
	assert.Equal(t, LimitedByCwnd, f.Snapshot().LimitedBy)

	p.wait(20 * time.Millisecond)
	f.ack(2 * mss)
	assert.Equal(t, 1, f.woken, "an acknowledgement that makes room wakes the flow, once")
	assert.Equal(t, 2*mss, f.send(mss*5))
}

func TestNothingIsGrantedAfterClose(t *testing.T) {
	p := newPath(t)
	f := p.open(static(10))
	f.send(mss)
	f.Close(p.now)
	f.Close(p.now)
	assert.Zero(t, f.send(mss))
	assert.Equal(t, Limit{}, f.ack(mss))
	assert.Empty(t, p.mgr.Snapshots())
}

func TestAClosedFlowCanStillBeLookedAt(t *testing.T) {
	p := newPath(t)
	l := p.open(static(10))
	require.NotZero(t, l.send(3*mss))
	l.ack(2 * mss)
	l.Close(p.now)

	s := l.Snapshot()
	assert.Equal(t, 2*mss, s.Delivered)
	assert.Zero(t, s.Members)
}

func TestOpenRefusesUnknownAlgorithmsAndParameters(t *testing.T) {
	var m Manager
	_, err := m.Open(1, Terms{Algorithm: "nope"}, nil)
	require.ErrorContains(t, err, "nope")
	_, err = m.Open(1, Terms{Algorithm: "static", Params: cc.Params{"depth": 1}}, nil)
	require.ErrorContains(t, err, "depth")
}

func TestInflightFollowsThePipeAndNotTheAcknowledgements(t *testing.T) {
	p := newPath(t)
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
	p := newPath(t)
	f := p.open(static(10))
	g := f.Take(p.now, 4*mss)
	require.Equal(t, 4*mss, g.Bytes)
	f.r.Written, f.r.Pipe, f.r.Unsent = 3*mss, 2*mss, mss
	f.report()
	assert.Equal(t, 4*mss, f.inflight())
}

func TestUnknownPipeFallsBackToTakenMinusAcknowledged(t *testing.T) {
	p := newPath(t)
	f := p.open(static(10))
	f.send(10 * mss)
	f.r.Pipe, f.r.Acked = -1, 3*mss
	f.report()
	assert.Equal(t, 7*mss, f.inflight())
}

func TestStaleReportsAreIgnored(t *testing.T) {
	p := newPath(t)
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
		run  func(p *path, f *leg)
		want time.Duration // of the newest sample; 0: none
	}{
		{"the newest acknowledged byte gives the sample", func(p *path, f *leg) {
			f.send(mss)
			p.wait(10 * time.Millisecond)
			f.send(mss)
			p.wait(rtt)
			f.ack(2 * mss)
		}, rtt},
		{"a chunk that has arrived in part gives none", func(p *path, f *leg) {
			f.send(100)
			f.send(mss)
			p.wait(rtt)
			f.ack(100)
			p.wait(time.Second)
			f.ack(mss / 2)
		}, rtt},
		{"time in the transport's own queue is not the network's", func(p *path, f *leg) {
			f.send(mss)
			f.r.Pipe, f.r.Unsent = 0, mss
			p.wait(30 * time.Millisecond)
			f.report()
			f.r.Pipe, f.r.Unsent = mss, 0
			p.wait(rtt)
			f.ack(mss)
		}, rtt},
		{"a retransmission without selective acknowledgements gives none", func(p *path, f *leg) {
			f.send(3 * mss)
			p.wait(rtt)
			f.r.Lost = mss
			f.report()
			p.wait(rtt)
			f.ack(3 * mss)
		}, 0},
		{"after a timeout what was in flight gives none", func(p *path, f *leg) {
			f.send(3 * mss)
			p.wait(rtt)
			f.r.Timeouts = 1
			f.report()
			p.wait(rtt)
			f.ack(3 * mss)
		}, 0},
		{"what is sent after a timeout gives one again", func(p *path, f *leg) {
			f.send(3 * mss)
			p.wait(rtt)
			f.r.Timeouts = 1
			f.report()
			f.ack(3 * mss)
			f.send(mss)
			p.wait(rtt)
			f.ack(mss)
		}, rtt},
		{"behind a hole selective acknowledgements still give samples", func(p *path, f *leg) {
			f.send(5 * mss)
			p.wait(rtt)
			f.r.Newest, f.r.Lost = 3*mss, mss
			f.ack(2 * mss)
		}, rtt},
		{"the repair of a hole is no sample", func(p *path, f *leg) {
			f.send(3 * mss)
			p.wait(rtt)
			f.r.Newest, f.r.Lost = 3*mss, mss
			f.ack(2 * mss)
			f.r.Newest = 0
			p.wait(rtt)
			f.ack(mss)
		}, rtt},
		{"a transport's own raw sample wins", func(p *path, f *leg) {
			f.send(mss)
			p.wait(rtt)
			f.r.RTT = 33 * time.Millisecond
			f.ack(mss)
		}, 33 * time.Millisecond},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := newPath(t)
			f := p.open(static(100))
			tt.run(p, f)
			assert.Equal(t, tt.want, f.Snapshot().LatestRTT)
		})
	}
}

func TestCumulativeAcknowledgementsMapToChunksOfAnySize(t *testing.T) {
	// 1448×3, 500, 1448 bytes; acknowledged at 1448, 3000, 4844 and 6292.
	p := newPath(t)
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
	e.add(100 * time.Millisecond)
	assert.Equal(t, 100*time.Millisecond, e.srtt)
	assert.Equal(t, 50*time.Millisecond, e.rttvar)
	e.add(180 * time.Millisecond)
	assert.Equal(t, 110*time.Millisecond, e.srtt)
	assert.Equal(t, 57500*time.Microsecond, e.rttvar)
	e.add(60 * time.Millisecond)
	assert.Equal(t, 60*time.Millisecond, e.min)
}

func TestDeliveryRateIsMeasuredOverAFlight(t *testing.T) {
	p := newPath(t)
	f := p.open(static(20))
	// One segment a millisecond leaves, and comes back 20 ms later.
	for range 200 {
		f.send(mss)
		p.wait(time.Millisecond)
		if f.inflight() >= 20*mss {
			f.ack(mss)
		}
	}
	assert.InDelta(t, float64(cc.RateOf(mss, time.Millisecond)), float64(f.Snapshot().DeliveryRate), 0.06*float64(cc.RateOf(mss, time.Millisecond)))
}

func TestApplicationLimitedFlights(t *testing.T) {
	var sent []cc.Sent
	watch(t, func(a cc.Ack) { sent = append(sent, a.Sent) })
	p := newPath(t)
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
		{"bytes piling up in the transport are its doing, not the window's", 100 * mss, func(r *Report) { r.Unsent, r.Pipe = 5*mss, r.Pipe-5*mss }, false},
		{"a full receive window is the peer's doing", 100 * mss, func(r *Report) { r.RwndFull = true }, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got bool
			watch(t, func(a cc.Ack) { got = a.CwndLimited })
			p := newPath(t)
			f := p.open(Terms{Algorithm: "watched"})
			f.send(tt.want)
			p.wait(5 * time.Millisecond)
			tt.change(&f.r)
			f.ack(mss)
			assert.Equal(t, tt.limit, got)
		})
	}
}

func TestPacingSpreadsGrants(t *testing.T) {
	p := newPath(t)
	rate := cc.RateOf(mss, time.Millisecond) // a segment a millisecond
	f := p.open(Terms{Group: "host", Algorithm: "none", ConnectionRate: rate})
	burst := f.send(1000 * mss)
	assert.Equal(t, 4*mss, burst, "4 ms of sending may go at once")
	assert.Equal(t, LimitedByPacing, f.Snapshot().LimitedBy)
	var total cc.Bytes
	for range 100 {
		assert.Zero(t, f.send(1000*mss))
		p.now = p.mgr.Tick(p.now)
		require.NotEqual(t, cc.Never, p.now, "a refusal for pacing books a tick")
		p.mgr.Tick(p.now)
		require.Equal(t, 1, f.woken)
		f.woken = 0
		total += f.send(1000 * mss)
	}
	assert.Equal(t, 100*mss, total)
	assert.InDelta(t, 100, p.now.Sub(cc.Time(time.Second)).Seconds()*1e3, 1)
	assert.Equal(t, rate, f.report().PacingRate)
}

func TestPacerCreditIsBoundedAfterIdleness(t *testing.T) {
	p := pacer{rate: 8e6} // 1000 bytes a millisecond
	p.spend(1, 4000)
	assert.Equal(t, cc.Bytes(4000), p.credit(cc.Time(time.Hour), 100))
	assert.Equal(t, cc.Bytes(4000), p.credit(cc.Time(2*time.Hour), 100))
}

func TestWhatNobodyAskedForIsNotTaken(t *testing.T) {
	p := newPath(t)
	f := p.open(static(10))
	f.r.Written, f.r.Pipe, f.r.Unsent = 20*mss, 10*mss, 10*mss
	f.report()
	assert.Zero(t, f.Snapshot().Taken, "a transport that does not hold the window got no more than was granted")
	assert.Equal(t, 20*mss, f.inflight(), "though what it has is in flight, on its word")
}

func TestASegmentLargerThanTheWindowIsStillSent(t *testing.T) {
	p := newPath(t)
	f := p.open(Terms{Algorithm: "watched"})
	watchedCwnd = 20000
	defer func() { watchedCwnd = 10 * mss }()
	f.r.MSS = 65483 // loopback
	f.report()
	assert.Equal(t, cc.Bytes(20000), f.send(1<<20))
}

// A transport that cannot count the bytes on the wire exactly estimates from
// packets, and so may claim more than it was given.
func TestATransportsOverestimateIsNotInFlightForEver(t *testing.T) {
	p := newPath(t)
	f := p.open(static(10))
	f.report()
	require.Equal(t, cc.Bytes(100), f.send(100))
	f.r.Written = 10 * mss
	f.report()
	f.ack(100)
	require.Zero(t, f.inflight())

	require.Equal(t, 10*mss, f.send(10*mss), "the whole window is free")
	f.r.Written = 100 + 10*mss
	f.report()
	f.ack(10 * mss)
	assert.Zero(t, f.inflight(), "everything has arrived")
	assert.Equal(t, 10*mss, f.send(10*mss))
}

// A macroflow's paths may differ in their segments; its pacer, built for the
// first one's, must let the larger ones through as well.
func TestASegmentLargerThanThePacersBurstIsStillSent(t *testing.T) {
	p := newPath(t)
	terms := Terms{Group: "host", Algorithm: "static", Params: cc.Params{"cwnd_packets": 100, "pacing_mbit": 2}}
	small, large := p.open(terms), p.open(terms)
	small.report()
	large.r.MSS = 8948 // jumbo frames: 36 ms at this rate
	large.report()
	require.Equal(t, 2*mss, small.send(2*mss))
	var sent cc.Bytes
	for end := p.now.Add(200 * time.Millisecond); p.now < end; p.wait(time.Millisecond) {
		p.mgr.Tick(p.now)
		if large.woken == 0 && sent > 0 {
			continue
		}
		large.woken = 0
		for n := large.send(1 << 20); n > 0; n = large.send(1 << 20) {
			sent += n
		}
	}
	assert.InDelta(t, 50_000, int64(sent), 2*8948, "a fifth of a second's worth")
}

// watched is an algorithm with a fixed window that shows what it is told.
type watched struct{ cc.NoTick }

var (
	watchedCwnd = 10 * mss
	onAck       = func(cc.Ack) {}
	onLoss      = func(cc.Loss) {}
)

func init() {
	cc.Register(cc.Spec{Name: "watched", About: "test double", New: func(cc.Config) cc.Algorithm { return watched{} }})
}

func (watched) OnAck(a cc.Ack)   { onAck(a) }
func (watched) OnLoss(l cc.Loss) { onLoss(l) }
func (watched) Control() cc.Control {
	return cc.Control{Cwnd: watchedCwnd}
}

// watch shows the acknowledgements that algorithm "watched" is told of.
func watch(t *testing.T, f func(cc.Ack)) {
	onAck = f
	t.Cleanup(func() { onAck = func(cc.Ack) {} })
}

func TestLossesAreToldOncePerReport(t *testing.T) {
	var losses []cc.Loss
	onLoss = func(l cc.Loss) { losses = append(losses, l) }
	defer func() { onLoss = func(cc.Loss) {} }()
	p := newPath(t)
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
	require.Len(t, losses, 2)
	assert.Equal(t, 2*mss, losses[0].Lost)
	assert.Equal(t, p.now.Add(-20*time.Millisecond), losses[0].SentAt, "a round trip ago, where the transport hides it")
	assert.False(t, losses[0].Timeout)
	assert.True(t, losses[1].Timeout)
	assert.Equal(t, 2, f.Snapshot().LossEvents)
}

func TestALossEventLastsUntilItsHolesAreFilled(t *testing.T) {
	var losses []cc.Loss
	onLoss = func(l cc.Loss) { losses = append(losses, l) }
	defer func() { onLoss = func(cc.Loss) {} }()
	p := newPath(t)
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
	require.Len(t, losses, 2)
	assert.Equal(t, first, losses[1].SentAt, "before the sender had reacted to the first")

	// Once all that had been sent by then has arrived, a loss is a new one.
	p.wait(25 * time.Millisecond)
	f.r.Acked, f.r.Sacked, f.r.Newest = 11*mss, 0, 0
	f.report()
	p.wait(25 * time.Millisecond)
	f.r.Sacked, f.r.Acked, f.r.Newest, f.r.Lost = mss, 12*mss, 13*mss, 3*mss
	f.report()
	require.Len(t, losses, 3)
	assert.Greater(t, losses[2].SentAt, first)
}

func TestBatchedAcknowledgementsFindTheWindowFull(t *testing.T) {
	limited := 0
	watch(t, func(a cc.Ack) {
		if a.CwndLimited {
			limited++
		}
	})
	p := newPath(t)
	f := p.open(Terms{Algorithm: "watched"})
	for range 10 { // a whole window leaves, and is acknowledged, at once
		f.send(100 * mss)
		p.wait(50 * time.Millisecond)
		f.ack(10 * mss)
	}
	assert.Equal(t, 10, limited)
}
