//go:build linux

package netlab

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// bench is an emulator between two socket pairs, driven by hand: no namespace
// and no thread.
type bench struct {
	*emulator
	client, server int
}

func newBench(tb testing.TB, down, up sim.LinkConfig) *bench {
	tb.Helper()
	near, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	require.NoError(tb, err)
	far, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	require.NoError(tb, err)
	p := &Path{record: newRecord(), epoch: time.Now(), asked: make(chan func(), 1), quit: make(chan struct{}), supplied: make(chan struct{})}
	p.History, p.cfg.Down, p.cfg.Up = History{p.readRecord}, down, up
	p.dirs[Down] = pipe{dir: Down, cfg: down, in: far[1], out: near[1]}
	p.dirs[Up] = pipe{dir: Up, cfg: up, in: near[1], out: far[1]}
	go func() {
		defer close(p.supplied)
		p.record.supply(p.quit)
	}()
	tb.Cleanup(func() {
		close(p.quit)
		<-p.supplied
		for _, fd := range append(near[:], far[:]...) {
			assert.NoError(tb, unix.Close(fd))
		}
	})
	return &bench{emulator: newEmulator(p), client: near[0], server: far[0]}
}

func TestEmulatorAllocatesNothingPerPacket(t *testing.T) {
	b := newBench(t, sim.LinkConfig{Rate: 1e9, QueuePackets: 100}, sim.LinkConfig{})
	b.Start()
	data, sink := make([]byte, MTU), make([]byte, MTU)
	round := func() {
		for range 10 {
			require.Zero(t, writePacket(b.server, data))
		}
		b.receive(&b.dirs[Down])
		for b.dirs[Down].line.Len() > 0 {
			b.deliver(&b.dirs[Down])
		}
		for range 10 {
			n, errno := readPacket(b.client, sink)
			require.Zero(t, errno)
			require.Equal(t, MTU, n)
		}
	}
	round()
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		for range 10 {
			writePacket(b.server, data)
		}
		b.receive(&b.dirs[Down])
		for b.dirs[Down].line.Len() > 0 {
			b.deliver(&b.dirs[Down])
		}
		for range 10 {
			readPacket(b.client, sink)
		}
	}))
	r := b.Report(0, time.Hour).Down
	assert.Equal(t, 1020, r.Sent)
	assert.Equal(t, 1020, r.Lateness.Count)
}

// Handshakes, which come before the first data packet, take as long as the path that a trace of delays
// describes: kernels take their round trip for the least one.
func TestWhatComesBeforeTheStartHasTheFirstDelayOfATrace(t *testing.T) {
	delays, err := sim.ReadDelayTrace("leo", strings.NewReader("30\n5\n"))
	require.NoError(t, err)
	b := newBench(t, sim.LinkConfig{Delay: 20 * time.Millisecond, Delays: delays}, sim.LinkConfig{})
	require.Zero(t, writePacket(b.server, make([]byte, 60)))
	came := b.now()
	b.receive(&b.dirs[Down])
	require.Positive(t, b.dirs[Down].line.Len())
	assert.GreaterOrEqual(t, (*b.dirs[Down].line.At(0)).due, came.Add(50*time.Millisecond))
}

func TestEmulatorHoldsNoMoreThanItMay(t *testing.T) {
	b := newBench(t, sim.LinkConfig{Delay: time.Hour}, sim.LinkConfig{})
	b.Start()
	for range maxPackets {
		p := b.take()
		require.NotNil(t, p)
		b.dirs[Down].line.Push(p)
	}
	require.Nil(t, b.take())
	require.Zero(t, writePacket(b.server, make([]byte, 600)))
	b.receive(&b.dirs[Down])
	r := b.Report(0, time.Hour).Down
	assert.Equal(t, 1, r.Sent)
	assert.Equal(t, Drops{Held: 1}, r.Drops, "what does not fit is dropped, and said to be")
}

func TestEmulatorReportsRefusedPackets(t *testing.T) {
	b := newBench(t, sim.LinkConfig{}, sim.LinkConfig{})
	b.Start()
	require.Zero(t, writePacket(b.server, make([]byte, 600)))
	b.receive(&b.dirs[Down])
	b.dirs[Down].out = -1
	for b.dirs[Down].line.Len() > 0 {
		b.deliver(&b.dirs[Down])
	}
	r := b.Report(0, time.Hour).Down
	assert.Equal(t, Drops{Failed: 1}, r.Drops)
	assert.Zero(t, r.Lateness.Count)
}

