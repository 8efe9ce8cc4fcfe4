//go:build linux

package bpf

import (
	"os"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestASocketThatNobodyAnswersHelpsItselfUntilSomebodyDoes(t *testing.T) {
	c := open(t, Config{Cells: 1})
	l := bound(t, c)
	const window = 10
	for falls := uint32(1); falls <= 2; falls++ {
		l.window(t, window)
		l.pass(t, 20*segment)
		before := l.settled(t)
		if before.Fallen == 1 {
			onTime(t, before)
		}
		require.EqualValues(t, window, before.Cwnd)
		until(t, "the socket helps itself", func() bool {
			l.pass(t, 20*segment)
			return l.reading(t).Fallen == 1
		})
		s := l.reading(t)
		assert.Equal(t, falls, s.Falls)
		assert.Greater(t, s.At-before.At, uint64(90e6), "not before it is due")
		until(t, "it grows beyond what it was told last", func() bool {
			l.pass(t, 100*segment)
			return l.reading(t).Cwnd > window
		})

		l.window(t, window)
		until(t, "it obeys again", func() bool {
			l.pass(t, segment)
			s := l.window(t, window)
			return s.Fallen == 0 && s.Cwnd == window
		})
		assert.Equal(t, falls, l.reading(t).Falls)
	}
}

// TestTheRateToldLastStaysACeiling: it may be what an operator allows, so neither a
// busy process nor a closed leg may let a socket send faster.
func TestTheRateToldLastStaysACeiling(t *testing.T) {
	c := open(t, Config{Cells: 1})
	l := bound(t, c)
	const rate = 4 << 20 // bytes per second; a window of loopback's round trip would be far more
	s := l.reading(t)
	l.told(t, Told{Cwnd: 1000 * s.Mss, Rate: rate})
	obeyed := func(s Seen) { assert.LessOrEqual(t, info(t, l.sender).Pacing_rate, uint64(rate)) }
	until(t, "nobody answers", func() bool {
		l.pass(t, 100*segment)
		return l.reading(t).Fallen == 1
	})
	before := l.reading(t)
	l.transfer(t, 2<<20, obeyed)
	after := l.reading(t)
	require.EqualValues(t, 1, after.Fallen)
	allowed := rate*(after.At-before.At)/1e9 + 64<<10 // and a burst
	assert.LessOrEqual(t, after.Acked-before.Acked, allowed)

	l.Tell(Told{Cwnd: 1000 * s.Mss, Rate: rate / 2, Answers: before.At})
	l.pass(t, 100*segment)
	assert.EqualValues(t, rate/2, info(t, l.sender).Pacing_rate, "a new one holds before it is an answer")
	l.Free()
	l.pass(t, 100*segment)
	assert.EqualValues(t, rate/2, info(t, l.sender).Pacing_rate, "and when nobody will answer any more")
}

// TestAFirstByteIsNoAnswer: what a socket was told before it first sent anything was
// in force all the time, however long that took.
func TestAFirstByteIsNoAnswer(t *testing.T) {
	c := open(t, Config{Cells: 1})
	l := bound(t, c)
	l.window(t, 10)
	l.pass(t, 1)
	assert.Zero(t, l.settled(t).Lag)

	until(t, "an answer while more is in flight counts", func() bool {
		l.transfer(t, 4<<20, func(Seen) { l.window(t, 1000) }) // more than is acknowledged at a time
		return l.reading(t).Lag > 0
	})
}

func TestAPauseOfTheSenderIsNoSilenceOfTheProcess(t *testing.T) {
	c := open(t, Config{Cells: 1})
	l := bound(t, c)
	for range 2 {
		l.pass(t, 20*segment)
		l.settled(t)
		// The first byte takes the answer along, the rest comes long after it.
		s := l.window(t, 10)
		l.pass(t, 1)
		until(t, "it is acknowledged", func() bool { return l.window(t, 10).Acked == s.End+1 })
		nothing := 0
		until(t, "more time passes than a socket has patience", func() bool { nothing++; return nothing > 250 })
	}
	l.pass(t, 20*segment)
	assert.Zero(t, l.reading(t).Falls)
}

// TestATimeoutIsAnsweredInItsOwnTime: what comes right after it finds a process
// that had no time to answer, not one that is silent.
func TestATimeoutIsAnsweredInItsOwnTime(t *testing.T) {
	c := open(t, Config{Cells: 1})
	l := bound(t, c)
	const window = 20
	l.pass(t, segment)
	l.settled(t)
	l.window(t, window)
	deafen(t, l.receiver)
	require.NoError(t, produce(l.sender, window*segment))
	undeafen(t, l.receiver)
	require.NoError(t, discard(l.receiver, window*segment))
	l.settled(t)
	s := l.reading(t)
	if s.Timeouts > 1 {
		t.Skip("this machine stood still for long enough for a second timeout")
	}
	assert.EqualValues(t, 1, s.Timeouts)
	assert.Zero(t, s.Falls)

	// Until the timeout is answered the window only grows from what it left.
	l.Tell(Told{Cwnd: 1000 * s.Mss, Answers: s.At})
	l.pass(t, segment)
	assert.Less(t, l.reading(t).Cwnd, uint32(2*window+2))
	l.window(t, 1000)
	l.pass(t, segment)
	until(t, "the window is the one it was told", func() bool { return l.reading(t).Cwnd == 1000 })
}

func TestLossIsToldAndLeftToTheProcess(t *testing.T) {
	c := open(t, Config{Cells: 1, Ring: 8 << 20})
	l := bound(t, c)
	const window = 30
	l.window(t, window)
	loseOneIn(t, l.receiver, 20)
	until(t, "something is lost", func() bool {
		l.transfer(t, 1<<20, func(s Seen) {
			onTime(t, s)
			if s.Timeouts == 0 && s.Acks > 0 {
				require.EqualValues(t, window, s.Cwnd)
			}
			l.window(t, window)
		})
		return l.reading(t).Lost > 0
	})
	s := l.reading(t)
	i := info(t, l.sender)
	assert.EqualValues(t, i.Total_rto, s.Timeouts)
	assert.EqualValues(t, s.End, s.Newest)
	assert.Zero(t, s.LostOut+s.SackedOut+s.RetransOut, "all is repaired")
}

func TestWhatArrivesBehindAHoleIsTold(t *testing.T) {
	c := open(t, Config{Cells: 1})
	l := bound(t, c)
	l.pass(t, segment)
	before := l.settled(t)
	l.told(t, Told{Cwnd: 20 * before.Mss, Each: true})
	deafen(t, l.receiver)
	require.NoError(t, produce(l.sender, int(before.Mss)))
	undeafen(t, l.receiver)
	require.NoError(t, produce(l.sender, 5*int(before.Mss)))
	require.NoError(t, discard(l.receiver, 6*int(before.Mss)))
	l.settled(t)
	var behind *Seen
	require.NoError(t, c.Acks(func(a *Ack) {
		if s := a.Seen; s.Acked == before.Acked {
			behind = &s
		}
	}))
	require.NotNil(t, behind, "none came before the hole was repaired")
	assert.EqualValues(t, 5, behind.SackedOut)
	assert.EqualValues(t, 6, behind.PacketsOut)
	assert.EqualValues(t, 5, behind.Delivered-before.Delivered)
	assert.Equal(t, before.Acked+6*uint64(before.Mss), behind.Newest)
}

func TestEachAcknowledgementComesOnceAndInOrder(t *testing.T) {
	c := open(t, Config{Cells: 2, Ring: 8 << 20})
	asked, other := bound(t, c), bound(t, c)
	first := asked.told(t, Told{Cwnd: 16 * segment, Each: true})
	next := first.Acks + 1
	check := func(a *Ack) {
		require.True(t, asked.Is(a))
		require.False(t, other.Is(a))
		require.Equal(t, next, a.Seen.Acks)
		next++
	}
	other.transfer(t, 1<<20, func(Seen) { other.told(t, Told{Cwnd: 16 * segment}) })
	asked.transfer(t, 1<<20, func(Seen) {
		asked.told(t, Told{Cwnd: 16 * segment, Each: true})
		require.NoError(t, c.Acks(check))
	})
	require.NoError(t, c.Acks(check))
	s := asked.reading(t)
	assert.Equal(t, s.Acks+1, next)
	assert.Greater(t, s.Acks, first.Acks+20)
	assert.Zero(t, s.Missed)

	asked.told(t, Told{Cwnd: 16 * segment})
	asked.transfer(t, 1<<20, func(Seen) { asked.told(t, Told{Cwnd: 16 * segment}) })
	// One may have been asked for when the last one was told.
	require.NoError(t, c.Acks(func(a *Ack) { assert.LessOrEqual(t, a.Seen.Acks, s.Acks+1) }))
}

func TestAFullRingMissesAcknowledgementsButNoCount(t *testing.T) {
	c := open(t, Config{Cells: 1, Ring: os.Getpagesize()})
	l := bound(t, c)
	first := l.told(t, Told{Cwnd: 16 * segment, Each: true})
	l.transfer(t, 1<<20, func(Seen) { l.told(t, Told{Cwnd: 16 * segment, Each: true}) })
	assert.EqualValues(t, first.Acked+1<<20, l.reading(t).Acked)
	var kept, last uint32
	count := func(a *Ack) {
		require.Greater(t, a.Seen.Acks, last)
		last = a.Seen.Acks
		kept++
	}
	require.NoError(t, c.Acks(count))
	assert.Positive(t, kept)
	// What is missed last is told with the next, for which there is room now.
	l.pass(t, segment)
	l.settled(t)
	require.NoError(t, c.Acks(count))
	s := l.reading(t)
	assert.Positive(t, s.Missed)
	assert.Equal(t, s.Acks-first.Acks, kept+s.Missed)
}
