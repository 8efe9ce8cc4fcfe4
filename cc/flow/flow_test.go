package flow

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

func TestTakeGrantsWholeSegmentsUpToTheWindow(t *testing.T) {
	p := newTestbed(t)
	f := p.open(static(10))
	assert.Equal(t, 3*mss+100, f.send(3*mss+100), "all it asks for, when there is room")
	assert.Equal(t, 6*mss, f.send(100*mss), "the rest of the window, in whole segments")
	assert.Zero(t, f.send(mss), "the window is full")
	assert.Equal(t, LimitedByCwnd, f.Snapshot().LimitedBy)

	p.wait(20 * time.Millisecond)
	f.ack(2 * mss)
	assert.Equal(t, 1, f.wakes, "an acknowledgement that makes room wakes the flow, once")
	assert.Equal(t, 2*mss, f.send(mss*5))
}

func TestNothingIsGrantedAfterClose(t *testing.T) {
	p := newTestbed(t)
	f := p.open(static(10))
	f.send(mss)
	f.Close(p.now)
	f.Close(p.now)
	assert.Zero(t, f.send(mss))
	told := f.applied
	f.ack(mss)
	assert.Equal(t, told, f.applied)
	assert.Zero(t, countMembers(p.mgr.Groups(p.now)))
}

func TestAClosedFlowCanStillBeLookedAt(t *testing.T) {
	p := newTestbed(t)
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
	_, err := m.Open(1, Terms{Algorithm: "nope"}, Leg{})
	require.ErrorContains(t, err, "nope")
	_, err = m.Open(1, Terms{Algorithm: "static", Params: cc.Params{"depth": 1}}, Leg{})
	require.ErrorContains(t, err, "depth")
}

func TestPacingSpreadsGrants(t *testing.T) {
	p := newTestbed(t)
	rate := cc.RateOf(mss, time.Millisecond) // a segment a millisecond
	f := p.open(Terms{Group: "host", Algorithm: "none", ConnectionRate: rate})
	burst := f.send(1000 * mss)
	assert.Equal(t, 4*mss, burst, "4 ms of sending may go at once")
	assert.Equal(t, LimitedByPacing, f.Snapshot().LimitedBy)
	var total cc.Bytes
	for range 100 {
		assert.Zero(t, f.send(1000*mss))
		require.NotEqual(t, cc.Never, p.due, "a refusal for pacing books a tick")
		p.wait(p.due.Sub(p.now))
		require.Equal(t, 1, f.wakes)
		f.wakes = 0
		total += f.send(1000 * mss)
	}
	assert.Equal(t, 100*mss, total)
	assert.InDelta(t, 100, p.now.Sub(cc.Time(time.Second)).Seconds()*1e3, 1)
	assert.Equal(t, rate, f.report().PacingRate)
}

func TestPacerCreditIsBoundedAfterIdleness(t *testing.T) {
	p := pacer{rate: 8e6} // 1000 bytes a millisecond
	p.spendBytes(1, 4000)
	assert.Equal(t, cc.Bytes(4000), p.creditBytes(cc.Time(time.Hour), 100))
	assert.Equal(t, cc.Bytes(4000), p.creditBytes(cc.Time(2*time.Hour), 100))
}

func TestDebtDoesNotSurviveARaiseOfTheRate(t *testing.T) {
	p := pacer{}
	p.setRate(1, 8e3) // 1000 bytes a second
	p.spendBytes(1, 10_000)
	require.Equal(t, cc.Time(1).Add(10*time.Second), p.tat)
	p.setRate(1, 8e6)
	assert.Equal(t, cc.Time(1).Add(10*time.Millisecond), p.tat, "they take the new rate's time")
	p.setRate(1, 0)
	assert.Equal(t, cc.MaxCwnd, p.creditBytes(1, mss))
	p.setRate(1, 8e3)
	assert.Positive(t, p.creditBytes(1, mss), "nor one in which nothing was paced")
}

