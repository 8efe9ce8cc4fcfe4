//go:build linux

package kernel

import (
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

// Go's allocator has pieces of 448 and of 480 bytes.
func TestALegIsSmall(t *testing.T) {
	assert.LessOrEqual(t, unsafe.Sizeof(Conn{}), uintptr(488), "its addresses are in it")
}

// patience bounds a failure; nothing waits for it.
const patience = 10 * time.Second

// eachSide runs a test with either leg of a pair as the one that ends.
func eachSide(t *testing.T, test func(t *testing.T, leg, peer *Conn)) {
	d := still(t, Config{})
	dialled, accepted := d.pair(t, loopback4)
	t.Run("dialled", func(t *testing.T) { test(t, dialled, accepted) })
	dialled, accepted = d.pair(t, loopback4)
	t.Run("accepted", func(t *testing.T) { test(t, accepted, dialled) })
}

// crash closes the socket as the kernel does when the process dies.
func (c *Conn) crash(t *testing.T) {
	t.Helper()
	require.NoError(t, c.raw.Close())
}

// stuff writes until the socket takes no more.
func (c *Conn) stuff(t *testing.T) (total int) {
	t.Helper()
	b := make([]byte, 64<<10)
	require.NoError(t, c.raw.Write(func(fd uintptr) bool {
		for {
			n, err := unix.Write(int(fd), b)
			if err != nil {
				return assert.ErrorIs(t, err, unix.EAGAIN)
			}
			total += n
		}
	}))
	return total
}

func TestACrashDoesNotLookLikeTheEnd(t *testing.T) {
	for name, first := range map[string]func(t *testing.T, leg, peer *Conn){
		"in an open connection":         func(*testing.T, *Conn, *Conn) {},
		"after the peer's end":          func(t *testing.T, _, peer *Conn) { require.NoError(t, peer.CloseWrite()) },
		"with bytes that wait to leave": func(t *testing.T, leg, _ *Conn) { leg.stuff(t) },
	} {
		t.Run(name, func(t *testing.T) {
			eachSide(t, func(t *testing.T, leg, peer *Conn) {
				first(t, leg, peer)
				leg.crash(t)
				_, err := io.Copy(io.Discard, peer)
				assert.ErrorIs(t, err, unix.ECONNRESET)
			})
		})
	}
}

func TestACrashAfterOurEndResetsThePeerThatGoesOn(t *testing.T) {
	eachSide(t, func(t *testing.T, leg, peer *Conn) {
		_, err := leg.Write([]byte("whole"))
		require.NoError(t, err)
		require.NoError(t, leg.CloseWrite())
		got, err := io.ReadAll(peer)
		require.NoError(t, err)
		require.Equal(t, "whole", string(got))
		assert.False(t, peer.Aborted())
		leg.crash(t)
		assert.True(t, peer.Aborted())
	})
}

func TestCloseDeliversWhatWaits(t *testing.T) {
	eachSide(t, func(t *testing.T, leg, peer *Conn) {
		total := leg.stuff(t)
		require.NoError(t, leg.Close())
		_ = leg.Reset() // comes too late
		got, err := io.Copy(io.Discard, peer)
		require.NoError(t, err)
		assert.Equal(t, int64(total), got)
	})
}

func TestAResetDiscardsWhatWaits(t *testing.T) {
	eachSide(t, func(t *testing.T, leg, peer *Conn) {
		leg.stuff(t)
		require.NoError(t, leg.Reset())
		_, err := io.Copy(io.Discard, peer)
		assert.ErrorIs(t, err, unix.ECONNRESET)
	})
}

func TestNothingIsUndeliveredToAPeerThatHasReset(t *testing.T) {
	eachSide(t, func(t *testing.T, leg, peer *Conn) {
		leg.stuff(t)
		n, err := leg.Undelivered()
		require.NoError(t, err)
		require.Positive(t, n)
		require.NoError(t, peer.Reset())
		require.Eventually(t, func() bool {
			n, err := leg.Undelivered()
			return err == nil && n == 0
		}, patience, time.Millisecond)
	})
}

func TestMarksOfTheHandshakeAreKnown(t *testing.T) {
	privileged := bpf.Check()
	const client, server = 46, 34 // EF, AF41
	for name, c := range map[string]struct{ listen, dial string }{
		"IPv4":                          {"127.0.0.1:0", "127.0.0.1"},
		"IPv6":                          {"[::1]:0", "::1"},
		"IPv4 on a socket of both ways": {"[::]:0", "127.0.0.1"},
	} {
		t.Run(name, func(t *testing.T) {
			d := still(t, Config{})
			ln, err := Listen(t.Context(), c.listen, false)
			require.NoError(t, err)
			port := ln.Addr().(*net.TCPAddr).AddrPort().Port()
			to := netip.AddrPortFrom(netip.MustParseAddr(c.dial), port)
			raw, err := ln.SyscallConn()
			require.NoError(t, err)
			require.NoError(t, datapath.Control(raw, func(fd int) error {
				if err := setDSCP(fd, true, server); err != nil {
					return err
				}
				if c.listen == "127.0.0.1:0" {
					return nil
				}
				return setDSCP(fd, false, server)
			}))
			accepted := make(chan *Conn, 1)
			l, err := d.Listener(ln)
			require.NoError(t, err)
			go func() {
				_ = l.Serve(func(conn datapath.Conn) { accepted <- conn.(*Conn) }, nil)
			}()
			defer l.Close() //nolint:errcheck // it only listened
			dialled, err := d.Dial(t.Context(), DialConfig{
				Target: to, DSCP: func(at netip.AddrPort) (uint8, bool) {
					assert.Equal(t, to, at)
					return client, true
				},
			})
			require.NoError(t, err)
			defer dialled.Close() //nolint:errcheck // nothing was written
			conn := <-accepted
			defer conn.Close() //nolint:errcheck // nothing was written

			assert.EqualValues(t, client, conn.ReceivedDSCP())
			if name != "IPv6" && privileged != nil {
				assert.Zero(t, dialled.ReceivedDSCP())
			} else {
				assert.EqualValues(t, server, dialled.ReceivedDSCP())
			}
			for _, leg := range []*Conn{conn, dialled} {
				require.NoError(t, leg.SetDSCP(8))
				require.NoError(t, leg.raw.Visit(func(fd int) error {
					level, option := unix.IPPROTO_IP, unix.IP_TOS
					if name == "IPv6" {
						level, option = unix.IPPROTO_IPV6, unix.IPV6_TCLASS
					}
					tos, err := unix.GetsockoptInt(fd, level, option)
					assert.Equal(t, 8<<2, tos&^3)
					return err
				}))
			}
		})
	}
}

// TestLegsGoOnInAnotherDatapath moves both legs of a connection, with bytes that its peer has not read, between
// datapaths of all tiers. The last case takes them back.
func TestLegsGoOnInAnotherDatapath(t *testing.T) {
	needsEBPF(t)
	for _, tt := range []struct{ from, to string }{{EBPF, EBPF}, {EBPF, "reno"}, {"reno", EBPF}, {EBPF, ""}} {
		from := start(t, Config{Envelope: tt.from})
		to := from
		if tt.to != "" {
			to = start(t, Config{Envelope: tt.to})
		}
		leg, peer := from.pair(t, loopback4)
		system := leg.Info().Envelope
		leg.Enforce(datapath.HoldAll, 0)
		leg.Observe(func(flow.Report) {})
		leg.Apply(flow.Limit{Cwnd: 1 << 20, PacingRate: 80e6})
		pass(t, leg, peer, 300_000)
		_, err := leg.Write(make([]byte, 10_000))
		require.NoError(t, err)
		require.NoError(t, peer.CloseWrite())

		one, two, err := Detach(leg, peer)
		require.NoError(t, err)
		_, err = leg.Write([]byte("x"))
		require.ErrorIs(t, err, net.ErrClosed)
		assert.ErrorIs(t, leg.Close(), net.ErrClosed, "which must not end the connection")
		leg, err = to.Attach(one, nil)
		require.NoError(t, err)
		peer, err = to.Attach(two, leg)
		require.NoError(t, err)
		assert.Equal(t, leg.raw.Loop(), peer.raw.Loop())
		assert.Equal(t, system, leg.Info().Envelope, "no limit is in force yet")

		var acked atomic.Int64
		leg.Enforce(datapath.HoldAll, 0)
		leg.Observe(func(r flow.Report) { acked.Store(int64(r.Acked)) })
		leg.Apply(flow.Limit{Cwnd: 1 << 20})
		assert.Equal(t, to.Envelope(), leg.Info().Envelope)
		_, err = io.CopyN(io.Discard, peer, 10_000)
		require.NoError(t, err)
		pass(t, leg, peer, 300_000)
		assert.Eventually(t, func() bool { return acked.Load() == 300_000 }, 10*time.Second, time.Millisecond,
			"reports count from the move on: %d", acked.Load())
		_, err = leg.Read(make([]byte, 1))
		assert.ErrorIs(t, err, io.EOF)
		require.NoError(t, leg.Close())
		_, err = peer.Read(make([]byte, 1))
		assert.ErrorIs(t, err, io.EOF)
		require.NoError(t, peer.Close())
	}
}
