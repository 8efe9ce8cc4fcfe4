package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

// beside opens datagrams in the group of terms and counts their wakes.
func (p *testbed) beside(terms Terms, share float64) (d *Datagrams, woken *int) {
	p.t.Helper()
	woken = new(int)
	d, err := p.mgr.OpenDatagrams(p.now, terms, share, func() { *woken++ })
	require.NoError(p.t, err)
	return d, woken
}

// pour takes datagrams of a segment until one is refused, at most 1000.
func (p *testbed) pour(d *Datagrams) (n int) {
	for n < 1000 && d.Take(p.now, mss, false) {
		n++
	}
	return n
}

func TestDatagramsPassWhereNoFlowWantsTheWindow(t *testing.T) {
	p := newTestbed(t)
	d, _ := p.beside(static(10), 0.5)
	assert.Equal(t, 1000, p.pour(d), "without any flow")
	l := p.open(static(10))
	assert.Equal(t, 3*mss, l.send(3*mss))
	assert.Equal(t, 1000, p.pour(d), "beside one that has all it wants")
}

func TestDatagramsHaveTheirShareWhileAFlowWantsTheWindow(t *testing.T) {
	p := newTestbed(t)
	l := p.open(static(10))
	d, woken := p.beside(static(10), 0.5)
	l.send(mss)
	p.wait(20 * time.Millisecond)
	l.ack(mss) // the round trip is known
	assert.Equal(t, 10*mss, l.send(64*mss))
	assert.Equal(t, 5, p.pour(d), "half the window counts as theirs, which the flow makes room for")
	assert.Zero(t, *woken)

	p.wait(20 * time.Millisecond)
	assert.Equal(t, 1, *woken, "within the round trip after they went")
	l.ack(10 * mss)
	assert.Equal(t, 5, p.pour(d))
	assert.Equal(t, 5*mss, l.send(64*mss), "the flow has what is left")
}

func TestTwoSegmentsOfDatagramsAlwaysPass(t *testing.T) {
	p := newTestbed(t)
	l := p.open(static(10))
	d, _ := p.beside(static(10), 0.01)
	l.send(64 * mss)
	assert.Equal(t, 2, p.pour(d))
}

func TestDatagramsThatWaitAreWokenOnceNoFlowWantsTheWindow(t *testing.T) {
	p := newTestbed(t)
	l := p.open(static(10))
	d, woken := p.beside(static(10), 0.5)
	l.send(64 * mss)
	p.pour(d)
	l.Close(p.now)
	p.wait(unknownRTT)
	p.wait(0)
	assert.Equal(t, 1, *woken)
	assert.Equal(t, 1000, p.pour(d))
}

func TestTwoPeersDatagramsOfOneGroupHaveHalfTheShareEach(t *testing.T) {
	p := newTestbed(t)
	l := p.open(static(40))
	d, _ := p.beside(static(40), 0.5)
	e, _ := p.beside(static(40), 0.5)
	l.send(64 * mss)
	first := p.pour(d)
	assert.Equal(t, 20, first, "nobody else asks")
	assert.Equal(t, 10, p.pour(e))
}

func TestDatagramsFallToTheirShareByHalvesWithEachRoundTrip(t *testing.T) {
	p := newTestbed(t)
	d, _ := p.beside(static(10), 0.5)
	l := p.open(static(10))
	l.send(mss)
	p.wait(20 * time.Millisecond)
	l.ack(mss) // the round trip is known
	for range 80 {
		require.True(t, d.Take(p.now, mss, false))
	}
	l.send(64 * mss)
	for _, want := range []int{40, 20, 10, 5, 5} {
		p.wait(20 * time.Millisecond)
		l.ack(l.r.Pipe)
		l.send(64 * mss)
		assert.Equal(t, want, p.pour(d))
	}
}

func TestDatagramsFindTheGroupThatCameAfterTheirs(t *testing.T) {
	p := newTestbed(t)
	d, _ := p.beside(static(10), 0.5)
	p.open(static(10)).Close(p.now)
	p.wait(2 * memoryLasts)
	p.open(Terms{Group: "another", Algorithm: "reno"}).Close(p.now) // which has it forgotten
	p.wait(2 * memoryLasts)
	p.open(Terms{Group: "a third", Algorithm: "reno"}).Close(p.now)
	assert.Nil(t, d.home.Load())
	assert.Equal(t, 1000, p.pour(d))
	l := p.open(static(10))
	l.send(64 * mss)
	assert.Equal(t, 5, p.pour(d))
	d.Close()
	assert.Equal(t, 1000, p.pour(d))
	p.wait(20 * time.Millisecond)
	l.ack(10 * mss)
	assert.Equal(t, 10*mss, l.send(64*mss))
}

