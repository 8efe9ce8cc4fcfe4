//go:build linux

package e2e

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

var (
	here  = netip.MustParseAddrPort("10.77.1.1:80")
	there = netip.MustParseAddrPort("10.77.1.2:50123")
)

// tape is a record made by hand: segments of 1000 bytes, a packet each
// millisecond, the first sequence number just below the wrap.
type tape struct {
	packets []Packet
	now     time.Duration
}

const tapeBase = 0xffffff00

func seqOf(segment int) uint32 { return tapeBase + uint32(segment)*1000 }

func (r *tape) put(p Packet) {
	r.now += time.Millisecond
	p.At = r.now
	r.packets = append(r.packets, p)
}

func (r *tape) send(segments ...int) {
	for _, n := range segments {
		r.put(Packet{
			Out: true, Src: here, Dst: there, Seq: seqOf(n), Acks: true, Payload: 1000,
			Size: 1052,
		})
	}
}

// ack acknowledges all below segment next, and selectively the given runs.
func (r *tape) ack(next int, runs ...[2]int) {
	p := Packet{Src: there, Dst: here, Ack: seqOf(next), Acks: true, Size: 52}
	for _, run := range runs {
		p.SACK = append(p.SACK, SACKBlock{Left: seqOf(run[0]), Right: seqOf(run[1])})
	}
	r.put(p)
}

func (r *tape) sending() Sending { return SendingTo(r.packets, netip.AddrPort{}, there) }

func TestInFlight(t *testing.T) {
	first10 := func(r *tape) { r.send(0, 1, 2, 3, 4, 5, 6, 7, 8, 9) }
	for name, c := range map[string]struct {
		play           func(*tape)
		inflight, pipe cc.Bytes // in segments
	}{
		"what is sent is in flight":             {first10, 10, 10},
		"until it is acknowledged":              {func(r *tape) { first10(r); r.ack(4) }, 6, 6},
		"an acknowledgement that is overtaken":  {func(r *tape) { first10(r); r.ack(4); r.ack(2) }, 6, 6},
		"or selectively acknowledged":           {func(r *tape) { first10(r); r.ack(0, [2]int{4, 5}, [2]int{1, 2}) }, 8, 8},
		"two SACKed segments tell of no loss":   {func(r *tape) { first10(r); r.ack(0, [2]int{1, 3}) }, 8, 8},
		"three SACKed segments do":              {func(r *tape) { first10(r); r.ack(0, [2]int{1, 4}) }, 7, 6},
		"and so do three runs of any size":      {func(r *tape) { first10(r); r.ack(0, [2]int{5, 6}, [2]int{3, 4}, [2]int{1, 2}) }, 7, 6},
		"what is sent again is in flight again": {func(r *tape) { first10(r); r.ack(0, [2]int{1, 4}); r.send(0) }, 7, 7},
		"until that is acknowledged":            {func(r *tape) { first10(r); r.ack(0, [2]int{1, 4}); r.send(0); r.ack(4) }, 6, 6},
		"a second hole is lost by itself":       {func(r *tape) { first10(r); r.ack(0, [2]int{2, 3}); r.ack(0, [2]int{4, 7}, [2]int{2, 3}) }, 6, 3},
		"a timer that fires shows once more":    {func(r *tape) { first10(r); r.send(0) }, 10, 11},
		"what was SACKed stays SACKed":          {func(r *tape) { first10(r); r.ack(0, [2]int{8, 10}); r.ack(2) }, 6, 6},
		"a duplicate that was told of (D-SACK)": {func(r *tape) { first10(r); r.ack(5); r.ack(5, [2]int{2, 3}) }, 5, 5},
		"the FIN is no byte": {func(r *tape) {
			first10(r)
			r.ack(10)
			r.put(Packet{Src: there, Dst: here, Ack: seqOf(10) + 1, Acks: true})
		}, 0, 0},
		"another connection": {func(r *tape) {
			first10(r)
			r.put(Packet{Out: true, Src: here, Dst: here, Payload: 9})
		}, 10, 10},
		"the other direction's data": {func(r *tape) {
			first10(r)
			r.put(Packet{Src: there, Dst: here, Ack: seqOf(1), Acks: true, Payload: 500})
		}, 9, 9},
	} {
		t.Run(name, func(t *testing.T) {
			var r tape
			c.play(&r)
			s := r.sending()
			require.NotEmpty(t, s.Steps)
			last := s.Steps[len(s.Steps)-1]
			assert.Equal(t, cc.Bytes(1000), s.MSS)
			assert.Equal(t, c.inflight*1000, last.Inflight)
			assert.Equal(t, c.pipe*1000, last.Pipe)
		})
	}
}

// TestInFlightAgainstAModel keeps one note per segment where the scoreboard
// keeps runs.
func TestInFlightAgainstAModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var r tape
		var sent, una int
		sacked, again := map[int]bool{}, map[int]bool{}
		r.send(0)
		sent = 1
		t.Repeat(map[string]func(*rapid.T){
			"send": func(*rapid.T) { r.send(sent); sent++ },
			"send again": func(t *rapid.T) {
				if una < sent {
					n := rapid.IntRange(una, sent-1).Draw(t, "segment")
					r.send(n)
					again[n] = true
				}
			},
			"acknowledge": func(t *rapid.T) {
				una = rapid.IntRange(una, sent).Draw(t, "up to")
				r.ack(una)
			},
			"acknowledge selectively": func(t *rapid.T) {
				lo := rapid.IntRange(0, sent-1).Draw(t, "left")
				hi := rapid.IntRange(lo+1, sent).Draw(t, "right")
				r.ack(una, [2]int{lo, hi})
				for n := lo; n < hi; n++ {
					sacked[n] = true
				}
			},
			"": func(t *rapid.T) {
				inflight, pipe, above, runs := 0, 0, 0, 0
				for n := sent - 1; n >= una; n-- {
					if sacked[n] {
						above++
						if n == sent-1 || !sacked[n+1] {
							runs++
						}
						continue
					}
					inflight++
					if above <= 2 && runs < 3 {
						pipe++
					}
					if again[n] {
						pipe++
					}
				}
				s := r.sending()
				last := s.Steps[len(s.Steps)-1]
				if last.Inflight != cc.Bytes(inflight*1000) || last.Pipe != cc.Bytes(pipe*1000) ||
					last.Acked != cc.Bytes(una*1000) {
					t.Fatalf("%d sent, %d acknowledged: in flight %d, pipe %d; the model says %d000 and %d000",
						sent, una, last.Inflight, last.Pipe, inflight, pipe)
				}
			},
		})
	})
}

