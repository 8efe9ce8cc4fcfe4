package datapath

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// waiter is a source that waits once before each read has an outcome.
type waiter struct {
	io.Reader
	waiting func()
}

func (w waiter) ReadReady(room Room) (int, error) {
	_ = room.Take() // and there is nothing yet
	room.GiveBack()
	w.waiting()
	return w.Read(room.Take())
}

func TestACopyHoldsMemoryOnlyWhileBytesAreInIt(t *testing.T) {
	var out bytes.Buffer
	buffers := NewBuffers(1 << 20)
	const piece = SmallBuffer + 4 // it takes a large buffer
	c := NewCopy(&out, waiter{strings.NewReader(strings.Repeat("a", piece) + "bc"), func() {
		assert.Zero(t, buffers.out.Load(), "while waiting")
	}}, buffers)
	require.Zero(t, buffers.out.Load())

	n, err := c.Fill(piece)
	require.NoError(t, err)
	assert.Equal(t, piece, n)
	assert.Equal(t, piece, c.Buffered())
	assert.EqualValues(t, 1, buffers.out.Load())

	n, err = c.Fill(4)
	require.NoError(t, err)
	assert.Zero(t, n, "the store is not empty")

	n, err = c.Drain(piece - 1)
	require.NoError(t, err)
	assert.Equal(t, piece-1, n)
	assert.EqualValues(t, 1, buffers.out.Load(), "one byte is still in it")
	n, err = c.Drain(100)
	require.NoError(t, err)
	assert.Equal(t, 1, n)
	assert.Zero(t, buffers.out.Load())
	n, err = c.Drain(100)
	require.NoError(t, err)
	assert.Zero(t, n, "nothing is left")

	_, err = c.Fill(100)
	require.NoError(t, err)
	_, err = c.Drain(100)
	require.NoError(t, err)
	_, err = c.Fill(100)
	assert.ErrorIs(t, err, io.EOF)
	assert.Zero(t, buffers.out.Load())
	assert.True(t, strings.HasSuffix(out.String(), "abc"))
}

// shortWriter takes two bytes and then fails.
type shortWriter struct{ err error }

func (w shortWriter) Write(b []byte) (int, error) { return min(2, len(b)), w.err }

func TestAFailedWriteKeepsCount(t *testing.T) {
	broken := errors.New("broken")
	buffers := NewBuffers(1 << 20)
	c := NewCopy(shortWriter{broken}, strings.NewReader("abcdef"), buffers)
	_, err := c.Fill(100)
	require.NoError(t, err)
	n, err := c.Drain(5)
	assert.ErrorIs(t, err, broken)
	assert.Equal(t, 2, n)
	assert.Equal(t, 4, c.Buffered())
	c.Release()
	assert.Zero(t, c.Buffered())
	assert.Zero(t, buffers.out.Load())
	c.Release()
	assert.Zero(t, buffers.out.Load(), "once is enough")
}

func TestAReadThatBringsBytesAndAnErrorBringsBoth(t *testing.T) {
	broken := errors.New("broken")
	c := NewCopy(io.Discard, io.MultiReader(readerFunc(func(b []byte) (int, error) {
		return copy(b, "abc"), broken
	})), &Buffers{})
	n, err := c.Fill(100)
	assert.ErrorIs(t, err, broken)
	assert.Equal(t, 3, n)
	n, err = c.Drain(100)
	require.NoError(t, err)
	assert.Equal(t, 3, n)
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }

func TestLargeBuffersAreBoundedAndSmallOnesKeepItGoing(t *testing.T) {
	b := NewBuffers(3*LargeBuffer + 1)
	var lent [][]byte
	for range 5 {
		lent = append(lent, b.lendBuffer(LargeBuffer))
	}
	var sizes []int
	for _, buf := range lent {
		sizes = append(sizes, len(buf))
	}
	assert.Equal(t, []int{LargeBuffer, LargeBuffer, LargeBuffer, SmallBuffer, SmallBuffer}, sizes)
	for _, buf := range lent {
		b.returnBuffer(buf)
	}
	assert.Zero(t, b.out.Load())
	assert.Len(t, b.lendBuffer(LargeBuffer), LargeBuffer)

	var unbounded Buffers
	for range 5 {
		assert.Len(t, unbounded.lendBuffer(LargeBuffer), LargeBuffer)
	}
	assert.Len(t, NewBuffers(LargeBuffer).lendBuffer(LargeBuffer), LargeBuffer)
	assert.Len(t, NewBuffers(LargeBuffer-1).lendBuffer(LargeBuffer), SmallBuffer, "less than one large buffer is none")
	assert.Len(t, unbounded.lendBuffer(SmallBuffer), SmallBuffer, "what a small one holds takes no more")
}

func TestMovingBytesAllocatesNothing(t *testing.T) {
	endless := readerFunc(func(b []byte) (int, error) { return len(b), nil })
	c := NewCopy(io.Discard, waiter{endless, func() {}}, &Buffers{})
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		_, _ = c.Fill(LargeBuffer)
		_, _ = c.Drain(LargeBuffer)
	}))
}
