//go:build linux

package netlab

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

func sniff(tb testing.TB, n *Node, device string) *Sniffer {
	tb.Helper()
	s, err := n.Sniff(device)
	require.NoError(tb, err)
	tb.Cleanup(func() {
		_, err := s.Stop()
		require.NoError(tb, err)
	})
	return s
}

func stop(tb testing.TB, s *Sniffer) Capture {
	tb.Helper()
	c, err := s.Stop()
	require.NoError(tb, err)
	return c
}

func tcpInfo(tb testing.TB, c *net.TCPConn) *unix.TCPInfo {
	tb.Helper()
	raw, err := c.SyscallConn()
	require.NoError(tb, err)
	var info *unix.TCPInfo
	var readErr error
	require.NoError(tb, raw.Control(func(fd uintptr) {
		info, readErr = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	}))
	require.NoError(tb, readErr)
	return info
}

func ends(c *net.TCPConn) (local, remote netip.AddrPort) {
	unmap := func(a net.Addr) netip.AddrPort {
		ap := a.(*net.TCPAddr).AddrPort()
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	}
	return unmap(c.LocalAddr()), unmap(c.RemoteAddr())
}

// TestWhatTheSnifferSaw compares the record with what the kernel says of the
// same connection, whose packets get lost.
func TestWhatTheSnifferSaw(t *testing.T) {
	const size = 2 << 20
	link := sim.LinkConfig{Rate: 50e6, Delay: 5 * time.Millisecond, QueuePackets: 100, Loss: 0.02, Seed: 1}
	for name, addr := range map[string]func(*Cellular) netip.Addr{
		"IPv4": func(c *Cellular) netip.Addr { return c.ClientAddr.V4 },
		"IPv6": func(c *Cellular) netip.Addr { return c.ClientAddr.V6 },
	} {
		t.Run(name, func(t *testing.T) {
			c := newCellular(t, CellularConfig{Down: link, Up: sim.LinkConfig{Delay: 5 * time.Millisecond}})
			c.Path.Start()
			s := sniff(t, c.Edge, NearDevice)
			out, in := connect(t, c.Edge, c.Client, addr(c))
			congestion(t, out, "reno")
			sent, received, err := transfer(out, in, size, 1)
			require.NoError(t, err)
			require.Equal(t, sent, received)
			var info *unix.TCPInfo
			require.Eventually(t, func() bool {
				info = tcpInfo(t, out)
				return info.Unacked == 0
			}, 10*time.Second, time.Millisecond, "the last acknowledgement is still underway when the receiver has "+
				"everything")
			capture := stop(t, s)
			require.Zero(t, capture.Missed)
			require.NotZero(t, info.Total_retrans, "the link loses packets")

			local, remote := ends(out)
			path := c.Path.Report(0, c.Path.Elapsed()).Down
			left := 0
			for i := range capture.Packets {
				p := &capture.Packets[i]
				assert.LessOrEqual(t, p.Size, cc.Bytes(MTU), "as on a wire")
				if p.Out {
					left++
					assert.Equal(t, local, p.Src)
				} else {
					assert.Equal(t, remote, p.Src)
				}
			}
			assert.Equal(t, path.Sent, left, "all that the link got")

			var bytes, resent cc.Bytes
			var end uint32 // of what was sent before
			for i, p := range capture.Packets {
				if !p.Out || p.Payload == 0 {
					continue
				}
				next := p.Seq + uint32(p.Payload)                                  //nolint:gosec // at most the MTU
				if bytes += p.Payload; i > 0 && end != 0 && int32(next-end) <= 0 { //nolint:gosec // it wraps
					resent += p.Payload
				} else {
					end = next
				}
			}
			assert.Equal(t, cc.Bytes(info.Bytes_sent), bytes, "as the kernel counts them")
			assert.Equal(t, cc.Bytes(info.Bytes_retrans), resent)
		})
	}
}

func TestTheSnifferFollowsItsNodesSide(t *testing.T) {
	needPath(t)
	r, err := NewRouted()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	s := sniff(t, r.Server, FarDevice) // a veth device, which segments by itself
	before := s.Elapsed()
	out, in := connect(t, r.Server, r.Client, r.ClientAddr.V6)
	_, _, err = transfer(out, in, 1<<20, 1)
	require.NoError(t, err)
	after := s.Elapsed()
	local, remote := ends(out)

	require.Eventually(t, func() bool {
		return len(s.Packets()) > 0
	}, 10*time.Second, time.Millisecond, "the record can be read while it grows")
	require.NoError(t, r.Close())
	capture := stop(t, s)
	assert.Equal(t, FarDevice, capture.Device)
	first := capture.Packets[0]
	assert.Equal(t, SYN, first.Flags)
	assert.True(t, first.Out)
	assert.Equal(t, [2]netip.AddrPort{local, remote}, [2]netip.AddrPort{first.Src, first.Dst})
	assert.GreaterOrEqual(t, first.At, before)
	assert.LessOrEqual(t, first.At, after)

	acked := uint32(0)
	for _, p := range capture.Packets {
		if !p.Out {
			acked = p.Ack
		}
	}
	assert.Equal(t, uint32(1<<20), acked-first.Seq-1, "all of it, behind the SYN")
	again := stop(t, s)
	assert.Equal(t, capture, again, "stopping twice is stopping once")
}

func TestTheSnifferCountsWhatItMissed(t *testing.T) {
	needPath(t)
	r, err := NewRouted()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	s := sniff(t, r.Server, FarDevice)
	conn, err := r.Server.Dial("udp", port(r.EdgeFar.V4, 9))
	require.NoError(t, err)
	defer conn.Close()

	const ring = sniffBlocks * sniffBlock / sniffFrame
	const excess = 500
	s.mu.Lock() // a reader that is kept from reading
	for sent := 0; sent < ring+excess; {
		if _, err := conn.Write([]byte("x")); err == nil { // else the edge said that nobody listens
			sent++
		}
	}
	s.mu.Unlock()
	capture := stop(t, s)
	assert.GreaterOrEqual(t, capture.Missed, excess)
	assert.Empty(t, capture.Packets, "there was no TCP")
}

func TestSniffingNamesTheDeviceThatIsMissing(t *testing.T) {
	lab := newLab(t)
	n, err := lab.Node("alone")
	require.NoError(t, err)
	_, err = n.Sniff("cell9")
	assert.ErrorContains(t, err, "netlab: sniff at cell9 in alone")
	require.NoError(t, lab.Close())
	_, err = n.Sniff("lo")
	assert.ErrorContains(t, err, "closed")
}
