//go:build linux

package netlab

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// The link of the studies this emulator is for: 12 Mbit/s, 20 ms, so that a full
// packet takes a millisecond.
func twelve(queue int) CellularConfig {
	l := sim.LinkConfig{Rate: 12e6, Delay: 10 * time.Millisecond, QueuePackets: queue}
	return CellularConfig{Down: l, Up: l}
}

// settled waits until every packet so far has been handed over, and returns the
// whole record's report.
func settled(tb testing.TB, p *Path) Report {
	tb.Helper()
	require.Eventually(tb, func() bool {
		done := true
		p.record.all(func(e *entry) bool {
			if late, _ := e.lateness(); e.drop == sim.DropNone && late == time.Duration(latePending) {
				done = false
			}
			return done
		})
		return done
	}, 20*time.Second, 5*time.Millisecond, "the path never drains")
	missed, err := p.Missed()
	require.NoError(tb, err)
	require.Zero(tb, missed, "a device dropped packets before the emulator saw them")
	return p.Report(0, p.Elapsed())
}

func TestCubicFillsTheBuffer(t *testing.T) {
	c := newCellular(t, twelve(250))
	out, in := connect(t, c.Client, c.Server, c.ServerAddr.V4)
	congestion(t, in, "cubic")
	c.Path.StartOnData()
	read := make(chan int64, 1)
	go func() {
		n, _ := io.Copy(io.Discard, out) // what went wrong shows in n
		read <- n
	}()
	var wrote int64
	chunk := make([]byte, 1<<16)
	for c.Path.Report(0, time.Hour).Down.Drops.Queue == 0 {
		if took := time.Duration(float64(wrote) * 8 / 12e6 * 1e9); took > 20*time.Second {
			if e := c.Path.Elapsed(); e > 3*took/2 {
				t.Skipf("the machine is too busy: %v for what the link carries in %v", e, took)
			}
			require.Fail(t, "cubic fills the buffer until it overflows")
		}
		n, err := in.Write(chunk)
		require.NoError(t, err)
		wrote += int64(n)
	}
	require.NoError(t, in.CloseWrite())
	require.Equal(t, wrote, <-read)

	r := settled(t, c.Path)
	t.Logf("down: %s, utilisation %.3f, queueing %v, drops %+v, lateness %v",
		r.Down.Throughput, r.Down.Utilisation, r.Down.DataQueueing, r.Down.Drops, r.Down.Lateness)
	assert.Zero(t, r.Down.Drops.Loss+r.Down.Drops.Held+r.Down.Drops.Failed)
	assert.Equal(t, r.Down.Drops.Queue, r.Down.Sent-r.Down.Delivered)
	assert.Greater(t, r.Down.DataQueueing.Max, 240*time.Millisecond, "a full buffer takes 250 ms to drain")
	assert.LessOrEqual(t, r.Down.DataQueueing.Max, 252*time.Millisecond, "the schedule knows no wall clock")
	assert.Equal(t, r.Down.DataQueueing.P95+10*time.Millisecond, r.Down.DataOneWay.P95)
	assert.Greater(t, r.Down.Bytes, cc.Bytes(wrote))
	assert.LessOrEqual(t, r.Down.Utilisation, 1.0)
	assert.Positive(t, r.Up.Sent)
	assert.Zero(t, r.Up.DataQueueing.Count, "acknowledgements carry no data")
	assert.Equal(t, r.Down.Delivered, r.Down.Lateness.Count)

	const step = 100 * time.Millisecond
	points := c.Path.Series(Down, c.Path.Elapsed()+step, step) // whole steps
	require.NotEmpty(t, points)
	var bits float64
	for _, p := range points {
		bits += float64(p.Throughput) * step.Seconds()
		assert.LessOrEqual(t, p.Throughput, cc.Rate(12.2e6), "no step carries more than the link and a packet")
	}
	assert.InDelta(t, float64(r.Down.Bytes)*8, bits, 1500*8*100, "the series adds up to the report")
}

func TestRoundTripIsNeverShort(t *testing.T) {
	c := newCellular(t, twelve(250))
	for _, addr := range []netip.Addr{c.ServerAddr.V4, c.ServerAddr.V6} {
		out, in := connect(t, c.Client, c.Server, addr)
		c.Path.Start()
		b := make([]byte, 1)
		for range 20 {
			start := time.Now()
			_, err := out.Write(b)
			require.NoError(t, err)
			_, err = io.ReadFull(in, b)
			require.NoError(t, err)
			_, err = in.Write(b)
			require.NoError(t, err)
			_, err = io.ReadFull(out, b)
			require.NoError(t, err)
			require.GreaterOrEqual(t, time.Since(start), 20*time.Millisecond)
		}
	}
}

