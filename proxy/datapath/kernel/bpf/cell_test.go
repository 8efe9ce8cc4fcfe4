//go:build linux

package bpf

import (
	"math"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestASocketTellsWhereItStandsAtOnce(t *testing.T) {
	c := open(t, Config{Cells: 1})
	sender, receiver := connect(t)
	pass(t, sender, receiver, 50_000) // is no part of it
	until(t, "all of it is acknowledged", func() bool { return info(t, sender).Unacked == 0 })
	deafen(t, receiver)
	_, err := sender.Write(make([]byte, 10))
	require.NoError(t, err)
	was := info(t, sender)

	l := bind(t, c, sender, receiver)
	var s Seen
	require.True(t, l.Read(&s))
	assert.EqualValues(t, was.Snd_cwnd, s.Cwnd, "the window is what it was")
	assert.EqualValues(t, was.Snd_mss, s.Mss)
	assert.EqualValues(t, was.Snd_wnd, s.SndWnd)
	assert.InDelta(t, was.Rtt, s.SrttUs, 1)
	assert.EqualValues(t, 0, s.Acked)
	assert.EqualValues(t, 10, s.Sent)
	assert.EqualValues(t, 10, s.End)
	assert.EqualValues(t, 1, s.PacketsOut)
	for name, count := range map[string]uint32{
		"acks": s.Acks, "delivered": s.Delivered, "lost": s.Lost, "marked": s.Marked, "timeouts": s.Timeouts,
		"fallbacks": s.Fallbacks, "in fallback": s.InFallback, "samples": s.Samples,
	} {
		assert.Zero(t, count, name)
	}
}

func TestNoMoreIsOutstandingThanTheWindow(t *testing.T) {
	c := open(t, Config{Cells: 1})
	l := bound(t, c)
	for _, window := range []uint32{20, 40, 5, 2, 13} {
		bytes := window*l.reading(t).Mss + 1
		first := l.apply(t, bytes, 0)
		checked := 0
		l.transfer(t, 1<<20, func(s Seen) {
			if s.Acks != first.Acks {
				onTime(t, s)
				require.Equal(t, window, s.Cwnd)
				require.LessOrEqual(t, s.PacketsOut-s.SackedOut-s.LostOut+s.RetransOut, window)
				i := info(t, l.sender)
				require.LessOrEqual(t, i.Unacked-i.Sacked-i.Lost+i.Retrans, window)
				checked++
			}
			l.apply(t, bytes, 0)
		})
		assert.Positive(t, checked)
	}
}

func TestAWindowIsInForceWithoutAnAcknowledgement(t *testing.T) {
	c := open(t, Config{Cells: 1})
	l := bound(t, c)
	l.pass(t, 10_000)
	l.settled(t)
	deafen(t, l.receiver)
	// While something is underway the kernel waits for an acknowledgement with
	// the last third of a window.
	for _, step := range []struct {
		window, least, most uint32
		write               int
	}{
		{3, 3, 3, 45_000},
		{12, 8, 12, 1},
		{4, 8, 12, 1}, // what is out is out
		{24, 16, 24, 1},
	} {
		before := l.window(t, step.window)
		require.NoError(t, produce(l.sender, step.write))
		i := info(t, l.sender)
		if l.reading(t).Timeouts > 0 {
			t.Skip("this machine stood still for long enough for a retransmission timeout")
		}
		assert.GreaterOrEqual(t, i.Unacked, step.least, "a window of %d", step.window)
		assert.LessOrEqual(t, i.Unacked, step.most, "a window of %d", step.window)
		assert.Equal(t, step.window, i.Snd_cwnd)
		assert.Equal(t, before.Acks, l.reading(t).Acks, "nobody answered")
	}
}

// TestANodelayPutsALargerWindowIntoForce: nothing comes back, and nothing is written.
func TestANodelayPutsALargerWindowIntoForce(t *testing.T) {
	c := open(t, Config{Cells: 1})
	l := bound(t, c)
	l.pass(t, 10_000)
	l.settled(t)
	deafen(t, l.sender)
	before := l.window(t, 10)
	require.NoError(t, produce(l.sender, 50*segment))
	require.EqualValues(t, 10, info(t, l.sender).Unacked)
	for _, window := range []uint32{20, 40} {
		l.window(t, window)
		on(t, l.sender, func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) })
		i := info(t, l.sender)
		if i.Total_rto > 0 {
			t.Skip("this machine stood still for long enough for a retransmission timeout")
		}
		assert.Equal(t, window, i.Snd_cwnd)
		assert.LessOrEqual(t, i.Unacked, window)
		assert.Greater(t, i.Unacked, window*2/3-1, "the kernel may keep the last third of a window for later")
	}
	assert.Equal(t, before.Acks, l.reading(t).Acks, "nothing came back")
}