func TestAWaitForTheOldRateEndsWithIt(t *testing.T) {
	p := newTestbed(t)
	slow := static(100)
	slow.ConnectionRate = 8e3
	f := p.open(slow)
	f.send(100 * mss)
	require.Zero(t, f.send(100*mss))
	f.moveTo(static(100))
	assert.Equal(t, 1, f.wakes)

	// A wait for the ramp after silence ends with its acknowledgement.
	a, b := p.open(reno()), p.open(reno())
	a.send(mss)
	p.wait(5 * time.Second)
	a.ack(mss)
	a.send(100 * mss)
	b.send(2 * mss)
	require.Zero(t, b.send(mss), "a segment each 500 ms")
	require.Positive(t, b.limit.PacingRate)
	p.wait(20 * time.Millisecond)
	b.ack(2 * mss)
	assert.Equal(t, 1, b.wakes)
	assert.Positive(t, b.send(mss))
}

func TestWhatNobodyAskedForIsNotTaken(t *testing.T) {
	p := newTestbed(t)
	f := p.open(static(10))
	f.r.Written, f.r.Pipe, f.r.Unsent = 20*mss, 10*mss, 10*mss
	f.report()
	assert.Zero(t, f.Snapshot().Taken, "a transport that does not hold the window got no more than was granted")
	assert.Equal(t, 20*mss, f.inflight(), "though what it has is in flight, on its word")
}