func TestTransferIsExactBothWaysAtOnce(t *testing.T) {
	l := sim.LinkConfig{Rate: 50e6, Delay: 2 * time.Millisecond, QueuePackets: 100}
	c := newCellular(t, CellularConfig{Down: l, Up: l})
	c.Path.Start()
	for _, addr := range []netip.Addr{c.ServerAddr.V4, c.ServerAddr.V6} {
		down, up := make(chan error, 1), make(chan error, 1)
		for i, result := range []chan error{down, up} {
			out, in := connect(t, c.Client, c.Server, addr)
			if i == 0 {
				out, in = in, out
			}
			go func() {
				sent, received, err := transfer(out, in, 2<<20, uint64(i))
				if err == nil {
					assert.Equal(t, sent, received)
				}
				result <- err
			}()
		}
		require.NoError(t, <-down)
		require.NoError(t, <-up)
	}
	r := settled(t, c.Path)
	assert.Greater(t, r.Down.Bytes, cc.Bytes(4<<20))
	assert.Greater(t, r.Up.Bytes, cc.Bytes(4<<20))
	assert.LessOrEqual(t, r.Down.Utilisation, 1.0)
	assert.LessOrEqual(t, r.Up.Utilisation, 1.0)
}

// flood sends n datagrams from the server to the client as fast as it can. What
// it returns waits until as many have come out as it is told, and a little longer
// for one too many, and says how many there were.
func flood(t *testing.T, c *Cellular, n, size int) func(awaited int) int {
	t.Helper()
	var sink *net.UDPConn
	require.NoError(t, c.Client.Do(func() (err error) {
		sink, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(c.ClientAddr.V4, 0)))
		return err
	}))
	raw, err := sink.SyscallConn()
	require.NoError(t, err)
	var set error
	require.NoError(t, raw.Control(func(fd uintptr) {
		set = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 32<<20)
	}))
	require.NoError(t, set)
	connect(t, c.Client, c.Server, c.ServerAddr.V4) // the neighbours know each other now
	c.Path.Start()
	src, err := c.Server.Dial("udp", sink.LocalAddr().String())
	require.NoError(t, err)
	for range n {
		_, err := src.Write(make([]byte, size))
		require.NoError(t, err)
	}
	require.NoError(t, src.Close())
	return func(awaited int) int {
		got, b := 0, make([]byte, MTU)
		for {
			wait := 20 * time.Second // for what the kernel has yet to hand over
			if got >= awaited {
				wait = 50 * time.Millisecond
			}
			require.NoError(t, sink.SetReadDeadline(time.Now().Add(wait)))
			if _, err := sink.Read(b); err != nil {
				require.NoError(t, sink.Close())
				return got
			}
			got++
		}
	}
}

func TestDropsAreCounted(t *testing.T) {
	const datagrams = 2000
	for _, tt := range []struct {
		name string
		link sim.LinkConfig
		want func(Drops) int // the only reason there may be
	}{
		{
			"a queue of 50 packets drops its tail",
			sim.LinkConfig{Rate: 50e6, Delay: time.Millisecond, QueuePackets: 50},
			func(d Drops) int { return d.Queue },
		},
		{
			"a queue of 60000 bytes drops its tail",
			sim.LinkConfig{Rate: 50e6, Delay: time.Millisecond, QueueBytes: 60_000},
			func(d Drops) int { return d.Queue },
		},
		{
			"a lossy link loses at random",
			sim.LinkConfig{Rate: 200e6, Delay: time.Millisecond, Loss: 0.1, Seed: 7},
			func(d Drops) int { return d.Loss },
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newCellular(t, CellularConfig{Down: tt.link})
			count := flood(t, c, datagrams, 1000)
			require.Eventually(t, func() bool { return c.Path.Report(0, time.Hour).Down.Sent == datagrams },
				10*time.Second, 5*time.Millisecond)
			r := settled(t, c.Path)
			assert.Positive(t, tt.want(r.Down.Drops))
			assert.Equal(t, r.Down.Drops.Total(), tt.want(r.Down.Drops), "nothing is lost for another reason: %+v",
				r.Down.Drops)
			arrived := datagrams - r.Down.Drops.Total()
			assert.Equal(t, arrived, count(arrived), "what the record says arrived, arrived")
			assert.Equal(t, cc.Bytes(arrived*1028), r.Down.Bytes, "IP bytes, headers included")
			assert.LessOrEqual(t, r.Down.Utilisation, 1.0)
		})
	}
}

