package sim

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

// patient is an AQM that lets all pass.
type patient struct{ *codel }

func (patient) judge(cc.Time, int, waitingPacket, *lanes) judgement { return passes }

// The queue of a managed link leaves when a Link's would.
func TestAManagedLinkServesAsALinkDoes(t *testing.T) {
	trace := readTrace(t, "1\n1\n4\n9\n")
	rapid.Check(t, func(t *rapid.T) {
		cfg := LinkConfig{Delay: 3 * ms, Rate: cc.Rate(rapid.IntRange(1e5, 1e9).Draw(t, "rate"))}
		if rapid.Bool().Draw(t, "trace") {
			cfg.Trace = trace
		}
		link, managed := NewLink(cfg, start), NewManagedLink(cfg, start)
		managed.aqm = patient{newCoDel()}
		now := start
		var want, got []Verdict
		for range rapid.IntRange(1, 60).Draw(t, "packets") {
			now = now.Add(time.Duration(rapid.IntRange(0, 12).Draw(t, "wait")) * ms / 4)
			size := cc.Bytes(rapid.IntRange(40, 4000).Draw(t, "size"))
			want = append(want, link.Send(now, size))
			drop := dropOf(managed, now, 0, size, NotECT)
			require.Equal(t, DropNone, drop)
			if rapid.Bool().Draw(t, "asked now") { // when it is asked makes no difference
				got = append(got, verdicts(managed.Advance(now))...)
			}
		}
		assert.Equal(t, link.Offered(0, start, now), managed.Offered(0, start, now))
		got = append(got, verdicts(managed.Advance(now.Add(time.Hour)))...)
		assert.Equal(t, want, got)
		assert.Equal(t, cc.Never, managed.Next())
	})
}

func verdicts(all []Departure) (out []Verdict) {
	for _, d := range all {
		out = append(out, d.Verdict)
	}
	return out
}

func TestAManagedLinksQueueHasLimits(t *testing.T) {
	for what, cfg := range map[string]LinkConfig{
		"packets": {Rate: 12e6, AQM: CoDel, QueuePackets: 2},
		"bytes":   {Rate: 12e6, AQM: DualPI2, QueueBytes: 3200},
	} {
		l := NewManagedLink(cfg, start)
		var drops []Drop
		for _, ecn := range []Codepoint{ECT0, ECT1, NotECT} {
			drop := dropOf(l, start, 0, 1500, ecn)
			drops = append(drops, drop)
		}
		assert.Equal(t, []Drop{DropNone, DropNone, DropNone}, drops, "%s: one is being sent", what)
		drop := dropOf(l, start, 0, 1500, ECT1)
		assert.Equal(t, DropQueue, drop, what)
		bytes, packets := l.Backlog(start.Add(ms), 0)
		assert.EqualValues(t, 1500, bytes)
		assert.Equal(t, 1, packets)
	}
}

// flood offers twice of what a link of 12 Mbit/s carries, of packets with those
// codepoints in turn, and returns what became of them.
func flood(aqm AQM, d time.Duration, ecn ...Codepoint) (l *ManagedLink, out []Departure) {
	l = NewManagedLink(LinkConfig{Rate: 12e6, AQM: aqm, Seed: 5}, start)
	for i := range int(2 * d / ms) {
		now := start.Add(time.Duration(i) * ms / 2)
		l.Enqueue(now, 0, 1500, 0, ecn[i%len(ecn)])
		out = append(out, l.Advance(now)...)
	}
	return l, out
}

