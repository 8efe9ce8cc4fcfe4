//go:build linux

package kernel

import (
	"bytes"
	"log/slog"
	"math"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
)

func TestWindowsAreHalvedWhileMemoryIsShort(t *testing.T) {
	var p memoryPressure
	p.bound = 1000
	levels := func(used ...int64) (levels []int32) {
		for _, pages := range used {
			p.addPages(pages)
			levels = append(levels, p.halvings.Load())
		}
		return levels
	}
	assert.Equal(t, []int32{0, 0, 1, 2, 3}, levels(0, 500, 501, 1000, 5000))
	assert.Equal(t, []int32{3, 3, 2, 1, 0, 0}, levels(500, 250, 249, 0, 0, 0), "between the two it stays")
	for range 2 * maxHalvings {
		p.addPages(math.MaxInt64)
	}
	assert.EqualValues(t, maxHalvings, p.halvings.Load())
}

func TestThatMemoryIsShortIsLoggedOnceThoughSeveralSayIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		p := memoryPressure{log: slog.New(slog.NewTextHandler(&log, nil))}
		p.halvings.Store(1)
		for range 8 {
			go p.logHalving(1, 1000) // the race detector tells if they get in each other's way
		}
		synctest.Wait()
		assert.Equal(t, 1, strings.Count(log.String(), "short of memory"))
	})
}

func TestTheKernelTellsOfItsMemoryForTCP(t *testing.T) {
	used, bound, err := TCPMemory()
	require.NoError(t, err)
	assert.GreaterOrEqual(t, used, int64(0))
	assert.Positive(t, bound)
}

// bounding is a datapath that bounds receive buffers, and its clock. Without that the test is skipped.
func bounding(t *testing.T) (*Datapath, *hands) {
	t.Helper()
	h := &hands{}
	d := still(t, Config{ReceiveBuffer: receiveBuffer, Clock: h.clock})
	if d.receiveBounds.largest == 0 {
		t.Skip(d.Missing())
	}
	return d, h
}

// windowClamp is the bound of the window that a leg's socket advertises, in bytes.
func (c *Conn) windowClamp(t *testing.T) int {
	t.Helper()
	return c.option(t, unix.IPPROTO_TCP, unix.TCP_WINDOW_CLAMP)
}

// look looks at TCP's memory as many times, as far apart as it is looked at.
func (d *Datapath) look(h *hands, times int) {
	for range times {
		h.now = h.now.Add(pressureEvery)
		d.pressure.checkMemory()
	}
}

// TestWhatIsTakenInFollowsTheMemoryOfTCP has the kernel seem to be short of memory, however
// little it uses.
func TestWhatIsTakenInFollowsTheMemoryOfTCP(t *testing.T) {
	d, h := bounding(t)
	from, to := d.pair(t, loopback4)
	window := func() int {
		pass(t, from, to, 1)
		return to.windowClamp(t)
	}
	later := func() { h.now = h.now.Add(pressureEvery) }

	require.True(t, to.LimitReceive(receiveBuffer))
	assert.Equal(t, receiveBuffer, window())
	d.pressure.bound = -2
	later()
	assert.Equal(t, receiveBuffer/4, window())
	assert.Equal(t, receiveBuffer/4, window(), "it is looked at now and then")
	later()
	assert.Equal(t, receiveBuffer/8, window())
	require.True(t, to.LimitReceive(1<<20))
	assert.Equal(t, 1<<20/8, to.windowClamp(t),
		"who takes more has more of the rest")
	for range maxHalvings {
		later()
		window()
	}
	assert.EqualValues(t, minReceive, window())
	assert.True(t, to.LimitReceive(1<<40), "nobody's is left to the kernel")
	unprivileged(t, func() { assert.True(t, to.LimitReceive(1<<20), "nor without CAP_NET_ADMIN") })
	require.True(t, to.LimitReceive(1<<40))

	d.pressure.bound = math.MaxInt64
	for range maxHalvings {
		later()
		window()
	}
	assert.Zero(t, to.option(t, unix.SOL_SOCKET, unix.SO_BUF_LOCK), "there is no reason left to bound it")
}

// TestWhatWaitsUnreadFollowsTheMemoryOfTCP has a peer send as much as it may to somebody who reads
// little.
func TestWhatWaitsUnreadFollowsTheMemoryOfTCP(t *testing.T) {
	d, h := bounding(t)
	from, to := d.pair(t, loopback4)
	piece, held := make([]byte, 8<<10), cc.Bytes(0)
	step := func() { // the peer sends all that it may, and then a little is read
		held = flood(t, from, to)
		d.look(h, shrinkAfter)
		_, err := to.Read(piece)
		require.NoError(t, err)
	}
	require.True(t, to.LimitReceive(receiveBuffer))
	step()
	before := held
	require.Greater(t, before, cc.Bytes(receiveBuffer/2))

	const overhead, segment = 2, 16 << 10
	d.pressure.bound = -2
	for range 2 * int(before) / len(piece) {
		step()
	}
	assert.LessOrEqual(t, held, overhead*minReceive+segment, "it held %d before", before)

	d.pressure.bound = math.MaxInt64
	for range 2 * maxHalvings {
		step()
	}
	assert.Greater(t, held, before/2, "there is more room again")
}

// TestAfterPressureTheWindowIsTheKernelsAgain has pressure end while nobody reads, so that the leg
// does not see it end step by step.
func TestAfterPressureTheWindowIsTheKernelsAgain(t *testing.T) {
	d, h := bounding(t)
	_, to := d.pair(t, loopback4)
	test := func() {
		buffer := func() int { return to.option(t, unix.SOL_SOCKET, unix.SO_RCVBUF) }
		later := func(bound int64) {
			d.pressure.bound = bound
			d.look(h, maxHalvings)
			_, _ = to.adaptReceiveWindow(1, nil)
		}
		to.LimitReceive(receiveBuffer)
		require.False(t, to.LimitReceive(1<<40))
		window, size := to.windowClamp(t), buffer()
		later(-2)
		require.EqualValues(t, minReceive, to.windowClamp(t))
		assert.LessOrEqual(t, buffer(), size, "what is the kernel's does not grow either")
		later(math.MaxInt64)
		assert.Zero(t, to.option(t, unix.SOL_SOCKET, unix.SO_BUF_LOCK))
		assert.GreaterOrEqual(t, to.windowClamp(t), window)
		assert.GreaterOrEqual(t, buffer(), size)
	}
	test()
	unprivileged(t, test)
}