func TestDatagramsNeedAShareAndAnAlgorithm(t *testing.T) {
	var m Manager
	for _, share := range []float64{0, -1, 1.1} {
		_, err := m.OpenDatagrams(1, static(10), share, nil)
		assert.ErrorContains(t, err, "share")
	}
	_, err := m.OpenDatagrams(1, Terms{Algorithm: "nonesuch"}, 1, nil)
	assert.Error(t, err)
}

// Whatever comes: a flow that wants the window has what the datagrams' share
// leaves of it within a round trip, and who waits is woken.
func TestWhateverComesFlowsKeepTheirPartOfTheWindow(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		p := newTestbed(t)
		window := cc.Bytes(rapid.IntRange(4, 100).Draw(rt, "window"))
		share := rapid.Float64Range(0.1, 1).Draw(rt, "share")
		terms := static(float64(window))
		d, woken := p.beside(terms, share)
		l := p.open(terms)
		waits := false
		for range rapid.IntRange(1, 60).Draw(rt, "steps") {
			switch rapid.IntRange(0, 3).Draw(rt, "what") {
			case 0:
				l.send(rapid.Custom(func(t *rapid.T) cc.Bytes { return cc.Bytes(rapid.IntRange(1, 200000).Draw(t, "n")) }).Draw(rt, "want"))
			case 1:
				if n := l.r.Pipe; n > 0 {
					l.ack(min(n, mss*cc.Bytes(rapid.IntRange(1, 50).Draw(rt, "acked"))))
				}
			case 2:
				n := cc.Bytes(rapid.IntRange(1, 1500).Draw(rt, "size"))
				before := *woken
				waits = !d.Take(p.now, n, false)
				require.Equal(rt, before, *woken, "Take does not call back")
			case 3:
				p.wait(time.Duration(rapid.IntRange(0, 50).Draw(rt, "ms")) * time.Millisecond)
				p.wait(0)
			}
			m := d.home.Load()
			sum := cc.Bytes(0)
			for _, c := range d.chunks {
				sum += c.n
			}
			require.Equal(rt, sum, d.inflight)
			if m.algorithm != nil {
				require.GreaterOrEqual(rt, m.memberWindow(), window*mss-cc.Bytes(share*float64(window*mss)))
			}
			require.LessOrEqual(rt, l.inflight(), window*mss)
		}
		before := *woken
		for range 100 {
			p.wait(10 * time.Millisecond)
			p.wait(0)
			if l.r.Pipe > 0 {
				l.ack(l.r.Pipe)
			}
		}
		if waits {
			require.Positive(rt, *woken)
			require.LessOrEqual(rt, *woken-before, 1)
		}
		require.True(rt, d.Take(p.now, mss, false))
	})
}

func TestAskingForDatagramsAllocatesNothing(t *testing.T) {
	p := newTestbed(t)
	l := p.open(static(100))
	d, _ := p.beside(static(100), 0.5)
	l.send(200 * mss)
	for range 1000 {
		d.Take(p.now, mss, false)
		p.wait(time.Millisecond)
	}
	assert.Zero(t, testing.AllocsPerRun(1000, func() {
		d.Take(p.now, mss, false)
		p.wait(time.Millisecond)
	}))
}

func TestWhatPassesForBeingLittleRunsUpNoDebt(t *testing.T) {
	p := newTestbed(t)
	l := p.open(static(10))
	d, _ := p.beside(static(10), 0.01)
	trip := func() {
		p.wait(20 * time.Millisecond)
		l.ack(l.r.Pipe)
		l.send(1000 * mss)
	}
	l.send(64 * mss)
	for range 1000 { // two segments each time, of a share that is less than one
		trip()
		require.Equal(t, 2, p.pour(d))
	}
	assert.GreaterOrEqual(t, d.credit, -d.maxLoan(), "it is not to be made up for when the window is wide again")
}