// RFC 8289 §3: the first signal after an interval above the target, the nth after
// it interval / sqrt(n) after the one before.
func TestCoDelSignalsFasterWithTheSquareRootOfTheirNumber(t *testing.T) {
	_, out := flood(CoDel, 3*time.Second, ECT0)
	var marks []cc.Time
	for _, d := range out {
		require.Equal(t, DropNone, d.Dropped, "what can be marked is not dropped")
		if d.Marked {
			marks = append(marks, d.Departs)
		}
	}
	require.Greater(t, len(marks), 40)
	assert.InDelta(t, 110, float64(marks[0].Sub(start))/1e6, 5, "ms: 10 ms until packets stand for 5")
	for n := 1; n < len(marks); n++ {
		gap := float64(marks[n].Sub(marks[n-1])) / 1e6
		assert.InDelta(t, 100/math.Sqrt(float64(n)), gap, 1.01, "ms, signal %d", n+1)
	}
}

func TestCoDelDropsWhatCannotBeMarked(t *testing.T) {
	_, out := flood(CoDel, time.Second, NotECT)
	dropped := 0
	for _, d := range out {
		assert.False(t, d.Marked)
		if d.Dropped == DropQueue {
			dropped++
		}
	}
	assert.Greater(t, dropped, 10)
}

// L4S packets are marked by how long they waited (RFC 9332 §2.5.1.1 and appendix A.1).
func TestTheL4SQueueMarksFromOneMillisecondOn(t *testing.T) {
	for _, tt := range []struct {
		waited time.Duration
		behind cc.Bytes
		part   float64
	}{
		{700 * time.Microsecond, 9000, 0},
		{time.Millisecond, 9000, 0.5},
		{1300 * time.Microsecond, 9000, 1},
		{50 * time.Millisecond, 0, 0},
	} {
		assert.InDelta(t, tt.part, marked(&dualPI2{}, l4sLane, tt.waited, tt.behind), 0.02, "%v", tt)
	}
}

// marked is the part of packets that d signals.
func marked(d *dualPI2, lane int, waited time.Duration, behind cc.Bytes) float64 {
	d.rng = rand.New(rand.NewPCG(1, 1))
	l := newLanes(2)
	l.each[lane].bytes = behind
	n := 0
	const of = 100_000
	for range of {
		if d.judge(start.Add(waited), lane, waitingPacket{at: start, size: 1500}, &l) != passes {
			n++
		}
	}
	return float64(n) / of
}

// RFC 9332 §2.1, equation 1: classic packets signal with the square of the base
// probability, L4S packets with k = 2 times it.
func TestDualPI2CouplesTheSquareRoot(t *testing.T) {
	for _, p := range []float64{0.05, 0.1, 0.2, 0.4} {
		assert.InDelta(t, p*p, marked(&dualPI2{p: p}, classicLane, 0, 0), 0.005)
		assert.InDelta(t, 2*p, marked(&dualPI2{p: p}, l4sLane, 0, 0), 0.005)
	}
}

// The PI controller (RFC 9332 appendix A.1): it rests at its target, and steps by
// alpha for what is off it and by beta for what has changed.
func TestDualPI2Steps(t *testing.T) {
	d := &dualPI2{p: 0.1, before: dualTarget}
	l := newLanes(2)
	l.push(classicLane, waitingPacket{at: start})
	d.updates = start.Add(15 * ms)
	d.settle(start.Add(20*ms), &l)
	assert.InDelta(t, 0.1, d.p, 1e-12, "at the target")
	d.settle(start.Add(30*ms), &l)
	assert.InDelta(t, 0.1+0.15*0.015+3*0.015, d.p, 1e-12, "at twice the target, 15 ms later")
}

func TestAnEmptyDualPI2Forgets(t *testing.T) {
	d := &dualPI2{}
	l := newLanes(2)
	d.settle(start, &l)
	d.p, d.before = 1, 1
	d.settle(start.Add(24*time.Hour), &l)
	assert.Zero(t, d.p)
	assert.Greater(t, d.updates, start.Add(24*time.Hour))
}

