package sim

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

const (
	ms    = time.Millisecond
	start = cc.Time(time.Second)
)

// departures sends packets and returns, in milliseconds from the start, when
// each leaves; -1 for one that is dropped.
func departures(l *Link, at []float64, sizes ...cc.Bytes) []float64 {
	var out []float64
	for i, size := range sizes {
		v := l.Send(start.Add(time.Duration(at[min(i, len(at)-1)]*1e6)), size)
		if v.Dropped != DropNone {
			out = append(out, -1)
			continue
		}
		out = append(out, float64(v.Departs.Sub(start))/1e6)
	}
	return out
}

func TestLinkAtAFixedRate(t *testing.T) {
	l := NewLink(LinkConfig{Rate: 12_000_000, Delay: 20 * ms}, start)
	assert.Equal(t, []float64{1, 2, 2.5}, departures(l, []float64{0}, 1500, 1500, 750))
	assert.Equal(t, []float64{11}, departures(l, []float64{10}, 1500), "an idle link starts at once")
	v := l.Send(start.Add(20*ms), 1500)
	assert.Equal(t, start.Add(41*ms), v.Arrives)
	assert.EqualValues(t, 15_000, l.Offered(0, start, start.Add(10*ms)))
}

func TestLinkRoundsOncePerBusyPeriod(t *testing.T) {
	l := NewLink(LinkConfig{Rate: 7_000_000_000}, start)
	var last Verdict
	for range 700_000 {
		last = l.Send(start, 1500)
	}
	assert.Equal(t, 1200*ms, last.Departs.Sub(start))
}

func TestLinkWithoutARate(t *testing.T) {
	l := NewLink(LinkConfig{Delay: 5 * ms, QueuePackets: 1}, start)
	for range 3 {
		assert.Equal(t, Verdict{Departs: start, Arrives: start.Add(5 * ms)}, l.Send(start, 1500))
	}
	assert.Zero(t, l.Offered(0, start, start.Add(ms)))
}

func TestLinkPlaysATrace(t *testing.T) {
	for _, c := range []struct {
		what  string
		trace string
		at    []float64
		sizes []cc.Bytes
		want  []float64
	}{
		{"a packet takes the next opportunity", "3\n5\n", []float64{0}, []cc.Bytes{1500, 1500}, []float64{3, 5}},
		{
			"the file repeats from its last line on", "3\n5\n",
			[]float64{0},
			[]cc.Bytes{1500, 1500, 1500, 1500},
			[]float64{3, 5, 8, 10},
		},
		{"one line that says 1 is 12 Mbit/s", "1\n", []float64{0}, []cc.Bytes{1500, 1500, 1500}, []float64{1, 2, 3}},
		{
			"a line that repeats sends two packets at once", "2\n2\n4\n",
			[]float64{0},
			[]cc.Bytes{1500, 1500, 1500},
			[]float64{2, 2, 4},
		},
		{
			"small packets share an opportunity", "2\n4\n",
			[]float64{0},
			[]cc.Bytes{500, 500, 500, 500},
			[]float64{2, 2, 2, 4},
		},
		{
			"a packet spans what is left of one and the next", "2\n4\n",
			[]float64{0},
			[]cc.Bytes{1000, 1000, 1000},
			[]float64{2, 4, 4},
		},
		{"a big packet needs several", "2\n4\n6\n", []float64{0}, []cc.Bytes{4000, 500}, []float64{6, 6}},
		{"opportunities that find nobody are lost", "1\n", []float64{0, 7.5}, []cc.Bytes{1500, 1500}, []float64{1, 8}},
		{"so is what one packet left over", "2\n4\n", []float64{0, 3}, []cc.Bytes{500, 500}, []float64{2, 4}},
		{"one comes too late at the very moment", "2\n4\n", []float64{2}, []cc.Bytes{500}, []float64{4}},
		{
			"an outage holds all back", "1\n2\n500\n",
			[]float64{1.5},
			[]cc.Bytes{1500, 1500, 1500},
			[]float64{2, 500, 501},
		},
	} {
		l := NewLink(LinkConfig{Trace: readTrace(t, c.trace)}, start)
		assert.Equal(t, c.want, departures(l, c.at, c.sizes...), c.what)
	}
}

func TestLinkDropsAtTheTail(t *testing.T) {
	t.Run("by packets, with the one that is being sent", func(t *testing.T) {
		l := NewLink(LinkConfig{Rate: 12_000_000, QueuePackets: 2}, start)
		assert.Equal(t, []float64{1, 2, -1}, departures(l, []float64{0}, 1500, 1500, 40))
		assert.Equal(t, []float64{3, -1}, departures(l, []float64{1}, 1500, 1500), "one has left")
	})
	t.Run("by bytes, and a small packet may still fit", func(t *testing.T) {
		l := NewLink(LinkConfig{Rate: 12_000_000, QueueBytes: 3100}, start)
		assert.Equal(t, []float64{1, 2, -1}, departures(l, []float64{0}, 1500, 1500, 1500))
		bytes, packets := l.Backlog(start, 0)
		assert.EqualValues(t, 3000, bytes)
		assert.Equal(t, 2, packets)
		assert.Equal(t, Verdict{Departs: start.Add(2*ms + ms/20), Arrives: start.Add(2*ms + ms/20)}, l.Send(start, 75))
	})
	l := NewLink(LinkConfig{Rate: 12_000_000, QueuePackets: 1}, start)
	l.Send(start, 1500)
	assert.Equal(t, Verdict{Dropped: DropQueue}, l.Send(start, 1500))
}