// history is a record written by hand.
func history(tb testing.TB, down sim.LinkConfig, entries ...entry) *Path {
	tb.Helper()
	p := &Path{record: newRecord()}
	p.History = History{p.readRecord}
	p.cfg.Down = down
	p.zero.Store(1)
	quit, done := make(chan struct{}), make(chan struct{})
	go func() { p.record.supply(quit); close(done) }()
	for _, e := range entries {
		p.record.add(e)
	}
	close(quit)
	<-done
	return p
}

func at(ms float64) cc.Time { return 1 + cc.Time(ms*1e6) }

// brief leaves out the centiles.
func brief(q Quantiles) Quantiles {
	q.Centiles = [101]time.Duration{}
	return q
}

func TestReport(t *testing.T) {
	const ms = time.Millisecond
	p := history(
		t, sim.LinkConfig{Rate: 12e6, Delay: 10 * ms},
		entry{at: at(1), departs: at(2), arrives: at(12), size: 1500, late: int32(ms)},
		entry{at: at(1), departs: at(3), arrives: at(13), size: 1500, late: int32(2 * ms)},
		entry{at: at(2), departs: at(4), arrives: at(14), size: 60, late: int32(3 * ms)},
		entry{at: at(3), size: 1500, drop: sim.DropQueue},
		entry{at: at(4), size: 1500, drop: sim.DropLoss},
		entry{at: at(5), size: 1500, drop: dropHeld},
		entry{at: at(5), departs: at(9), arrives: at(19), size: 1000, late: lateFailed},
		entry{at: at(5), departs: at(6), arrives: at(6), size: 70, dir: Up, late: latePending},
		entry{at: at(6), departs: at(20), arrives: at(30), size: 1500, late: latePending},
	)
	r := p.Report(0, 10*ms)
	assert.Equal(t, 8, r.Down.Sent)
	assert.Equal(t, Drops{Queue: 1, Loss: 1, Held: 1, Failed: 1}, r.Down.Drops)
	assert.Equal(t, 4, r.Down.Delivered, "the last packet leaves after the window")
	assert.Equal(t, cc.Bytes(4060), r.Down.Bytes)
	assert.Equal(t, cc.Rate(4060*8*100), r.Down.Throughput)
	assert.Equal(t, Quantiles{
		Count: 4, Delays: sim.Delays{Mean: 2250 * time.Microsecond, P50: 2 * ms, P95: 4 * ms, P99: 4 * ms, Max: 4 * ms},
	}, brief(r.Down.Queueing))
	assert.Equal(t, 3, r.Down.DataQueueing.Count)
	assert.Equal(t, 14*ms, r.Down.DataOneWay.Max)
	assert.Equal(t, Quantiles{
		Count: 3, Delays: sim.Delays{Mean: 2 * ms, P50: 2 * ms, P95: 3 * ms, P99: 3 * ms, Max: 3 * ms},
	}, brief(r.Down.Lateness))
	assert.Equal(t, cc.Bytes(15_000), r.Down.Offered)
	assert.InDelta(t, 4060.0/15000, r.Down.Utilisation, 1e-9)
	assert.Equal(t, 1, r.Up.Sent)
	assert.Zero(t, r.Up.Offered, "an unlimited link offers no number")
	assert.Zero(t, r.Up.Utilisation)

	// Windows side by side share nothing and lose nothing.
	rapid.Check(t, func(t *rapid.T) {
		cut := time.Duration(rapid.Int64Range(1, int64(39*ms)).Draw(t, "cut"))
		whole, a, b := p.Report(0, 40*ms).Down, p.Report(0, cut).Down, p.Report(cut, 40*ms).Down
		assert.Equal(t, whole.Sent, a.Sent+b.Sent)
		assert.Equal(t, whole.Bytes, a.Bytes+b.Bytes)
		assert.Equal(t, whole.Drops.Total(), a.Drops.Total()+b.Drops.Total())
		assert.Equal(t, whole.Queueing.Count, a.Queueing.Count+b.Queueing.Count)
	})
	assert.Equal(t, Report{}, p.Report(5, 5), "no window, no numbers")
}

func TestQuantiles(t *testing.T) {
	var v []time.Duration
	for i := 100; i >= 1; i-- {
		v = append(v, time.Duration(i))
	}
	assert.Equal(t, Quantiles{Count: 100, Delays: sim.Delays{Mean: 50, P50: 50, P95: 95, P99: 99, Max: 100}},
		brief(quantiles(v)))
	assert.Equal(t, time.Duration(25), quantiles(v).Centiles[25])
	assert.Equal(t, [2]time.Duration{1, 100}, [2]time.Duration{quantiles(v).Centiles[0], quantiles(v).Centiles[100]})
	assert.Equal(t, Quantiles{Count: 1, Delays: sim.Delays{Mean: 7, P50: 7, P95: 7, P99: 7, Max: 7}},
		brief(quantiles([]time.Duration{7})))
	assert.Zero(t, quantiles(nil))
}