// What datagrams no longer use goes back to the flows, though no acknowledgement comes.
func TestFlowsHaveTheWindowBackARoundTripAfterTheDatagrams(t *testing.T) {
	for name, end := range map[string]func(*testbed, *Datagrams){
		"that stop":  func(*testbed, *Datagrams) {},
		"that close": func(_ *testbed, d *Datagrams) { d.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			p := newTestbed(t)
			l := p.openEnforced(static(10))
			l.write(mss, mss)
			l.report()
			p.wait(20 * time.Millisecond)
			l.ack(mss)
			d, _ := p.beside(static(10), 0.5)
			l.fill()
			require.True(t, d.Take(p.now, mss, false))
			require.True(t, d.Take(p.now, mss, false))
			p.waitForDivision()
			require.Equal(t, 8*mss, l.limit.Cwnd)
			end(p, d)
			p.wait(20 * time.Millisecond)
			assert.Equal(t, 10*mss, l.limit.Cwnd)
		})
	}
}

// parcel is a packet in the tests of queues: the flow, and its number there.
type parcel struct {
	flow string
	n    int
}

// queueBed is a queue before the datagrams' part of a window that a flow wants.
type queueBed struct {
	p       *testbed
	l       *leg
	d       *Datagrams
	q       *FairQueue[string, parcel]
	sent    []parcel
	dropped map[Drop][]parcel
}

func newQueueBed(t *testing.T, window float64) *queueBed {
	g := &queueBed{p: newTestbed(t), dropped: map[Drop][]parcel{}}
	g.l = g.p.open(static(window))
	g.d, _ = g.p.beside(static(window), 0.5)
	g.q = NewFairQueue[string](QueueConfig[parcel]{
		Window: g.d, Dropped: func(p parcel, why Drop) { g.dropped[why] = append(g.dropped[why], p) },
	})
	g.l.send(64 * mss)
	g.trip(100 * time.Millisecond)
	return g
}

// trip lets a round trip pass in which all arrives that the flow has sent.
func (g *queueBed) trip(rtt time.Duration) {
	g.p.wait(rtt)
	g.l.ack(g.l.r.Pipe)
	g.l.send(1000 * mss)
}

func (g *queueBed) offer(key string, n int, size cc.Bytes) {
	p := parcel{key, n}
	if g.q.Pass(g.p.now, key, size) {
		g.sent = append(g.sent, p)
		return
	}
	g.q.Push(g.p.now, key, size, p)
	g.drain()
	g.q.Trim(QueuedPackets, QueuedBytes)
}

func (g *queueBed) drain() {
	for p, ok := g.q.Pop(g.p.now); ok; p, ok = g.q.Pop(g.p.now) {
		g.sent = append(g.sent, p)
	}
}

func (g *queueBed) sentOf(key string) (n int) {
	for _, p := range g.sent {
		if p.flow == key {
			n++
		}
	}
	return n
}

func (g *queueBed) droppedOf(key string) (n int) {
	for _, all := range g.dropped {
		for _, p := range all {
			if p.flow == key {
				n++
			}
		}
	}
	return n
}

// play has each flow offer packets of a size at a rate for some time, with round
// trips of 100 ms.
func (g *queueBed) play(d time.Duration, flows map[string]cc.Rate, size cc.Bytes) {
	owed := map[string]cc.Bytes{}
	count := map[string]int{}
	for ms := range int(d / time.Millisecond) {
		for _, key := range []string{"call", "bulk", "other"} {
			for owed[key] += flows[key].BytesIn(time.Millisecond); owed[key] >= size; owed[key] -= size {
				g.offer(key, count[key], size)
				count[key]++
			}
		}
		g.p.wait(time.Millisecond)
		if ms%100 == 99 {
			g.trip(0)
		}
		g.drain()
	}
}

func TestASparseFlowPassesBesideAFlood(t *testing.T) {
	g := newQueueBed(t, 60) // 7 Mbit/s
	g.play(10*time.Second, map[string]cc.Rate{"call": 300_000, "bulk": 50_000_000}, 1000)
	assert.Zero(t, g.droppedOf("call"))
	assert.InDelta(t, 370, g.sentOf("call"), 1)
	assert.InDelta(t, 3.5e6*10/8/1000, float64(g.sentOf("bulk")+370), 200, "the flood has the rest of the share")
}

func TestASparseFlowPassesWhereTheWindowFades(t *testing.T) {
	g := newQueueBed(t, 60)
	g.play(4*time.Second, map[string]cc.Rate{"call": 300_000, "bulk": 50_000_000}, 1000)
	g.d.home.Load().control.Cwnd = 3 * mss
	g.l.send(1000 * mss) // it waits
	bulk := g.sentOf("bulk")
	for n := range 30 {
		g.p.wait(20 * time.Millisecond)
		g.offer("call", 1000+n, 750)
		g.offer("bulk", 1000+n, 750)
	}
	assert.Zero(t, g.droppedOf("call"))
	assert.Less(t, g.sentOf("bulk")-bulk, 10)
}