func TestLinkLosesAtRandom(t *testing.T) {
	draw := func(seed uint64) (lost []int) {
		l := NewLink(LinkConfig{Loss: 0.1, Seed: seed}, start)
		for i := range 10_000 {
			if l.Send(start, 1500).Dropped == DropLoss {
				lost = append(lost, i)
			}
		}
		return lost
	}
	assert.InDelta(t, 1000, len(draw(1)), 100)
	assert.Equal(t, draw(1), draw(1))
	assert.NotEqual(t, draw(1), draw(2))
}

func TestLinkReordersAtRandom(t *testing.T) {
	l := NewLink(LinkConfig{Rate: 12_000_000, Delay: 20 * ms, Reorder: 0.1, ReorderBy: 5 * ms}, start)
	late := 0
	for range 10_000 {
		v := l.Send(start, 1500)
		switch v.Arrives.Sub(v.Departs) {
		case 25 * ms:
			late++
		default:
			assert.Equal(t, 20*ms, v.Arrives.Sub(v.Departs))
		}
	}
	assert.InDelta(t, 1000, late, 100)
}

func TestLinkOffers(t *testing.T) {
	l := NewLink(LinkConfig{Trace: readTrace(t, "2\n2\n5\n")}, start)
	for _, c := range []struct {
		from, to time.Duration
		packets  cc.Bytes
	}{
		{0, 0, 0},
		{0, 2 * ms, 0},
		{0, 2*ms + 1, 2},
		{2 * ms, 5 * ms, 2},
		{0, 50 * ms, 29},
		{0, 50*ms + 1, 30},
		{-100 * ms, 6 * ms, 3},
		{9 * ms, 6 * ms, 0},
	} {
		assert.Equal(t, c.packets*1500, l.Offered(0, start.Add(c.from), start.Add(c.to)), "%v to %v", c.from, c.to)
	}
}

func TestLinkTakesAClockThatGoesBackForStanding(t *testing.T) {
	l := NewLink(LinkConfig{Rate: 12_000_000}, start)
	l.Send(start.Add(10*ms), 1500)
	assert.Equal(t, start.Add(12*ms), l.Send(start, 1500).Departs)
}

// player plays a trace one millisecond after the other, as Mahimahi's link
// shell does: what Link computes in advance must come to the same.
type player struct {
	trace  *Trace
	next   int64
	queue  []int // packets waiting, by number
	left   cc.Bytes
	sizes  []cc.Bytes
	leaves []time.Duration
}

func (p *player) send(now time.Duration, size cc.Bytes) {
	p.until(now)
	if len(p.queue) == 0 {
		p.left = size
	}
	p.queue = append(p.queue, len(p.sizes))
	p.sizes = append(p.sizes, size)
	p.leaves = append(p.leaves, -1)
}

func (p *player) until(now time.Duration) {
	for ; p.trace.at(p.next) <= now; p.next++ {
		for budget := OpportunityBytes; budget > 0 && len(p.queue) > 0; {
			n := min(budget, p.left)
			budget -= n
			if p.left -= n; p.left > 0 {
				continue
			}
			p.leaves[p.queue[0]] = p.trace.at(p.next)
			if p.queue = p.queue[1:]; len(p.queue) > 0 {
				p.left = p.sizes[p.queue[0]]
			}
		}
	}
}

func TestLinkPlaysATraceLikeMahimahi(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var times []int64
		for range rapid.IntRange(1, 20).Draw(t, "lines") {
			last := int64(0)
			if len(times) > 0 {
				last = times[len(times)-1]
			}
			times = append(times, last+rapid.Int64Range(0, 5).Draw(t, "gap"))
		}
		times = append(times, times[len(times)-1]+1)
		trace := &Trace{times: times}
		model := &player{trace: trace}
		l := NewLink(LinkConfig{Trace: trace}, start)

		now := time.Duration(0)
		var got []time.Duration
		for range rapid.IntRange(1, 60).Draw(t, "packets") {
			now += time.Duration(rapid.IntRange(0, 8).Draw(t, "wait")) * ms / 2
			size := cc.Bytes(rapid.IntRange(40, 4000).Draw(t, "size"))
			model.send(now, size)
			got = append(got, l.Send(start.Add(now), size).Departs.Sub(start))
			var bytes cc.Bytes
			for _, i := range model.queue {
				bytes += model.sizes[i]
			}
			b, n := l.Backlog(start.Add(now), 0)
			if n != len(model.queue) || b != bytes {
				t.Fatalf("at %v: backlog is %d bytes in %d packets, but should be %d in %d", now, b, n, bytes,
					len(model.queue))
			}
		}
		model.until(now + time.Hour)
		for i := range got {
			if got[i] != model.leaves[i] {
				t.Fatalf("packet %d leaves at %v, but should at %v", i, got[i], model.leaves[i])
			}
		}
	})
}

func TestLinkSendAllocatesNothing(t *testing.T) {
	for name, cfg := range map[string]LinkConfig{
		"rate":  {Rate: 12_000_000, QueuePackets: 100, Loss: 0.01},
		"trace": {Trace: readTrace(t, "1\n2\n9\n"), QueueBytes: 150_000},
	} {
		l := NewLink(cfg, start)
		now := start
		send := func() {
			now = now.Add(ms / 2)
			l.Send(now, 1500)
		}
		for range 1000 {
			send()
		}
		require.Zero(t, testing.AllocsPerRun(10_000, send), name)
	}
}

func BenchmarkLinkSend(b *testing.B) {
	for name, cfg := range map[string]LinkConfig{
		"rate":  {Rate: 12_000_000, QueuePackets: 100},
		"trace": {Trace: readTrace(b, "1\n2\n9\n"), QueuePackets: 100},
	} {
		b.Run(name, func(b *testing.B) {
			l := NewLink(cfg, start)
			now := start
			for b.Loop() {
				now = now.Add(ms / 2)
				l.Send(now, 1500)
			}
		})
	}
}