func TestTraceWithAnOutage(t *testing.T) {
	var lines strings.Builder
	for ms := 1; ms <= 100; ms++ { // 12 Mbit/s for 100 ms, nothing for 100 ms
		fmt.Fprintln(&lines, ms)
	}
	lines.WriteString("200\n")
	trace, err := sim.ReadTrace("outage", strings.NewReader(lines.String()))
	require.NoError(t, err)
	c := newCellular(t, CellularConfig{Down: sim.LinkConfig{Trace: trace, QueuePackets: 400}})
	count := flood(t, c, 300, 1472) // 1500 bytes of IP: one opportunity each
	require.Eventually(t, func() bool { return c.Path.Report(0, time.Hour).Down.Sent == 300 }, 10*time.Second, time.Millisecond)
	r := settled(t, c.Path)
	assert.Equal(t, 300, count(300))
	assert.LessOrEqual(t, r.Down.Utilisation, 1.0)
	assert.Less(t, c.Path.Report(0, 498*time.Millisecond).Down.Delivered, 300,
		"the 300th opportunity comes after 498 ms")
	silent := 0
	for _, p := range c.Path.Series(Down, 600*time.Millisecond, 100*time.Millisecond) {
		if p.Offered < 1e6 {
			silent++
			assert.LessOrEqual(t, p.Throughput, p.Offered)
		}
	}
	assert.Equal(t, 3, silent)
}

func TestNothingIsRecordedBeforeTheStart(t *testing.T) {
	c := newCellular(t, CellularConfig{
		Down: sim.LinkConfig{Rate: 12e6, Delay: time.Millisecond, QueuePackets: 10},
		Up:   sim.LinkConfig{Rate: 12e6, Delay: time.Millisecond, QueuePackets: 10},
	})
	out, in := connect(t, c.Client, c.Server, c.ServerAddr.V4)
	require.Zero(t, c.Path.Elapsed())
	require.Zero(t, c.Path.Report(0, time.Hour).Up.Sent)
	require.Empty(t, c.Path.Series(Up, time.Hour, time.Second))
	c.Path.StartOnData()

	small, big := make([]byte, 1), make([]byte, 4000)
	_, err := out.Write(small)
	require.NoError(t, err)
	_, err = io.ReadFull(in, small)
	require.NoError(t, err)
	require.Zero(t, c.Path.Elapsed(), "a small packet does not start the path")
	_, err = in.Write(big)
	require.NoError(t, err)
	_, err = io.ReadFull(out, big)
	require.NoError(t, err)
	require.Positive(t, c.Path.Elapsed())
	r := settled(t, c.Path)
	// More, and less of a queue, where the machine stood still in between.
	assert.GreaterOrEqual(t, r.Down.DataQueueing.Count, 3, "the packet that starts the path is its first")
	assert.GreaterOrEqual(t, r.Down.DataQueueing.Max, time.Millisecond, "one packet's time on the link at least")
}

// BenchmarkLateness reports how late the emulator hands packets over while a
// kernel cubic flow fills the link. An iteration is a quarter of a megabyte.
func BenchmarkLateness(b *testing.B) {
	link := func(rate cc.Rate) CellularConfig {
		l := sim.LinkConfig{Rate: rate, Delay: 10 * time.Millisecond, QueuePackets: 250}
		return CellularConfig{Down: l, Up: l}
	}
	cell := link(50e6)
	cell.Down, cell.Cell = sim.LinkConfig{}, &sim.CellConfig{
		Delay: 10 * time.Millisecond,
		Hosts: []sim.CellHost{{QueuePackets: 250}},
	}
	for _, bench := range []struct {
		name string
		cfg  CellularConfig
	}{{"12 Mbit/s", link(12e6)}, {"50 Mbit/s", link(50e6)}, {"cell of 50 Mbit/s", cell}} {
		b.Run(bench.name, func(b *testing.B) {
			c := newCellular(b, bench.cfg)
			out, in := connect(b, c.Client, c.Server, c.ServerAddr.V4)
			congestion(b, in, "cubic")
			c.Path.Start()
			go func() {
				zeros := make([]byte, 1<<16)
				for {
					if _, err := in.Write(zeros); err != nil {
						return
					}
				}
			}()
			for b.Loop() {
				_, err := io.CopyN(io.Discard, out, 1<<18)
				require.NoError(b, err)
			}
			late := c.Path.Report(0, c.Path.Elapsed()).Down.Lateness
			b.SetBytes(1 << 18)
			for _, m := range []struct {
				unit string
				d    time.Duration
			}{{"p50-µs", late.P50}, {"p99-µs", late.P99}, {"max-µs", late.Max}} {
				b.ReportMetric(float64(m.d)/1e3, m.unit)
			}
		})
	}
}