func TestTwoFloodsHaveHalfEachInBytes(t *testing.T) {
	g := newQueueBed(t, 60)
	g.play(5*time.Second, map[string]cc.Rate{"bulk": 20_000_000, "other": 60_000_000}, 1200)
	assert.InDelta(t, 1, float64(g.sentOf("bulk"))/float64(g.sentOf("other")), 0.05)
}

// CoDel slows down an elastic sender before its queue is full.
func TestAQueueThatStandsIsShortenedByCoDel(t *testing.T) {
	g := newQueueBed(t, 60)
	g.play(2*time.Second, map[string]cc.Rate{"bulk": 3_700_000}, 1000)
	assert.NotEmpty(t, g.dropped[DroppedLate])
	assert.Empty(t, g.dropped[DroppedOverflow])
}

func TestAFullQueueLosesTheOldestOfTheFattestFlow(t *testing.T) {
	g := newQueueBed(t, 4)
	for n := range 20 {
		g.q.Pass(g.p.now, "call", 1000)
		g.q.Push(g.p.now, "call", 1000, parcel{"call", n})
	}
	for n := range 300 {
		g.q.Pass(g.p.now, "bulk", 1000)
		g.q.Push(g.p.now, "bulk", 1000, parcel{"bulk", n})
		g.q.Trim(QueuedPackets, QueuedBytes)
	}
	packets, bytes := g.q.Len()
	assert.Equal(t, QueuedPackets, packets)
	assert.Equal(t, QueuedPackets*cc.Bytes(1000), bytes)
	assert.Zero(t, g.droppedOf("call"))
	assert.Equal(t, parcel{"bulk", 0}, g.dropped[DroppedOverflow][0])
	g.q.Trim(QueuedPackets, 5000)
	_, bytes = g.q.Len()
	assert.Equal(t, cc.Bytes(5000), bytes)
}

func TestAPacketLargerThanTheShareGoesInItsTurn(t *testing.T) {
	g := newQueueBed(t, 10)
	g.play(time.Second, map[string]cc.Rate{"bulk": 2_000_000}, 40_000)
	assert.Positive(t, g.sentOf("bulk"))
}

// Whatever comes: each packet is sent or dropped once, each flow's in order, and no
// more wait than may.
func TestWhateverComesAQueueLosesNothingUnsaid(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		g := newQueueBed(t, float64(rapid.IntRange(4, 40).Draw(rt, "window")))
		next, offered := map[string]int{}, 0
		for range rapid.IntRange(1, 200).Draw(rt, "steps") {
			key := rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(rt, "flow")
			switch rapid.IntRange(0, 5).Draw(rt, "what") {
			case 0:
				g.trip(time.Duration(rapid.IntRange(0, 300).Draw(rt, "rtt")) * time.Millisecond)
				g.drain()
			case 1:
				g.p.wait(time.Duration(rapid.IntRange(0, 50).Draw(rt, "ms")) * time.Millisecond)
				g.drain()
			default:
				for range rapid.IntRange(1, 60).Draw(rt, "burst") {
					g.offer(key, next[key], cc.Bytes(rapid.IntRange(28, 9000).Draw(rt, "size")))
					next[key]++
					offered++
				}
			}
			packets, bytes := g.q.Len()
			require.LessOrEqual(rt, packets, QueuedPackets)
			require.LessOrEqual(rt, bytes, QueuedBytes)
			require.GreaterOrEqual(rt, bytes, cc.Bytes(0))
		}
		g.l.Close(g.p.now)
		g.p.wait(memoryLasts)
		g.drain()
		packets, bytes := g.q.Len()
		require.Zero(rt, packets)
		require.Zero(rt, bytes)
		last := map[string]int{}
		for _, p := range g.sent {
			require.GreaterOrEqual(rt, p.n, last[p.flow], "in order")
			last[p.flow] = p.n + 1
		}
		require.Equal(rt, offered, len(g.sent)+len(g.dropped[DroppedLate])+len(g.dropped[DroppedOverflow]))
	})
}

func TestAQueueForgetsFlowsThatHaveNothingWaiting(t *testing.T) {
	g := newQueueBed(t, 10)
	for n := range 10 * meteredFlows {
		g.offer(string(rune('a'+n)), n, 100)
		g.p.wait(time.Millisecond)
	}
	assert.LessOrEqual(t, len(g.q.flows), meteredFlows+QueuedPackets)
}
