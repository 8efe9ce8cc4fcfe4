package flow

import (
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/need"
)

// bottleneck is a link with a queue that members of one group share; beyond
// it each has its own way to go.
type bottleneck struct {
	*testbed
	rate cc.Rate
	busy cc.Time // until when what has been sent keeps the link
	legs []*leg
	ways []time.Duration
	wire [][]arrival // of each leg, in order
	got  []cc.Bytes
}

// host opens a flow to the i-th host, d away there and back.
func (b *bottleneck) host(t Terms, d time.Duration) *leg {
	t.Host = hostAt(len(b.legs))
	l := b.open(t)
	b.legs, b.ways, b.got = append(b.legs, l), append(b.ways, d), append(b.got, 0)
	b.wire = append(b.wire, nil)
	return l
}

// run lets all send as much as they may.
func (b *bottleneck) run(d time.Duration) {
	for end := b.now.Add(d); b.now < end; b.wait(time.Millisecond) {
		for i, l := range b.legs {
			for len(b.wire[i]) > 0 && b.wire[i][0].at <= b.now {
				n := b.wire[i][0].n
				b.wire[i] = b.wire[i][1:]
				if l != nil {
					b.got[i] += n
					l.ack(n)
				}
			}
		}
		b.wait(0)
		for i, l := range b.legs {
			for l != nil && !l.gate.waiting {
				if b.put(i, l.send(64*1024)) == 0 {
					break
				}
			}
		}
	}
}

// put sends n bytes through the link, segment by segment.
func (b *bottleneck) put(i int, n cc.Bytes) cc.Bytes {
	for left := n; left > 0; left -= mss {
		size := min(left, mss)
		b.busy = max(b.busy, b.now).Add(b.rate.TimeFor(size))
		b.wire[i] = append(b.wire[i], arrival{b.busy.Add(b.ways[i]), i, size})
	}
	return n
}

func TestMembersOnWaysOfUnlikeLengthHaveTheSameRate(t *testing.T) {
	const ms = time.Millisecond
	for _, tt := range []struct {
		name    string
		window  float64
		ways    []time.Duration
		weights []int
	}{
		{"20 and 100 ms, without a queue", 30, []time.Duration{20 * ms, 100 * ms}, []int{1, 1}},
		{"100 and 20 ms", 150, []time.Duration{100 * ms, 20 * ms}, []int{1, 1}},
		{"20 and 100 ms, with a queue", 60, []time.Duration{20 * ms, 100 * ms}, []int{1, 1}},
		{"three of them, by weight", 60, []time.Duration{20 * ms, 60 * ms, 200 * ms}, []int{1, 2, 3}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := &bottleneck{testbed: newTestbed(t), rate: 20e6}
			weights := 0
			for i, d := range tt.ways {
				terms := static(tt.window)
				terms.Weight = tt.weights[i]
				weights += terms.Weight
				b.host(terms, d)
				b.run(300 * ms)
			}
			b.run(2 * time.Second)
			before := append([]cc.Bytes(nil), b.got...)
			b.run(5 * time.Second)
			sum := 0.0
			for i := range b.got {
				sum += float64(b.got[i] - before[i])
			}
			for i := range b.got {
				assert.InEpsilon(t, float64(tt.weights[i])/float64(weights), float64(b.got[i]-before[i])/sum, 0.2,
					"member %d", i)
			}
		})
	}
}

func TestTheAlgorithmSeesTheCommonQueueAlone(t *testing.T) {
	const ms = time.Millisecond
	b := &bottleneck{testbed: newTestbed(t), rate: 20e6}
	b.host(static(40), 20*ms)
	b.run(200 * ms)
	b.host(static(40), 120*ms)
	b.run(time.Second)
	from := b.now
	b.trace = func(e Event) {
		if e.RTT == 0 || e.State.Now < from.Add(time.Second) {
			return
		}
		assert.InDelta(t, 20.6, float64(e.State.MinRTT)/1e6, 1.5)
		assert.Less(t, e.RTT, 50*ms, "what is longer is not the queue's doing")
	}
	b.run(2 * time.Second)
	near, far := b.legs[0].Snapshot(), b.legs[1].Snapshot()
	assert.InDelta(t, 20.6, float64(near.MinRTT)/1e6, 1.5)
	assert.InDelta(t, 120.6, float64(far.MinRTT)/1e6, 6, "each flow's own")
}