func TestARateIsInForceWithTheWindow(t *testing.T) {
	c := open(t, Config{Cells: 1})
	l := bound(t, c)
	for rate, want := range map[uint64]uint64{7_654_321: 7_654_321, 0: math.MaxUint64} {
		s := l.apply(t, 10*l.reading(t).Mss, rate)
		l.transfer(t, 10*int(s.Mss), func(Seen) {})
		onTime(t, l.reading(t))
		assert.EqualValues(t, want, info(t, l.sender).Pacing_rate)
	}
}

func TestAFullTableLeavesTheSocketAsItIs(t *testing.T) {
	c := open(t, Config{Cells: 2})
	first, second := bound(t, c), bound(t, c)
	assert.NotEqual(t, first.Index(), second.Index())
	sender, receiver := connect(t)
	was := controlOf(t, sender)
	for range 3 {
		err := tryOn(sender, func(fd int) error {
			cell, err := c.Bind(fd, 0)
			assert.Nil(t, cell)
			return err
		})
		require.ErrorIs(t, err, ErrFull)
	}
	assert.Equal(t, was, controlOf(t, sender))
	pass(t, sender, receiver, 100_000)

	first.Free()
	l := bind(t, c, sender, receiver)
	assert.Equal(t, c.Name(), controlOf(t, sender))
	assert.Equal(t, first.Index(), l.Index())
	assert.Zero(t, l.reading(t).Acked)
}

func TestASocketThatCannotBeBoundGivesItsCellBack(t *testing.T) {
	c := open(t, Config{Cells: 1})
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(fd) //nolint:errcheck // nothing is in it
	for range 2 {
		_, err := c.Bind(fd, 0)
		require.Error(t, err)
		require.NotErrorIs(t, err, ErrFull)
		_, err = c.Bind(-1, 0)
		require.Error(t, err)
		require.NotErrorIs(t, err, ErrFull)
	}
	bound(t, c)
}

// TestAFreedSocketHasNoPartInItsCellAnyMore: neither does it keep to its successor's
// limit, nor is what it does taken for the successor's.
func TestAFreedSocketHasNoPartInItsCellAnyMore(t *testing.T) {
	c := open(t, Config{Cells: 1})
	old := bound(t, c)
	old.window(t, 10)
	old.pass(t, 100_000)
	onTime(t, old.reading(t))
	require.EqualValues(t, 10, info(t, old.sender).Snd_cwnd)
	old.Free()

	next := bound(t, c)
	require.Equal(t, old.Index(), next.Index())
	next.window(t, 1)
	before := next.reading(t)
	old.pass(t, 2<<20)
	assert.Equal(t, before, next.reading(t))
	after := info(t, old.sender)
	if after.Total_retrans > 0 {
		t.Skip("this machine stood still for long enough for a retransmission timeout")
	}
	assert.Greater(t, after.Snd_cwnd, uint32(10), "it grows as Reno does")
}

