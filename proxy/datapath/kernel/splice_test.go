//go:build linux

package kernel

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"strings"
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
	assert.Zero(t, d.pipes.lent)
	assert.Empty(t, d.pipes.idleSmall, "a byte was left in it")

	c.Carrier = datapath.NewCarrier(c.out, c.in, datapath.NewBuffers(1<<20))
	assert.Zero(t, c.Buffered())
	require.NoError(t, c.source.CloseWrite())
	c.Carrier.(*splicer).inBulk = true
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

// say sends text whose bytes after each '^' are urgent.
func (c *Conn) say(tb testing.TB, text string) {
	tb.Helper()
	for i, part := range strings.Split(text, "^") {
		if i > 0 {
			c.sendUrgent(tb, part[:1])
			part = part[1:]
		}
		_, err := c.Write([]byte(part))
		require.NoError(tb, err)
	}
}

// sendUrgent sends one byte as urgent.
func (c *Conn) sendUrgent(tb testing.TB, b string) {
	tb.Helper()
	var err error
	require.NoError(tb, c.raw.Write(func(fd uintptr) bool {
		_, err = unix.SendmsgN(int(fd), []byte(b), nil, nil, unix.MSG_OOB|unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		return !errors.Is(err, unix.EAGAIN)
	}))
	require.NoError(tb, err)
	c.countAccepted(1)
}

// hear reads n bytes, one by one. None of them is urgent.
func (c *Conn) hear(tb testing.TB, n int) string {
	tb.Helper()
	var said strings.Builder
	b := make([]byte, 1)
	for range n {
		c.readable(tb)
		assert.False(tb, c.marked(tb))
		_, err := c.Read(b)
		require.NoError(tb, err)
		said.WriteByte(b[0])
	}
	return said.String()
}

// readable waits until a read would not wait.
func (c *Conn) readable(tb testing.TB) {
	tb.Helper()
	require.NoError(tb, c.raw.Read(func(fd uintptr) bool {
		events := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(events, 0)
		return n > 0 || err != nil
	}))
}

func (c *Conn) marked(tb testing.TB) (mark bool) {
	tb.Helper()
	require.NoError(tb, c.raw.Control(func(fd uintptr) { mark = atMark(fd) }))
	return mark
}

// carryOn forwards until the source ends, in grants of that many bytes.
func (c carried) carryOn(grant int) error {
	defer c.Release()
	for {
		_, err := c.Fill(1 << 20)
		for err == nil && c.Buffered() > 0 {
			_, err = c.Drain(grant)
		}
		switch {
		case errors.Is(err, io.EOF):
			return c.out.CloseWrite()
		case err != nil:
			return err
		}
	}
}

// eachCarrier runs a test with and without pipes to splice through.
func eachCarrier(t *testing.T, test func(t *testing.T, c carried)) {
	for name, pipes := range map[string]int{"spliced": 2, "copied": 1} {
		t.Run(name, func(t *testing.T) {
			d := still(t, Config{Pipes: pipes})
			t.Cleanup(d.pipes.closeAll)
			if pipes == 1 {
				hog := d.pipes.takePipe(1)
				t.Cleanup(func() { d.pipes.returnPipe(hog) })
			}
			test(t, d.carried(t))
		})
	}
}

func TestUrgentBytesKeepTheirPlace(t *testing.T) {
	for name, steps := range map[string][]string{
		"in the middle":          {"abc", "^!", "def"},
		"with what is around it": {"abc^!def"},
		"first":                  {"^!abc"},
		"last":                   {"abc^!"},
		"alone":                  {"^!"},
		"one after the other":    {"ab^1", "c^2d", "^3", "e"},
		"side by side":           {"ab^1", "^2", "^3cd"},
	} {
		t.Run(name, func(t *testing.T) {
			eachCarrier(t, func(t *testing.T, c carried) {
				carrying := make(chan error, 1)
				go func() { carrying <- c.carryOn(5) }()
				for _, step := range steps { // the connection stays open: nothing stands still at the mark
					c.source.say(t, step)
					want := strings.ReplaceAll(step, "^", "")
					assert.Equal(t, want, c.sink.hear(t, len(want)))
				}
				require.NoError(t, c.source.CloseWrite())
				require.NoError(t, <-carrying)
				rest, err := io.ReadAll(c.sink)
				require.NoError(t, err)
				assert.Empty(t, rest)
			})
		})
	}
}

// The receiver learns only of the last of several marks that it has not reached.
func TestNothingIsLostWhereMarksAreManyAndTheSourceHasEnded(t *testing.T) {
	for _, end := range []struct {
		name string
		how  func(*Conn) error
	}{{"a FIN", (*Conn).CloseWrite}, {"a reset", (*Conn).Reset}} {
		t.Run("before "+end.name, func(t *testing.T) {
			eachCarrier(t, func(t *testing.T, c carried) {
				c.source.say(t, "abc^1def^2ghi^3jkl")
				require.Eventually(t, func() bool {
					n, err := c.source.Undelivered()
					return n == 0 && err == nil
				}, patience, time.Millisecond)
				require.NoError(t, end.how(c.source))
				if end.name == "a reset" {
					require.Eventually(t, c.in.Aborted, patience, time.Millisecond)
				}
				err := c.carryOn(5)
				if err != nil { // spliced: the error comes with the first look
					require.ErrorIs(t, err, unix.ECONNRESET)
					require.NoError(t, c.out.CloseWrite())
				}
				assert.Equal(t, "abc1def2ghi3jkl", c.sink.hear(t, 15))
			})
		})
	}
}

// A splice that stands still at the mark is told of the reset, too, which the copy that goes on is not.
func TestAResetBehindAnUrgentByteIsNoEnd(t *testing.T) {
	eachCarrier(t, func(t *testing.T, c carried) {
		stream := strings.Repeat("s", datapath.SmallBuffer) // a stream is spliced
		c.source.say(t, stream+"^!rest")
		require.Eventually(t, func() bool {
			n, err := c.source.Undelivered()
			return n == 0 && err == nil
		}, patience, time.Millisecond)
		require.NoError(t, c.source.Reset())
		require.Eventually(t, c.in.Aborted, patience, time.Millisecond)
		require.ErrorIs(t, c.carryOn(1<<20), unix.ECONNRESET)
		require.NoError(t, c.out.CloseWrite())
		got, err := io.ReadAll(c.sink)
		require.NoError(t, err)
		assert.Equal(t, stream+"!rest", string(got))
	})
}

func TestAnUrgentByteWaitsBehindABlockedDestination(t *testing.T) {
	eachCarrier(t, func(t *testing.T, c carried) {
		carrying := make(chan error, 1)
		go func() { carrying <- c.carryOn(1 << 20) }()
		before, after := bytes.Repeat([]byte("before"), 16<<18), bytes.Repeat([]byte("after"), 1<<18)
		sent := make(chan error, 1)
		go func() {
			_, err := c.source.Write(before)
			c.source.sendUrgent(t, "!")
			_, last := c.source.Write(after)
			sent <- errors.Join(err, last, c.source.CloseWrite())
		}()
		got, err := io.ReadAll(c.sink)
		require.NoError(t, err)
		assert.True(t, bytes.Equal(got, slices.Concat(before, []byte("!"), after)))
		require.NoError(t, <-sent)
		require.NoError(t, <-carrying)
	})
}