func TestSpans(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s spans
		model := map[int64]bool{}
		lo := int64(0)
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				a, b := rapid.Int64Range(lo, 60).Draw(t, "lo"), rapid.Int64Range(lo, 60).Draw(t, "hi")
				s.add(span{a, b})
				for i := a; i < b; i++ {
					model[i] = true
				}
			},
			"trim": func(t *rapid.T) {
				lo = rapid.Int64Range(lo, 60).Draw(t, "below")
				s.trim(lo)
				for i := range lo {
					delete(model, i)
				}
			},
			"": func(t *rapid.T) {
				assert.Equal(t, int64(len(model)), s.size())
				w := span{rapid.Int64Range(0, 60).Draw(t, "from"), rapid.Int64Range(0, 60).Draw(t, "to")}
				n := int64(0)
				for i := w.lo; i < w.hi; i++ {
					if model[i] {
						n++
					}
				}
				assert.Equal(t, n, s.within(w))
				for i := range s {
					assert.Less(t, s[i].lo, s[i].hi)
					assert.True(t, i == 0 || s[i-1].hi < s[i].lo, "apart and in order")
				}
			},
		})
	})
}

func TestARecordThatBeginsMidway(t *testing.T) {
	var r tape
	r.ack(3) // whose data nobody saw
	r.send(5, 6)
	r.ack(5)
	r.ack(6)
	s := r.sending()
	require.Len(t, s.Steps, 4, "before the first data nothing is known")
	assert.Equal(t, cc.Bytes(1000), s.Steps[3].Inflight)
	assert.Empty(t, SendingTo(nil, here, there).Steps)
	_, sent := Sending{}.First()
	assert.False(t, sent)
}

func TestALongStreamWrapsAround(t *testing.T) {
	var r tape
	const segment = 60_000
	for i := range uint64(200_000) { // 12 GB, sent and acknowledged one by one
		seq := uint32(i * segment)
		r.put(Packet{Out: true, Src: here, Dst: there, Seq: seq, Payload: segment})
		r.put(Packet{Src: there, Dst: here, Ack: seq + segment, Acks: true})
	}
	s := r.sending()
	last := s.Steps[len(s.Steps)-1]
	assert.Equal(t, cc.Bytes(200_000*segment), last.Acked)
	assert.Zero(t, last.Inflight)
	assert.Empty(t, s.Again())
}

func TestGaps(t *testing.T) {
	var r tape
	r.send(0, 1)
	r.now += 9 * time.Millisecond
	r.send(2)
	r.ack(1)
	r.send(1)
	gaps := r.sending().Gaps()
	require.Len(t, gaps, 3)
	assert.Equal(t, Gap{At: 2 * time.Millisecond, Length: time.Millisecond, Payload: 1000, Size: 1052}, gaps[0])
	assert.Equal(t, 10*time.Millisecond, gaps[1].Length)
	assert.Equal(t, 2*time.Millisecond, gaps[2].Length,
		"acknowledgements in between do not count, packets sent again do")

	assert.InDelta(t, 1, gaps[0].Against(8_000_000, 1000), 1e-9, "1000 bytes at 8 Mbit/s take a millisecond")
	assert.InDelta(t, 2.5, gaps[1].Against(2_000_000, 1000), 1e-9)
	assert.Zero(t, gaps[0].Against(0, 1000))
	assert.Empty(t, Sending{}.Gaps())
}

func TestBetween(t *testing.T) {
	var r tape
	r.send(0, 1, 2, 3)
	s := r.sending()
	part := s.Between(2*time.Millisecond, 4*time.Millisecond)
	require.Len(t, part.Steps, 2)
	assert.Equal(t, 2*time.Millisecond, part.Steps[0].At)
	assert.Equal(t, cc.Bytes(2000), part.Steps[0].Inflight, "levels are those of the whole record")
	assert.Empty(t, s.Between(time.Second, 0).Steps)
	first, ok := part.First()
	assert.True(t, ok)
	assert.Equal(t, 2*time.Millisecond, first)
}

func TestLevelsCountTimeAndNotPackets(t *testing.T) {
	var r tape
	r.send(0, 1, 2, 3) // a millisecond each
	r.now += 95 * time.Millisecond
	r.ack(3)
	inflight, pipe := r.sending().Levels()
	assert.Equal(t, Level{P50: 4000, P95: 4000, Max: 4000}, inflight)
	assert.Equal(t, inflight, pipe)

	r = tape{}
	r.send(0)
	r.now += 899 * time.Millisecond
	r.send(1)
	r.now += 99 * time.Millisecond
	r.send(2)
	inflight, _ = r.sending().Levels()
	assert.Equal(t, Level{P50: 1000, P95: 2000, Max: 3000}, inflight)
	inflight, _ = Sending{}.Levels()
	assert.Zero(t, inflight)
}
