package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

// What the queues under test keep.
const (
	mostPackets          = 128
	mostBytes   cc.Bytes = mostPackets * fairQuantum
)

// parcel is a packet in the tests of queues: the flow, and its number there.
type parcel struct {
	flow string
	n    int
}

// queueBed is a queue before the packets' part of a window that a flow wants, too. Echoes are answered after 100 ms.
type queueBed struct {
	p        *testbed
	l        *leg
	e        *EchoFlow
	q        *FairQueue[string, parcel]
	requests []echoProbe // on their way
	sent     []parcel
	dropped  map[Drop][]parcel
}

func newQueueBed(t *testing.T, window float64) *queueBed {
	g := &queueBed{p: newTestbed(t), dropped: map[Drop][]parcel{}}
	g.l = g.p.open(static(window))
	var err error
	g.e, err = g.p.mgr.OpenEcho(g.p.now, static(window), ByEcho, func() {})
	require.NoError(t, err)
	g.q = NewFairQueue[string](QueueConfig[parcel]{
		Window: g.e, Dropped: func(p parcel, why Drop) { g.dropped[why] = append(g.dropped[why], p) },
	})
	g.l.send(64 * mss)
	g.trip(100 * time.Millisecond)
	return g
}

// trip lets a round trip pass in which all arrives that the flow has sent.
func (g *queueBed) trip(rtt time.Duration) {
	g.wait(rtt)
	g.l.ack(g.l.r.Pipe)
	g.l.send(1000 * mss)
}

// wait lets time pass, in which answers come.
func (g *queueBed) wait(d time.Duration) {
	g.p.wait(d)
	for len(g.requests) > 0 && g.p.now.Sub(g.requests[0].at) >= 100*time.Millisecond {
		g.e.ReceiveEcho(g.p.now, g.requests[0].sequence)
		g.requests = g.requests[1:]
	}
	g.drain()
	g.sendEchoIfDue()
}

func (g *queueBed) sendEchoIfDue() {
	if g.e.NextEcho() <= g.p.now {
		g.requests = append(g.requests, echoProbe{sequence: g.e.SendEcho(g.p.now), at: g.p.now})
	}
}

func (g *queueBed) offer(key string, n int, size cc.Bytes) {
	if g.q.Pass(g.p.now, key, size) {
		g.send(parcel{key, n})
		return
	}
	g.q.Push(g.p.now, key, size, parcel{key, n})
	g.drain()
	g.q.Trim(mostPackets, mostBytes)
}

func (g *queueBed) send(p parcel) {
	g.sent = append(g.sent, p)
	g.sendEchoIfDue()
}

func (g *queueBed) drain() {
	for p, ok := g.q.Pop(g.p.now); ok; p, ok = g.q.Pop(g.p.now) {
		g.send(p)
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
		g.wait(time.Millisecond)
		if ms%100 == 99 {
			g.trip(0)
		}
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
	g.e.flow.home.Load().control.Cwnd = 3 * mss
	g.l.send(1000 * mss) // it waits
	bulk := g.sentOf("bulk")
	for n := range 30 {
		g.requests = nil // nothing comes back
		g.wait(20 * time.Millisecond)
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
	g.play(4*time.Second, map[string]cc.Rate{"bulk": 3_700_000}, 1000)
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
		g.q.Trim(mostPackets, mostBytes)
	}
	packets, bytes := g.q.Len()
	assert.Equal(t, mostPackets, packets)
	assert.Equal(t, mostPackets*cc.Bytes(1000), bytes)
	assert.Zero(t, g.droppedOf("call"))
	assert.Equal(t, parcel{"bulk", 0}, g.dropped[DroppedOverflow][0])
	g.q.Trim(mostPackets, 5000)
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
			case 1:
				g.wait(time.Duration(rapid.IntRange(0, 50).Draw(rt, "ms")) * time.Millisecond)
			default:
				for range rapid.IntRange(1, 60).Draw(rt, "burst") {
					g.offer(key, next[key], cc.Bytes(rapid.IntRange(28, 9000).Draw(rt, "size")))
					next[key]++
					offered++
				}
			}
			packets, bytes := g.q.Len()
			require.LessOrEqual(rt, packets, mostPackets)
			require.LessOrEqual(rt, bytes, mostBytes)
			require.GreaterOrEqual(rt, bytes, cc.Bytes(0))
		}
		g.l.Close(g.p.now)
		for packets, _ := g.q.Len(); packets > 0; packets, _ = g.q.Len() {
			g.wait(100 * time.Millisecond)
		}
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
		g.wait(time.Millisecond)
	}
	assert.LessOrEqual(t, len(g.q.flows), meteredFlows+mostPackets)
}