func TestAStandingQueueIsNotTakenForALongWay(t *testing.T) {
	const ms = time.Millisecond
	b := &bottleneck{testbed: newTestbed(t), rate: 20e6}
	b.host(static(300), 20*ms) // 174 ms of it, some 150 of them in the queue
	b.run(time.Second)
	b.host(static(300), 20*ms)
	b.run(3 * time.Second)
	assert.InDelta(t, 20, float64(b.legs[1].path.baseRTT)/1e6, 20*0.2)
	assert.False(t, b.legs[1].path.isFar(), "they are alike")
	before := append([]cc.Bytes(nil), b.got...)
	b.run(5 * time.Second)
	assert.InEpsilon(t, float64(b.got[0]-before[0]), float64(b.got[1]-before[1]), 0.1)
}

func TestWaysThatAreAlikeAreOne(t *testing.T) {
	const ms = time.Millisecond
	b := &bottleneck{testbed: newTestbed(t), rate: 100e6}
	b.host(static(30), 50*ms)
	b.host(static(30), 55*ms)
	b.host(static(30), 47*ms)
	b.run(2 * time.Second)
	for _, l := range b.legs {
		assert.False(t, l.path.isFar())
		assert.Equal(t, l.inflight(), l.counted)
	}
}

func TestWhoeverIsLeftGoesOnAtTheSameRate(t *testing.T) {
	const ms = time.Millisecond
	for _, ways := range [][]time.Duration{{20 * ms, 100 * ms}, {100 * ms, 20 * ms}} {
		b := &bottleneck{testbed: newTestbed(t), rate: 100e6}
		for _, d := range ways {
			b.host(static(40), d)
			b.run(200 * ms)
		}
		b.run(time.Second)
		all := b.got[0] + b.got[1]
		b.run(2 * time.Second)
		all = b.got[0] + b.got[1] - all
		b.legs[0].Close(b.now)
		b.legs[0] = nil
		b.run(500 * ms)
		before := b.got[1]
		b.run(2 * time.Second)
		assert.InEpsilon(t, float64(all), float64(b.got[1]-before), 0.1,
			"%v: the window means the same rate on any way", ways)
	}
}

// TestRoutesKeepTheirAccounts checks what is always true of members with ways that
// differ, whoever comes, goes and moves.
func TestRoutesKeepTheirAccounts(t *testing.T) {
	need.OneGoroutine(t)
	rapid.Check(t, func(rt *rapid.T) {
		b := &bottleneck{testbed: newTestbed(t), rate: cc.Rate(rapid.IntRange(5, 50).Draw(rt, "mbit")) * 1e6}
		window := float64(rapid.IntRange(1, 200).Draw(rt, "window"))
		way := func() time.Duration { return time.Duration(rapid.IntRange(10, 200).Draw(rt, "way")) * time.Millisecond }
		b.host(static(window), way())
		for range rapid.IntRange(1, 12).Draw(rt, "steps") {
			switch rapid.IntRange(0, 4).Draw(rt, "what") {
			case 0, 1:
				if len(b.legs) < 6 {
					b.host(static(window), way())
				}
			case 2:
				i := rapid.IntRange(0, len(b.legs)-1).Draw(rt, "member")
				if b.legs[i] != nil {
					b.legs[i].Close(b.now)
					b.legs[i] = nil
				}
			case 3:
				i := rapid.IntRange(0, len(b.legs)-1).Draw(rt, "member")
				if l := b.legs[i]; l != nil {
					terms := static(window)
					terms.Host = l.terms.Host
					if rapid.Bool().Draw(rt, "away") {
						terms.Group = "other"
					}
					require.NoError(rt, l.Move(b.now, terms))
				}
			}
			b.run(time.Duration(rapid.IntRange(1, 300).Draw(rt, "ms")) * time.Millisecond)
			sums, members := map[*group]cc.Bytes{}, map[*path]int{}
			for _, l := range b.legs {
				if l == nil {
					continue
				}
				require.Equal(rt, l.r.Pipe, l.inflight(), "a flow counts its own bytes")
				require.Equal(rt, l.path.toReference(l.Flow.inflight), l.counted)
				require.True(rt, slices.Contains(l.group().paths.all, l.path))
				sums[l.group()] += l.counted
				members[l.path]++
			}
			for _, g := range b.mgr.groups {
				require.Equal(rt, sums[g.group], g.inflight, "a group counts what its members do")
				idle := 0
				for _, r := range g.paths.all {
					require.Equal(rt, members[r], len(r.members))
					require.Same(rt, r, b.mgr.hosts[r.host][r.hostIndex].path)
					require.False(rt, math.IsNaN(r.scale) || math.IsInf(r.scale, 0) || r.scale < 0)
					if len(r.members) == 0 {
						idle++
					}
					n := cc.Bytes(rapid.IntRange(0, 1<<30).Draw(rt, "bytes"))
					require.GreaterOrEqual(rt, r.fromReference(r.toReference(n)), n, "what has room keeps it")
				}
				require.LessOrEqual(rt, idle, maxIdlePaths)
			}
		}
		before := append([]cc.Bytes(nil), b.got...)
		b.run(10 * time.Second) // a queue of some seconds may stand before what it sends
		for i, l := range b.legs {
			if l != nil {
				require.Greater(rt, b.got[i], before[i], "member %d starves", i)
			}
		}
	})
}

