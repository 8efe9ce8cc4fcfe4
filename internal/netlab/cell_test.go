//go:build linux

package netlab

import (
	"cmp"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

const milli = time.Millisecond

// newCell is a lab of two hosts in a cell of 50 Mbit/s.
func newCell(tb testing.TB) *Cellular {
	return newCellular(tb, CellularConfig{
		Cell: &sim.CellConfig{Delay: 10 * milli, Hosts: []sim.CellHost{{QueueBytes: 500_000}}},
		Up:   sim.LinkConfig{Delay: 10 * milli}, Hosts: 2,
	})
}

// send sends n datagrams as fast as they are taken.
func send(tb testing.TB, from *Node, to *net.UDPConn, n, size int) {
	tb.Helper()
	out, err := from.Dial("udp", to.LocalAddr().String())
	require.NoError(tb, err)
	defer out.Close()
	for range n {
		_, err := out.Write(make([]byte, size))
		require.NoError(tb, err)
	}
}

func listenUDP(tb testing.TB, c *Cellular, addr netip.Addr) *net.UDPConn {
	tb.Helper()
	var sink *net.UDPConn
	require.NoError(tb, c.Client.Do(func() (err error) {
		sink, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))
		return err
	}))
	tb.Cleanup(func() { _ = sink.Close() })
	return sink
}

// handedOver waits until the fate of n packets downwards is known, and all that
// left are handed over.
func handedOver(tb testing.TB, p *Path, n int) {
	tb.Helper()
	require.Eventually(tb, func() bool {
		r := p.Report(0, time.Hour).Down
		return r.Sent >= n && r.Lateness.Count == r.Delivered
	}, 10*time.Second, 5*milli)
}

// One host is flooded, the other gets a trickle
// behind that: who waits is the first.
func TestACellsHostsDoNotWaitForEachOther(t *testing.T) {
	for name, pick := range map[string]func(Addrs) netip.Addr{
		"IPv4": func(a Addrs) netip.Addr { return a.V4 }, "IPv6": func(a Addrs) netip.Addr { return a.V6 },
	} {
		t.Run(name, func(t *testing.T) {
			c := newCell(t)
			flooded, spared := listenUDP(t, c, pick(c.Hosts[0])), listenUDP(t, c, pick(c.Hosts[1]))
			c.Path.Start()
			buf := make([]byte, MTU)
			rounds, overtaken := 0, 0
			for ; overtaken == 0 && rounds < 20; rounds++ { // a machine that stands still lets the flood drain
				send(t, c.Server, flooded, 500, 1400)
				send(t, c.Server, spared, 5, 1400)
				for range 5 {
					_, err := spared.Read(buf)
					require.NoError(t, err)
				}
				handedOver(t, c.Path, 505*(rounds+1))
				overtaken = overtakenBy(c.Path, 1)
			}
			assert.Positive(t, overtaken, "its own queue, and not the other's")
			whole := c.Path.Report(0, time.Hour).Down
			first, second := c.Path.HostReport(0, 0, time.Hour).Down, c.Path.HostReport(1, 0, time.Hour).Down
			assert.Equal(t, 500*rounds, first.Sent)
			assert.Equal(t, 5*rounds, second.Delivered)
			assert.Equal(t, first.Sent, first.Delivered+first.Drops.Queue)
			assert.Equal(t, whole.Delivered, first.Delivered+second.Delivered)
			assert.Equal(t, second.DataQueueing.Max+10*milli, second.DataOneWay.Max)
		})
	}
}

// overtakenBy counts the packets downwards of other hosts that came before one of
// the host's and left after it.
func overtakenBy(p *Path, host uint16) (n int) {
	var down []entry
	for e := range p.record.all {
		if e.dir == Down && e.drop == sim.DropNone {
			down = append(down, *e)
		}
	}
	for _, e := range down {
		for _, other := range down {
			if e.host == host && other.host != host && other.at < e.at && other.departs > e.departs {
				n++
			}
		}
	}
	return n
}