// RFC 9332 §4.1.1: L4S packets go first, and classic ones wait no more than 50 ms longer.
func TestDualPI2ServesL4SFirst(t *testing.T) {
	l := newLanes(2)
	l.push(classicLane, waitingPacket{at: start})
	l.push(l4sLane, waitingPacket{at: start.Add(49 * ms)})
	d := &dualPI2{}
	assert.Equal(t, l4sLane, d.pick(start.Add(60*ms), &l))
	l.each[l4sLane].At(0).at = start.Add(51 * ms)
	assert.Equal(t, classicLane, d.pick(start.Add(60*ms), &l))
	l.pop(classicLane)
	assert.Equal(t, l4sLane, d.pick(start.Add(60*ms), &l))
}

// RFC 9332 §2.5.1.3 and §4.2: who does not answer gets drops, in both queues.
func TestDualPI2DropsUnderOverload(t *testing.T) {
	for _, ecn := range []Codepoint{NotECT, ECT0, ECT1, CE} {
		l, out := flood(DualPI2, 10*time.Second, ecn)
		drops := 0
		for _, d := range out[len(out)/2:] {
			if d.Dropped == DropQueue {
				drops++
			}
		}
		assert.InDelta(t, 0.5, float64(drops)/float64(len(out)/2), 0.05, "codepoint %d: half of it is too much", ecn)
		_, packets := l.Backlog(start.Add(10*time.Second), 0)
		assert.Less(t, packets, 60, "codepoint %d: about 15 ms of them", ecn)
	}
}

func TestDualPI2KeepsWhatAnswersMarksInProportionShort(t *testing.T) {
	_, out := flood(DualPI2, 10*time.Second, ECT0, ECT1)
	var waits [2]int
	for _, d := range out[len(out)/2:] {
		waits[d.Lane]++
	}
	assert.InDelta(t, 1, float64(waits[classicLane])/float64(waits[l4sLane]), 0.2, "neither starves")
}

func TestAManagedLinkAllocatesNothing(t *testing.T) {
	for _, aqm := range []AQM{CoDel, DualPI2, PIE, FQCoDel} {
		l := NewManagedLink(LinkConfig{Rate: 12e6, AQM: aqm, QueuePackets: 100, Loss: 0.01}, start)
		now := start
		send := func() {
			now = now.Add(ms / 2)
			l.Enqueue(now, 0, 1500, 0, ECT1)
			l.Advance(now)
		}
		for range 1000 {
			send()
		}
		require.Zero(t, testing.AllocsPerRun(10_000, send), aqm)
	}
}

// A Cubic flow meets the delay that the queue is made for.
func TestCubicKeepsAManagedQueueAtItsTarget(t *testing.T) {
	for _, tt := range []struct {
		aqm  AQM
		most time.Duration // mean waiting time
	}{{CoDel, 10 * ms}, {DualPI2, 20 * ms}, {PIE, 22 * ms}, {FQCoDel, 10 * ms}} {
		for _, ecn := range []ECN{ECNClassic, ECNOff} {
			r := play(t, Scenario{
				Down: LinkConfig{Rate: 24e6, Delay: 20 * ms, QueueBytes: 2000000, AQM: tt.aqm},
				Up:   LinkConfig{Delay: 20 * ms}, Flows: []FlowConfig{{Algorithm: "cubic", ECN: ecn}},
				Duration: 30 * time.Second, Warmup: 5 * time.Second,
			})
			assert.GreaterOrEqual(t, r.Utilisation, 0.9, "%s, ecn %s", tt.aqm, ecn)
			assert.LessOrEqual(t, r.Queueing.Mean, tt.most, "%s, ecn %s", tt.aqm, ecn)
			assert.Equal(t, ecn == ECNOff, r.Drops > 0, "%s, ecn %s: %d drops", tt.aqm, ecn, r.Drops)
		}
	}
}