func TestAlgorithmsWorkOnWaysOfUnlikeLength(t *testing.T) {
	need.OneGoroutine(t)
	const ms = time.Millisecond
	for _, algorithm := range []string{"copa", "vegas", "bbr", "penstock"} {
		for _, ways := range [][]time.Duration{
			{20 * ms, 100 * ms},
			{100 * ms, 20 * ms},
			{20 * ms, 60 * ms, 60 * ms, 200 * ms},
		} {
			b := &bottleneck{testbed: newTestbed(t), rate: 20e6}
			for _, d := range ways {
				b.host(Terms{Group: "host", Algorithm: algorithm}, d)
				b.run(time.Second)
			}
			b.run(5 * time.Second)
			before := append([]cc.Bytes(nil), b.got...)
			b.run(10 * time.Second)
			var sum cc.Bytes
			for i := range b.got {
				sum += b.got[i] - before[i]
			}
			for i := range b.got {
				assert.InEpsilon(t, 1/float64(len(ways)), float64(b.got[i]-before[i])/float64(sum), 0.25,
					"%s, %v: member %d", algorithm, ways, i)
			}
			assert.Greater(t, cc.RateOf(sum, 10*time.Second).Mbps(), 17.0, "%s, %v: the link is used", algorithm, ways)
		}
	}
}

func TestSharesAreOfTheRateOnAnyWays(t *testing.T) {
	need.OneGoroutine(t)
	rapid.Check(t, func(rt *rapid.T) {
		b := &bottleneck{testbed: newTestbed(t), rate: 20e6}
		// with a queue that stands, or without; never so small that two segments are more than a share
		window := float64(rapid.IntRange(300, 600).Draw(rt, "window"))
		weights := 0
		for range rapid.IntRange(2, 3).Draw(rt, "members") {
			terms := static(window)
			terms.Weight = rapid.IntRange(1, 2).Draw(rt, "weight")
			weights += terms.Weight
			b.host(terms, time.Duration(rapid.IntRange(20, 200).Draw(rt, "way"))*time.Millisecond)
			b.run(time.Second)
		}
		b.run(2 * time.Second)
		before := append([]cc.Bytes(nil), b.got...)
		b.run(3 * time.Second)
		var sum cc.Bytes
		for i := range b.got {
			sum += b.got[i] - before[i]
		}
		for i, l := range b.legs {
			want := float64(l.weight) / float64(weights)
			// who joins while a queue stands takes a part of it for the way, which the second bound allows for
			require.InEpsilon(rt, want, float64(b.got[i]-before[i])/float64(sum), 0.8, "member %d", i)
		}
		for i, l := range b.legs {
			way := float64(b.ways[i]) / 1e6
			queue := float64(b.rate.TimeFor(cc.Bytes(window)*mss)) / 1e6 // at most
			require.InDelta(rt, way, float64(l.path.baseRTT)/1e6, 5+0.3*way+0.4*queue,
				"member %d: a queue is not taken for a way", i)
		}
	})
}