func TestASegmentLargerThanTheWindowIsStillSent(t *testing.T) {
	p := newTestbed(t)
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
	p := newTestbed(t)
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

// A group's paths may differ in their segments; its pacer, built for the
// first one's, must let the larger ones through as well.
func TestASegmentLargerThanThePacersBurstIsStillSent(t *testing.T) {
	p := newTestbed(t)
	terms := Terms{Group: "host", Algorithm: "static", Params: cc.Params{"cwnd_packets": 100, "pacing_mbit": 2}}
	small, large := p.open(terms), p.open(terms)
	small.report()
	large.r.MSS = 8948 // jumbo frames: 36 ms at this rate
	large.report()
	require.Equal(t, 2*mss, small.send(2*mss))
	var sent cc.Bytes
	for end := p.now.Add(200 * time.Millisecond); p.now < end; p.wait(time.Millisecond) {
		p.wait(0)
		if large.wakes == 0 && sent > 0 {
			continue
		}
		large.wakes = 0
		for n := large.send(1 << 20); n > 0; n = large.send(1 << 20) {
			sent += n
		}
	}
	assert.InDelta(t, 50_000, int64(sent), 2*8948, "a fifth of a second's worth")
}

// peer sends as much as a window lets it, over a path of a rate with a queue that never drops.
type peer struct {
	t      *testing.T
	r      *Receiving
	window cc.Bytes
	now    cc.Time
	got    cc.Bytes
	unread cc.Bytes
}

const (
	peerRTT  = 20 * time.Millisecond
	peerRate = cc.Rate(11_584_000) // a segment in a millisecond
)

func newPeer(t *testing.T, m *Manager, terms Terms) *peer {
	t.Helper()
	p := &peer{t: t, now: cc.Time(time.Second), got: ReceiveBulk}
	r, err := m.Receive(p.now, terms, func(n cc.Bytes) { p.window = n })
	require.NoError(t, err)
	p.r = r
	return p
}

// send has it send for a time with at most an amount in flight.
func (p *peer) send(d time.Duration, most cc.Bytes) {
	for end := p.now.Add(d); p.now < end; p.now = p.now.Add(time.Millisecond) {
		window := p.window
		if window == 0 {
			window = ReceiveBulk
		}
		inflight := min(window, most)
		rtt := max(peerRTT, peerRate.TimeFor(inflight))
		p.got += min(cc.RateOf(inflight, peerRTT), peerRate).BytesIn(time.Millisecond)
		p.r.Arrived(Arrivals{
			At: p.now, Received: p.got, RTT: rtt, Window: window, Unread: p.unread,
			MSS: cc.DefaultMSS,
		})
	}
}

func uploadTerms(algorithm string) Terms {
	return Terms{Group: "host", Host: netip.MustParseAddr("192.0.2.1"), Algorithm: algorithm}
}

func TestTheWindowOfAReceiverFollowsThePath(t *testing.T) {
	p := newPeer(t, &Manager{}, uploadTerms("penstock"))
	p.send(10*time.Second, cc.MaxCwnd)
	s := p.r.Snapshot()
	bdp := peerRate.BytesIn(peerRTT)
	assert.Greater(t, p.window, bdp)
	assert.Less(t, p.window, 3*bdp)
	assert.Equal(t, p.window, s.Share)
	assert.Equal(t, p.got-ReceiveBulk-1448, s.Delivered, "what had come before is not counted")
	assert.Equal(t, LimitedByCwnd, s.LimitedBy)
	assert.InEpsilon(t, float64(peerRate), float64(s.DeliveryRate), 0.1)
}

// A window that its peer does not fill says nothing about the path, and stays.
func TestTheWindowOfAReceiverLeavesAPeerAloneThatFillsItNot(t *testing.T) {
	p := newPeer(t, &Manager{}, uploadTerms("penstock"))
	p.send(10*time.Second, 10e3)
	assert.GreaterOrEqual(t, p.window, firstReceive)
	assert.Equal(t, LimitedByApplication, p.r.Snapshot().LimitedBy)
}

// Nor does one with a reader that lags behind.
func TestTheWindowOfAReceiverDoesNotFollowItsReader(t *testing.T) {
	p := newPeer(t, &Manager{}, uploadTerms("penstock"))
	p.unread = 100e3
	p.send(time.Second, cc.MaxCwnd)
	settled := p.window
	assert.Greater(t, settled, p.unread)
	p.send(9*time.Second, cc.MaxCwnd)
	assert.GreaterOrEqual(t, p.window, settled)
	assert.Equal(t, LimitedByApplication, p.r.Snapshot().LimitedBy)
}

// TestLargerSegmentsAreNoLoss has a peer send small segments at first. The kernel estimates their size.
func TestLargerSegmentsAreNoLoss(t *testing.T) {
	p := newPeer(t, &Manager{}, uploadTerms("penstock"))
	a := Arrivals{At: p.now, Received: p.got, RTT: peerRTT, Window: ReceiveBulk, MSS: 536}
	arrive := func(mss cc.Bytes, holes int) cc.Bytes {
		a.At, a.Received, a.MSS, a.Holes = a.At.Add(time.Millisecond), a.Received+mss, mss, holes
		p.r.Arrived(a)
		return p.r.Snapshot().Lost
	}
	arrive(536, 0)
	assert.EqualValues(t, 2*536, arrive(536, 2))
	assert.EqualValues(t, 2*536, arrive(1448, 2))
	assert.EqualValues(t, 2*536+1448, arrive(1448, 3))
}

func TestWhoReceivesSharesWithNobodyWhoSends(t *testing.T) {
	m := &Manager{}
	sender, err := m.Open(1, uploadTerms("penstock"), Leg{})
	require.NoError(t, err)
	first, second := newPeer(t, m, uploadTerms("penstock")), newPeer(t, m, uploadTerms("penstock"))
	assert.Equal(t, 1, sender.Snapshot().Members)
	assert.Equal(t, 2, first.r.Snapshot().Members)

	host := netip.MustParsePrefix("192.0.2.1/32")
	assert.Equal(t, 1, m.Hint(host, cc.Hint{At: 2, Capacity: 1e6}), "hints are about the way to the host")

	require.NoError(t, second.r.Move(second.now, uploadTerms("vegas")))
	assert.Equal(t, "vegas", second.r.Snapshot().Algorithm)
	assert.Equal(t, 1, first.r.Snapshot().Members)
	first.r.Close(first.now)
}

// What needs signals or means that a receiver has not is refused by name.
func TestWhichAlgorithmsReceive(t *testing.T) {
	var can []string
	for _, spec := range cc.Specs() {
		_, err := (&Manager{}).Receive(1, Terms{Group: "a", Algorithm: spec.Name}, func(cc.Bytes) {})
		if slices.Contains(spec.Needs, cc.NeedsPacing) || slices.Contains(spec.Needs, cc.NeedsHints) {
			assert.ErrorContains(t, err, spec.Name+" does not go as the algorithm of a receive window")
			assert.ErrorContains(t, err, "there are cubic")
		} else {
			assert.NoError(t, err)
			can = append(can, spec.Name)
		}
	}
	assert.Subset(t, can, []string{"cubic", "penstock", "reno", "sprout", "vegas"})
	assert.NotContains(t, can, "bbr")
}