// The record of a cell in real time is the schedule of one in virtual time that
// the same packets came to at the same moments.
func TestACellsRecordIsItsSchedule(t *testing.T) {
	c := newCell(t)
	sinks := []*net.UDPConn{listenUDP(t, c, c.Hosts[0].V4), listenUDP(t, c, c.Hosts[1].V4)}
	c.Path.Start()
	for range 20 {
		send(t, c.Server, sinks[0], 15, 1400)
		send(t, c.Server, sinks[1], 7, 900)
	}
	handedOver(t, c.Path, 20*22)
	var arrivals []entry
	for e := range c.Path.record.all {
		if e.dir == Down {
			arrivals = append(arrivals, *e)
		}
	}
	slices.SortStableFunc(arrivals, func(a, b entry) int { return cmp.Compare(a.at, b.at) })
	cell := sim.NewCell(*c.Path.cfg.Cell, cc.Time(c.Path.zero.Load()))
	var waiting [2][]entry
	check := func(gone []sim.Departure) {
		for _, g := range gone {
			require.NotEmpty(t, waiting[g.Lane])
			e := waiting[g.Lane][0]
			waiting[g.Lane] = waiting[g.Lane][1:]
			require.Equal(t, g.Departs, e.departs)
			require.Equal(t, g.Arrives, e.arrives)
		}
	}
	for _, e := range arrivals {
		check(cell.Advance(e.at))
		_, v, _ := cell.Enqueue(e.at, int(e.host), cc.Bytes(e.size), 0, sim.NotECT)
		require.Equal(t, e.drop, v.Dropped)
		if e.drop == sim.DropNone {
			waiting[e.host] = append(waiting[e.host], e)
		}
	}
	check(cell.Advance(cell.Next().Add(time.Hour)))
	assert.Empty(t, waiting[0])
	assert.Empty(t, waiting[1])
}

func TestAMonitorTellsEachHostOfACell(t *testing.T) {
	c := newCell(t)
	_, ok := c.Path.Monitor(0).Hint()
	assert.False(t, ok, "it has not started")
	sink := listenUDP(t, c, c.Hosts[0].V4)
	c.Path.Start()
	send(t, c.Server, sink, 200, 1400)
	handedOver(t, c.Path, 1)
	h, ok := c.Path.Monitor(0).Hint()
	require.True(t, ok)
	assert.EqualValues(t, 50e6, h.LinkRate)
	assert.LessOrEqual(t, h.QueueRoom, cc.Bytes(500_000))
	other, ok := c.Path.Monitor(1).Hint()
	require.True(t, ok)
	assert.EqualValues(t, 500_000, other.QueueRoom)
	assert.EqualValues(t, 1, other.ArrivalRate, "nothing comes for it, which is known")
	require.NoError(t, c.Close())
	_, ok = c.Path.Monitor(0).Hint()
	assert.False(t, ok, "it is closed")
}

// A link's and a cell's delay can be changed while they run; from then on
// packets arrive by the new one.
func TestSetDelay(t *testing.T) {
	for name, cfg := range map[string]CellularConfig{
		"a link": {Down: sim.LinkConfig{Rate: 50e6, Delay: 10 * milli}},
		"a cell": {Cell: &sim.CellConfig{Delay: 10 * milli}},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCellular(t, cfg)
			sink := listenUDP(t, c, c.Hosts[0].V4)
			c.Path.Start()
			buf := make([]byte, MTU)
			for i, delay := range []time.Duration{10 * milli, 40 * milli, 5 * milli} {
				if i > 0 {
					require.NoError(t, c.Path.SetDelay(delay))
				}
				send(t, c.Server, sink, 1, 1400)
				_, err := sink.Read(buf)
				require.NoError(t, err)
			}
			var behind []time.Duration
			for e := range c.Path.record.all {
				behind = append(behind, e.arrives.Sub(e.departs))
			}
			assert.Equal(t, []time.Duration{10 * milli, 40 * milli, 5 * milli}, behind)
			assert.ErrorContains(t, c.Path.SetDelay(-milli), "is negative")
			require.NoError(t, c.Close())
			assert.ErrorIs(t, c.Path.SetDelay(milli), errPathClosed)
		})
	}
}

func TestACellRefusesWhatItCannotBe(t *testing.T) {
	needPath(t)
	_, err := NewCellular(CellularConfig{Down: sim.LinkConfig{Rate: 1e6}, Cell: &sim.CellConfig{}})
	assert.ErrorContains(t, err, "a cell takes the place of the link down")
	_, err = NewCellular(CellularConfig{Cell: &sim.CellConfig{Blocks: -1}})
	assert.ErrorContains(t, err, "-1 blocks")
	_, err = NewCellular(CellularConfig{Cell: &sim.CellConfig{}, Hosts: 101})
	assert.ErrorContains(t, err, "up to 100")
}