// TestAReadingIsOfOneMoment: every field belongs to the same publication.
func TestAReadingIsOfOneMoment(t *testing.T) {
	c := open(t, Config{Cells: 1})
	l := bound(t, c)
	before := l.reading(t)
	base := before.Sequence/2 - before.Acks
	readings := 0
	for round := 0; readings < 100 && round < 20; round++ {
		l.transfer(t, 8<<20, func(s Seen) {
			if s.Sequence != before.Sequence {
				readings++
			}
			require.Zero(t, s.Sequence%2)
			require.LessOrEqual(t, base, s.Sequence/2-s.Acks-s.Timeouts, "a publication for each event")
			require.LessOrEqual(t, s.Acked, s.Newest)
			require.LessOrEqual(t, s.Newest, s.Sent)
			require.LessOrEqual(t, s.Sent, s.End)
			require.Equal(t, s.Sent == s.Acked, s.PacketsOut == 0)
			require.LessOrEqual(t, s.Sent-s.Acked, uint64(s.PacketsOut)*uint64(s.Mss))
			require.LessOrEqual(t, s.SackedOut+s.LostOut, s.PacketsOut)
			require.LessOrEqual(t, s.Samples, s.Acks)
			for _, grew := range []bool{
				s.At >= before.At, s.Acked >= before.Acked, s.Newest >= before.Newest, s.Sent >= before.Sent,
				s.End >= before.End, s.Acks >= before.Acks, s.Samples >= before.Samples,
				s.Delivered >= before.Delivered, s.Fallbacks >= before.Fallbacks,
			} {
				require.True(t, grew, "%+v after %+v", s, before)
			}
			before = s
			l.window(t, 8)
		})
	}
	assert.Positive(t, readings)
}

// TestAReceiveWindowThatOpensIsSeen: the peer acknowledges nothing with it.
func TestAReceiveWindowThatOpensIsSeen(t *testing.T) {
	c := open(t, Config{Cells: 1})
	l := bound(t, c)
	l.window(t, 1<<20)
	wrote := inBackground(func() error { return produce(l.sender, 16<<20) }) // more than buffers hold
	until(t, "the window is closed", func() bool {
		s := l.window(t, 1<<20)
		return s.SndWnd-uint32(s.Sent-s.Acked) < s.Mss
	})
	require.NoError(t, discard(l.receiver, 1<<20))
	until(t, "it is open", func() bool { return l.window(t, 1<<20).SndWnd > 16*segment })
	require.NoError(t, discard(l.receiver, 15<<20))
	require.NoError(t, wrote())

	l.settled(t)
	deafen(t, l.receiver)
	before := l.reading(t)
	require.NoError(t, produce(l.sender, 1))
	assert.EqualValues(t, info(t, l.sender).Snd_wnd, l.reading(t).SndWnd)
	assert.Equal(t, before.At, l.reading(t).At, "nothing was acknowledged")
}

func TestAReadingThatCannotBeHadLeavesTheLastOne(t *testing.T) {
	c := open(t, Config{Cells: 1})
	l := bound(t, c)
	last := l.reading(t)
	s := last
	l.cell.Seen.Sequence++ // as it is while the kernel writes
	l.cell.Seen.Acked = 99
	assert.False(t, l.Read(&s))
	assert.Equal(t, last, s)
	l.cell.Seen.Sequence++
	l.cell.Seen.Generation++ // as it is until a new socket has written
	assert.False(t, l.Read(&s))
	assert.Equal(t, last, s)
	l.cell.Seen.Generation--
	require.True(t, l.Read(&s))
	assert.EqualValues(t, 99, s.Acked)
}

func TestACellOutlivesItsControl(t *testing.T) {
	open(t, Config{Cells: 1}) // skips where there is none
	c, err := Open(Config{Cells: 1})
	require.NoError(t, err)
	l := bound(t, c)
	require.NoError(t, c.Close())
	err = tryOn(l.sender, func(fd int) error {
		_, err := c.Bind(fd, 0)
		return err
	})
	require.ErrorIs(t, err, ErrFull)
	l.Free()
	runtime.GC()
	l.Mark() // as a writer does that was underway
	l.Apply(1, 0)
	assert.Positive(t, l.reading(t).Mss)
}

