package proxy

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/penstock-net/penstock/cc"
)

func TestAFloodOfConnectionsIsNoFloodOfLines(t *testing.T) {
	var l lines
	now := cc.Time(1)
	for range linesAtOnce {
		skipped, ok := l.take(now, false)
		assert.True(t, ok)
		assert.Zero(t, skipped)
	}
	for range 7 {
		_, ok := l.take(now, false)
		assert.False(t, ok)
	}
	skipped, ok := l.take(now, true)
	assert.True(t, ok, "all are wanted")
	assert.EqualValues(t, 7, skipped)

	written := 0
	for range 10_000 { // in 10 s
		now = now.Add(time.Millisecond)
		if skipped, ok = l.take(now, false); ok {
			written++
			assert.LessOrEqual(t, skipped, uint64(20))
		}
	}
	assert.InDelta(t, 10*linesPerSecond, written, 2)
	now = now.Add(time.Minute)
	skipped, ok = l.take(now, false)
	assert.True(t, ok)
	assert.Less(t, skipped, uint64(10))
}

// At level debug all are written; what that took must not be owed once it is over.
func TestLinesAtLevelDebugAreNotMissingLater(t *testing.T) {
	var l lines
	now := cc.Time(1)
	for range 100 * linesAtOnce { // at once
		_, ok := l.take(now, true)
		assert.True(t, ok)
	}
	now = now.Add(time.Second)
	written := 0
	for range 2 * linesPerSecond {
		if _, ok := l.take(now, false); ok {
			written++
		}
	}
	assert.Equal(t, linesPerSecond, written)
}
