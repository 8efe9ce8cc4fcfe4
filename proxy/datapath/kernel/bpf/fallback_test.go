//go:build linux

package bpf

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestASocketThatNobodyAnswersFallsBackUntilSomebodyDoes(t *testing.T) {
	c := open(t, Config{Cells: 1})
	l := bound(t, c)
	const window = 10
	for fallbacks := uint32(1); fallbacks <= 2; fallbacks++ {
		l.window(t, window)
		l.pass(t, 20*segment)
		before := l.settled(t)
		if before.InFallback == 1 {
			onTime(t, before)
		}
		require.EqualValues(t, window, before.Cwnd)
		until(t, "the socket falls back", func() bool {
			l.pass(t, 20*segment)
			return l.reading(t).InFallback == 1
		})
		s := l.reading(t)
		assert.Equal(t, fallbacks, s.Fallbacks)
		assert.Greater(t, s.At-before.At, uint64(90e6), "not before it is due")
		until(t, "it grows beyond the window applied last", func() bool {
			l.pass(t, 100*segment)
			return l.reading(t).Cwnd > window
		})

		l.settled(t)
		l.window(t, window)
		until(t, "it keeps to the window again", func() bool {
			l.pass(t, segment)
			s := l.window(t, window)
			return s.InFallback == 0 && s.Cwnd == window
		})
		assert.Equal(t, fallbacks, l.reading(t).Fallbacks)
	}
}

func TestAnAnswerWhileTheSocketIsIdleEndsItsFallback(t *testing.T) {
	c := open(t, Config{Cells: 1})
	l := bound(t, c)
	l.window(t, 10)
	until(t, "the socket falls back", func() bool {
		l.pass(t, 20*segment)
		return l.reading(t).InFallback == 1
	})
	l.settled(t)
	deafen(t, l.sender)
	l.window(t, 3)
	require.NoError(t, produce(l.sender, 20*segment))
	assert.EqualValues(t, 3, info(t, l.sender).Snd_cwnd)
	assert.LessOrEqual(t, info(t, l.sender).Unacked, uint32(3))
}

// TestTheRateAppliedLastStaysACeiling: it may be what an operator allows, so neither a
// busy process nor a closed leg may let a socket send faster.
func TestTheRateAppliedLastStaysACeiling(t *testing.T) {
	c := open(t, Config{Cells: 1})
	l := bound(t, c)
	const rate = 4 << 20 // bytes per second; a window of loopback's round trip would be far more
	s := l.reading(t)
	l.apply(t, 1000*s.Mss, rate)
	obeyed := func(s Seen) { assert.LessOrEqual(t, info(t, l.sender).Pacing_rate, uint64(rate)) }
	until(t, "nobody answers", func() bool {
		l.pass(t, 100*segment)
		return l.reading(t).InFallback == 1
	})
	before := l.reading(t)
	l.transfer(t, 2<<20, obeyed)
	after := l.reading(t)
	require.EqualValues(t, 1, after.InFallback)
	allowed := rate*(after.At-before.At)/1e9 + 64<<10 // and a burst
	assert.LessOrEqual(t, after.Acked-before.Acked, allowed)

	l.Apply(1000*s.Mss, rate/2)
	l.pass(t, 100*segment)
	assert.EqualValues(t, rate/2, info(t, l.sender).Pacing_rate, "a new one holds before it is an answer")
	l.Free()
	l.pass(t, 100*segment)
	assert.EqualValues(t, rate/2, info(t, l.sender).Pacing_rate, "and when nobody will answer any more")
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
	assert.Zero(t, l.reading(t).Fallbacks)
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
	assert.Zero(t, s.Fallbacks)

	// Until the timeout is answered the window only grows from what it left.
	l.Apply(1000*s.Mss, 0)
	early := s
	early.Timeouts = 0
	l.Answer(&early)
	l.pass(t, segment)
	assert.Less(t, l.reading(t).Cwnd, uint32(2*window+2))
	l.window(t, 1000)
	l.pass(t, segment)
	until(t, "the window is the one that was applied", func() bool { return l.reading(t).Cwnd == 1000 })
}

func TestLossIsReportedAndLeftToTheProcess(t *testing.T) {
	c := open(t, Config{Cells: 1})
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

func TestWhatArrivesBehindAHoleIsReported(t *testing.T) {
	c := open(t, Config{Cells: 1})
	l := bound(t, c)
	l.pass(t, segment)
	l.settled(t)
	before := l.window(t, 20)
	const small = segment / 2
	loseShorterThan(t, l.receiver, 3*segment/4)
	require.NoError(t, produce(l.sender, small)) // lost, and lost again when it is repeated
	require.NoError(t, produce(l.sender, 5*int(before.Mss)))
	until(t, "what is behind the hole is acknowledged", func() bool { return l.reading(t).SackedOut == 5 })
	s := l.reading(t)
	assert.Equal(t, before.Acked, s.Acked)
	assert.EqualValues(t, 6, s.PacketsOut)
	assert.EqualValues(t, 5, s.Delivered-before.Delivered)
	assert.Equal(t, before.Acked+small+5*uint64(before.Mss), s.Newest)
	undeafen(t, l.receiver)
	require.NoError(t, discard(l.receiver, small+5*int(before.Mss)))
	assert.Zero(t, l.settled(t).SackedOut)
}
