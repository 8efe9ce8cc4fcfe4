//go:build linux

package kernel

import (
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath"
)

func TestPipesAreBoundedAndReused(t *testing.T) {
	p := newPipes(2)
	t.Cleanup(p.closeAll)
	first, second := p.takePipe(1), p.takePipe(1)
	require.NotNil(t, first)
	require.NotNil(t, second)
	assert.Nil(t, p.takePipe(1), "two are lent")

	p.returnPipe(first)
	assert.Same(t, first, p.takePipe(1))

	second.n = 1
	p.returnPipe(second)
	_, err := unix.FcntlInt(uintptr(second.r), unix.F_GETFD, 0)
	assert.ErrorIs(t, err, unix.EBADF, "what is in it would come out at the next user's")

	p.closeAll()
	assert.Nil(t, p.takePipe(1))
	p.returnPipe(first)
	_, err = unix.FcntlInt(uintptr(first.r), unix.F_GETFD, 0)
	assert.ErrorIs(t, err, unix.EBADF, "nobody is left to use it")
	assert.Zero(t, p.lent)
}

func TestLargePipesAreForLargePieces(t *testing.T) {
	p := newPipes(6)
	t.Cleanup(p.closeAll)
	p.maxLarge = 2
	size := func(pp *pipe) int {
		require.NotNil(t, pp)
		n, err := unix.FcntlInt(uintptr(pp.w), unix.F_GETPIPE_SZ, 0)
		require.NoError(t, err)
		return n
	}
	small := p.takePipe(smallPipe)
	assert.LessOrEqual(t, size(small), smallPipe)
	one, two := p.takePipe(smallPipe+1), p.takePipe(largePipe)
	assert.Greater(t, size(one), smallPipe)
	assert.Greater(t, size(two), smallPipe)
	three := p.takePipe(largePipe)
	assert.LessOrEqual(t, size(three), smallPipe, "there are no more large ones")

	p.returnPipe(two)
	p.returnPipe(small)
	assert.Same(t, small, p.takePipe(1), "a large one is kept for who needs it")
	assert.Same(t, two, p.takePipe(largePipe))

	one.n = 1 // it is not kept, and leaves room for another
	p.returnPipe(one)
	assert.Greater(t, size(p.takePipe(largePipe)), smallPipe)
}

// carried is source → in, carrier, out → sink.
type carried struct {
	datapath.Carrier
	source, in, out, sink *Conn
}

func (d *Datapath) carried(tb testing.TB) carried {
	tb.Helper()
	source, in := d.pair(tb, loopback4)
	out, sink := d.pair(tb, loopback4)
	c := datapath.NewCarrier(out, in, datapath.NewBuffers(1<<20))
	require.IsType(tb, &splicer{}, c)
	return carried{c, source, in, out, sink}
}

func TestAnIdleSpliceHoldsNoPipe(t *testing.T) {
	d := still(t, Config{})
	t.Cleanup(d.pipes.closeAll)
	c := d.carried(t)
	require.NoError(t, c.in.SetReadDeadline(time.Now().Add(time.Millisecond)))
	_, err := c.Fill(1 << 20)
	require.Error(t, err)
	assert.Zero(t, d.pipes.lent)

	require.NoError(t, c.in.SetReadDeadline(time.Time{}))
	_, err = c.source.Write([]byte("abcdef"))
	require.NoError(t, err)
	c.Carrier.(*splicer).inBulk = true
	n, err := c.Fill(4)
	require.NoError(t, err)
	assert.Equal(t, 4, n)
	assert.Equal(t, 1, d.pipes.lent)
	assert.True(t, c.Carrier.(*splicer).Splicing())
	n, err = c.Drain(3)
	require.NoError(t, err)
	assert.Equal(t, 3, n)
	assert.Equal(t, 1, c.Buffered())
	c.Release()
	assert.Zero(t, c.Buffered())
	assert.Zero(t, d.pipes.lent)
	assert.Empty(t, d.pipes.idleSmall, "a byte was left in it")

	require.NoError(t, c.source.CloseWrite())
	n, err = c.Fill(100)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	_, err = c.Drain(100)
	require.NoError(t, err)
	for range 2 { // it stays at that
		_, err = c.Fill(100)
		assert.ErrorIs(t, err, io.EOF)
	}
	assert.Zero(t, d.pipes.lent)
	assert.Len(t, d.pipes.idleSmall, 1)
}

func TestWithoutAPipeASpliceCopies(t *testing.T) {
	d := still(t, Config{Pipes: 1})
	t.Cleanup(d.pipes.closeAll)
	hog := d.pipes.takePipe(1)
	c := d.carried(t)
	_, err := c.source.Write([]byte("abcdef"))
	require.NoError(t, err)
	c.Carrier.(*splicer).inBulk = true
	n, err := c.Fill(100)
	require.NoError(t, err)
	assert.Equal(t, 6, n)
	assert.False(t, c.Carrier.(*splicer).Splicing())
	d.pipes.returnPipe(hog)

	n, err = c.Drain(100)
	require.NoError(t, err)
	assert.Equal(t, 6, n, "what was copied in is copied out, pipe or none")
	got := make([]byte, 6)
	_, err = io.ReadFull(c.sink, got)
	require.NoError(t, err)
	assert.Equal(t, "abcdef", string(got))

	_, err = c.source.Write([]byte("x"))
	require.NoError(t, err)
	c.Carrier.(*splicer).inBulk = true
	_, err = c.Fill(100)
	require.NoError(t, err)
	assert.Equal(t, 1, d.pipes.lent, "there is one again")
	c.Release()
}

func TestASpliceSeesAResetOnEitherLeg(t *testing.T) {
	d := still(t, Config{})
	t.Cleanup(d.pipes.closeAll)
	t.Run("of the source", func(t *testing.T) {
		c := d.carried(t)
		require.NoError(t, c.source.Reset())
		_, err := c.Fill(100)
		assert.ErrorIs(t, err, unix.ECONNRESET)
		c.Release()
	})
	t.Run("of a source that streams", func(t *testing.T) {
		c := d.carried(t)
		c.Carrier.(*splicer).inBulk = true
		require.NoError(t, c.source.Reset())
		_, err := c.Fill(100)
		assert.ErrorIs(t, err, unix.ECONNRESET)
		c.Release()
	})
	t.Run("of the destination", func(t *testing.T) {
		c := d.carried(t)
		_, err := c.source.Write([]byte("abc"))
		require.NoError(t, err)
		_, err = c.Fill(100)
		require.NoError(t, err)
		require.NoError(t, c.sink.Reset())
		_, err = c.out.Read(make([]byte, 1)) // waits for the reset to be here
		require.ErrorIs(t, err, unix.ECONNRESET)
		_, err = c.Drain(100)
		assert.ErrorIs(t, err, unix.EPIPE)
		c.Release()
	})
	assert.Zero(t, d.pipes.lent)
}

func TestSplicingAllocatesNothing(t *testing.T) {
	d := still(t, Config{})
	t.Cleanup(d.pipes.closeAll)
	for _, streams := range []bool{false, true} {
		c := d.carried(t)
		msg := make([]byte, 1000)
		var room datapath.Room = make(datapath.Lent, 1000)
		assert.Zero(t, testing.AllocsPerRun(100, func() {
			c.Carrier.(*splicer).inBulk = streams
			_, _ = c.source.Write(msg)
			_, _ = c.Fill(1 << 20)
			_, _ = c.Drain(1 << 20)
			_, _ = c.sink.ReadReady(room)
		}), "streams: %v", streams)
	}
}