func TestOnlyCellsWithNewsAreNamed(t *testing.T) {
	c := open(t, Config{Cells: 200})
	var all []*leg
	for range 70 { // more than there are in a word
		all = append(all, bound(t, c))
	}
	news := func(limit int) []uint32 { return c.named(0, limit) }
	first := news(200)
	assert.Len(t, first, len(all), "each is new")
	for _, l := range all {
		assert.Contains(t, first, l.Index())
	}
	assert.Empty(t, news(200), "and named once")

	all[69].pass(t, 100_000)
	all[69].settled(t)
	assert.Equal(t, []uint32{all[69].Index()}, news(200))
	assert.EqualValues(t, 100_000, all[69].reading(t).Acked)
	all[3].Mark()
	all[3].Mark()
	assert.Equal(t, []uint32{all[3].Index()}, news(200))

	all[3].Mark()
	all[69].Mark()
	both := append(news(1), news(1)...)
	assert.ElementsMatch(t, []uint32{all[3].Index(), all[69].Index()}, both, "what a limit leaves over comes next")
	assert.Empty(t, news(0))
}

// named is what News says of a part.
func (c *Control) named(part, limit int) (cells []uint32) {
	c.News(part, limit, func(cell uint32) { cells = append(cells, cell) })
	return cells
}

func TestEachPartHasCellsAndNewsOfItsOwn(t *testing.T) {
	for cells, parts := range map[int]int{1: 1, 64: 1, 65: 2, 300: 3} {
		assert.Equal(t, parts, open(t, Config{Cells: cells, Parts: 3}).Parts(), "%d cells", cells)
	}
	c := open(t, Config{Cells: 5 * 64, Parts: 2})
	sender, receiver := connect(t)
	for part, want := range []int{3 * 64, 2 * 64} {
		var cells []*Cell
		for range want {
			on(t, sender, func(fd int) error {
				cell, err := c.Bind(fd, part)
				cells = append(cells, cell)
				return err
			})
		}
		err := tryOn(sender, func(fd int) error {
			_, err := c.Bind(fd, part)
			return err
		})
		require.ErrorIs(t, err, ErrFull, "the other part's are not for it")
		var all []uint32
		for _, cell := range cells {
			cell.Mark()
			all = append(all, cell.Index())
		}
		assert.Empty(t, c.named(1-part, 1000), "they are not the other's")
		assert.ElementsMatch(t, all, c.named(part, 1000))
		cells[1].Mark()
		cells[100].Mark()
		assert.Len(t, append(c.named(part, 1), c.named(part, 1)...), 2)
		for _, cell := range cells {
			cell.Free()
		}
	}
	pass(t, sender, receiver, 1000)
}

// TestOffsetsGoOnPast32Bits crosses, with 4 GiB, every sequence number there is.
func TestOffsetsGoOnPast32Bits(t *testing.T) {
	if testing.Short() {
		t.Skip("needs some seconds for 4 GiB")
	}
	c := open(t, Config{Cells: 1})
	l := bound(t, c)
	const total = 4<<30 + 12_345
	window := uint32(math.MaxInt32)
	var before Seen
	for left := int64(total); left > 0; {
		n := min(left, 1<<30)
		l.transfer(t, int(n), func(s Seen) {
			require.True(t, s.Acked >= before.Acked && s.Newest >= s.Acked && s.Sent >= s.Newest && s.End >= s.Sent,
				"%+v after %+v", s, before)
			require.LessOrEqual(t, s.End-s.Acked, uint64(1<<30))
			before = s
			l.apply(t, window, 0)
		})
		left -= n
	}
	s := l.reading(t)
	assert.EqualValues(t, uint64(total), s.Acked)
	assert.EqualValues(t, uint64(total), s.Newest)
	assert.EqualValues(t, uint64(total), s.Sent)
	assert.EqualValues(t, uint64(total), s.End)
}

// TestWhatHasNotArrivedIsNotSaidToHave: of a packet of several segments the peer may
// acknowledge a part, and the kernel then names the end of the packet.
func TestWhatHasNotArrivedIsNotSaidToHave(t *testing.T) {
	const connections, window = 16, 40
	c := open(t, Config{Cells: connections})
	segmentInSoftware(t)
	for range connections {
		l := bound(t, c)
		l.window(t, window)
		l.transfer(t, 50*window*segment, func(s Seen) {
			l.window(t, window)
			if s.SackedOut == 0 && s.LostOut == 0 && s.RetransOut == 0 {
				require.Equal(t, s.Acked, s.Newest)
			}
		})
	}
}
