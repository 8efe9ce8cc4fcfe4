//go:build linux

package kernel

import (
	"io"
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
)

// receiveBuffer is what a socket may take in at first, as the proxy has it.
const receiveBuffer = 256 << 10

// flood has the peer send all that c's socket takes in while nobody reads, and returns
// the kernel memory that it takes there.
func flood(t *testing.T, from, c *Conn) (held cc.Bytes) {
	t.Helper()
	piece := make([]byte, 64<<10)
	quiet := 0
	for quiet < 100 { // what is acknowledged makes room for more
		require.NoError(t, from.raw.Visit(func(fd int) error {
			n, err := unix.SendmsgN(fd, piece, nil, nil, unix.MSG_DONTWAIT)
			if n > 0 {
				quiet = 0
				return nil
			}
			if quiet++; err == unix.EAGAIN {
				return nil
			}
			return err
		}))
		poll := []unix.PollFd{{Fd: -1}}
		_, _ = unix.Poll(poll, 1)
	}
	return c.memory(t)
}

// memory is what the kernel has in c's receive queue, overhead included.
func (c *Conn) memory(t *testing.T) (held cc.Bytes) {
	t.Helper()
	require.NoError(t, c.raw.Visit(func(fd int) (err error) {
		vars, err := memoryInfo(fd)
		held = cc.Bytes(vars[receiveUsed])
		return err
	}))
	return held
}

func TestWhatNobodyReadsIsBounded(t *testing.T) {
	const segment = 128 << 10 // the last one may go beyond
	bounded, _ := bounding(t)
	for _, accepted := range []bool{false, true} {
		from, to := bounded.pair(t, loopback4)
		if !accepted {
			from, to = to, from
		}
		require.True(t, to.LimitReceive(receiveBuffer))
		pass(t, from, to, 16<<20) // the kernel gives more room to who reads much: without a bound, some megabytes
		assert.LessOrEqual(t, flood(t, from, to), cc.Bytes(receiveBuffer+segment))
		require.True(t, to.LimitReceive(1<<20))
		assert.Equal(t, 1<<20, to.option(t, unix.SOL_SOCKET, unix.SO_RCVBUF), "there is more room")
		assert.Equal(t, 1<<20, to.windowClamp(t), "and the peer is told")
		assert.LessOrEqual(t, flood(t, from, to), cc.Bytes(1<<20+segment))
		assert.False(t, to.LimitReceive(1<<40), "from here on it is the kernel's")
		assert.Zero(t, to.option(t, unix.SOL_SOCKET, unix.SO_BUF_LOCK))
	}
}

// What is the kernel's has a window that lets it see whether more is needed. A bounded one, which
// may be full all the time, does not: the kernel would keep it for ever.
func TestABufferThatIsTheKernelsGrows(t *testing.T) {
	d, _ := bounding(t)
	test := func(n cc.Bytes) {
		_, to := d.pair(t, loopback4)
		require.True(t, to.LimitReceive(receiveBuffer))
		require.False(t, to.LimitReceive(n))
		room := min(n, d.receiveBounds.largest) / 2
		assert.GreaterOrEqual(t, to.windowClamp(t), int(room))
		assert.GreaterOrEqual(t, to.option(t, unix.SOL_SOCKET, unix.SO_RCVBUF), int(room))
		assert.Equal(t, 1, to.option(t, unix.SOL_SOCKET, unix.SO_RCVLOWAT))
	}
	test(1 << 40)
	unprivileged(t, func() { test(4 * d.receiveBounds.unprivileged) })
}

// What the relay lets a socket take in does not widen a window that is held, and it has
// its own back afterwards.
func TestAHeldWindowStaysHeld(t *testing.T) {
	a, b := still(t, Config{ReceiveBuffer: receiveBuffer}).pair(t, loopback4)
	before := b.windowClamp(t)
	_, err := b.Arrivals()
	require.NoError(t, err)
	require.NoError(t, b.Advertise(40e3))
	assert.EqualValues(t, 40e3, b.windowClamp(t))
	_, err = b.Arrivals()
	require.NoError(t, err)
	require.NoError(t, b.Advertise(41e3))
	assert.EqualValues(t, 40e3, b.windowClamp(t), "that is no other window")
	b.LimitReceive(2 * receiveBuffer)
	assert.EqualValues(t, 40e3, b.windowClamp(t))

	// The kernel raises it by itself, as it does with a buffer that it enlarges.
	require.NoError(t, b.raw.Visit(func(fd int) error {
		return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_WINDOW_CLAMP, 1<<20)
	}))
	for sent, data := 0, make([]byte, 200e3); sent < 20; sent++ {
		_, err := a.Write(data)
		require.NoError(t, err)
		_, err = io.ReadFull(b, data)
		require.NoError(t, err)
	}
	_, err = b.Arrivals()
	require.NoError(t, err)
	require.NoError(t, b.Advertise(40e3))
	assert.EqualValues(t, 40e3, b.windowClamp(t), "so it is set again")
	require.NoError(t, b.Advertise(0))
	assert.GreaterOrEqual(t, b.windowClamp(t), before)
	require.NoError(t, b.Advertise(0))
}

// A peer that is let send what it likes, and does, hurts only itself.
func TestAHeldWindowBoundsWhatWaits(t *testing.T) {
	d, _ := bounding(t)
	a, b := d.pair(t, loopback4)
	_, err := b.Arrivals()
	require.NoError(t, err)
	require.NoError(t, b.Advertise(20e3))
	assert.LessOrEqual(t, flood(t, a, b), cc.Bytes(receiveBuffer+128<<10))
}

// Whoever bounds a window first, both do, and neither's bound is left behind.
func TestAHeldWindowFollowsTheMemoryOfTCP(t *testing.T) {
	d, h := bounding(t)
	const window = 40e3
	for n, own := range map[cc.Bytes]int{1 << 20: 1 << 20, 1 << 40: receiveBuffer} { // the second is the kernel's
		_, b := d.pair(t, loopback4)
		pressed := func(pressed bool) {
			d.pressure.bound = math.MaxInt64
			if pressed {
				d.pressure.bound = -2
			}
			d.look(h, maxHalvings)
			_, _ = b.adaptReceiveWindow(1, nil)
		}
		b.LimitReceive(receiveBuffer)
		require.NoError(t, b.Advertise(window))
		b.LimitReceive(n)
		require.NoError(t, b.Advertise(0))
		before := b.windowClamp(t)
		assert.GreaterOrEqual(t, before, own, "%v: what came meanwhile gave more room", n)

		require.NoError(t, b.Advertise(window))
		pressed(true)
		assert.EqualValues(t, minReceive, b.windowClamp(t), "%v", n)
		require.NoError(t, b.Advertise(2*window))
		assert.EqualValues(t, minReceive, b.windowClamp(t), "%v: memory is as short as before", n)
		pressed(false)
		assert.EqualValues(t, 2*window, b.windowClamp(t), "%v: it is held", n)
		pressed(true)
		require.NoError(t, b.Advertise(0))
		assert.EqualValues(t, minReceive, b.windowClamp(t), "%v: memory is short still", n)
		require.NoError(t, b.Advertise(window))
		pressed(false)
		require.NoError(t, b.Advertise(0))
		assert.GreaterOrEqual(t, b.windowClamp(t), before, "%v: nothing bounds it any longer", n)
	}
}