// RFC 8033: what does not answer is dropped as far as it is too much, and the burst at the
// start passes.
func TestPIEDropsWhatIsTooMuch(t *testing.T) {
	_, out := flood(PIE, 20*time.Second, NotECT)
	for i, d := range out {
		if d.Dropped == DropQueue {
			require.Fail(t, "served packets are not dropped", "%d", i)
		}
	}
	l := NewManagedLink(LinkConfig{Rate: 12e6, AQM: PIE, Seed: 5}, start)
	drops, marks := 0, 0
	const packets = 40_000 // of 20 s, twice of what the link carries
	for i := range packets {
		now := start.Add(time.Duration(i) * ms / 2)
		drop := dropOf(l, now, 0, 1500, ECT0)
		for _, d := range l.Advance(now) {
			if d.Marked {
				marks++
			}
		}
		if drop == DropQueue {
			assert.Greater(t, now, start.Add(pieBurst), "the burst passes")
			if drops++; i > packets/2 {
				_, waiting := l.Backlog(now, 0)
				assert.Less(t, waiting, 200)
			}
		}
	}
	assert.Positive(t, marks, "while the probability is small")
	assert.InDelta(t, 0.5, float64(drops)/packets, 0.05, "marks do not help any more")
}

// RFC 8033 section 5.5: from a tenth on, the probability rises by no more than 2 % at a time. Linux adds as much
// where packets wait for more than 250 ms.
func TestPIERaisesItsProbabilityBySteps(t *testing.T) {
	for _, c := range []struct {
		p, waited, before float64
		want              float64
	}{
		{0.05, 0.3, 0.02, 0.05 + (0.125*0.285+1.25*0.28)/2 + 0.02},
		{0.05, 0.1, 0.02, 0.05 + (0.125*0.085+1.25*0.08)/2},
		{0.2, 0.2, 0.02, 0.22},
		{0.2, 0.3, 0.02, 0.24},
		{0.2, 0.02, 0.1, 0.2 + 0.125*0.005 - 1.25*0.08},
	} {
		now := start.Add(time.Second)
		d := pie{p: c.p, before: c.before, updates: now}
		all := newLanes(1)
		all.push(0, waitingPacket{size: 1500, at: now.Add(-time.Duration(c.waited * float64(time.Second)))})
		d.settle(now, &all)
		assert.InDelta(t, c.want, d.p, 1e-6, "%+v", c)
	}
}

// RFC 8290: flows take turns, however much each offers, and one that sends little does
// not wait behind the others.
func TestFQCoDelHasFlowsTakeTurns(t *testing.T) {
	l := NewManagedLink(LinkConfig{Rate: 12e6, AQM: FQCoDel, QueuePackets: 1000}, start)
	sent := map[int]cc.Bytes{}
	lanes := map[int]uint32{}
	var waited time.Duration // of flow 3, which sends little
	var came cc.Time
	for i := range 20_000 { // 10 s
		now := start.Add(time.Duration(i) * ms / 2)
		put := func(flow uint32, size cc.Bytes) {
			lane, v, _ := l.Enqueue(now, 0, size, flow, NotECT)
			if v.Dropped == DropNone {
				lanes[lane] = flow
			}
		}
		put(1, 1500)
		if i%2 == 0 {
			put(2, 750)
			put(2, 750)
		}
		if i%100 == 99 {
			came = now
			put(3, 200)
		}
		for _, d := range l.Advance(now) {
			if d.Dropped == DropNone {
				sent[d.Lane] += d.Size
				if lanes[d.Lane] == 3 {
					waited = max(waited, d.Departs.Sub(came))
				}
			}
		}
		_, packets := l.Backlog(now, 0)
		require.LessOrEqual(t, packets, 1000)
	}
	byFlow := map[uint32]cc.Bytes{}
	for lane, n := range sent {
		byFlow[lanes[lane]] += n
	}
	require.Len(t, byFlow, 3)
	assert.InEpsilon(t, float64(byFlow[1]), float64(byFlow[2]), 0.02, "half each")
	assert.LessOrEqual(t, waited, 4*ms, "a packet of each other flow at most")
	assert.GreaterOrEqual(t, byFlow[3], cc.Bytes(199*200), "all but the last, which has just come")
}
