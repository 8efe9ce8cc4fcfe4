//go:build linux

package kernel

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/datapath"
)

var errRefused = errors.New("refused by the guard")

func TestTheGuardSeesWhatIsDialled(t *testing.T) {
	d := still(t, Config{})
	ln, err := Listen(t.Context(), loopback4, false)
	require.NoError(t, err)
	defer ln.Close() //nolint:errcheck // it only listened
	target := ln.Addr().(interface{ AddrPort() netip.AddrPort }).AddrPort()

	for name, cfg := range map[string]DialConfig{
		"an address":           {Target: target},
		"an address as a name": {Host: target.String()},
		"a name, resolved":     {Host: netip.AddrPortFrom(target.Addr(), target.Port()).String()},
		"an IPv4 address written as IPv6": {
			Target: netip.AddrPortFrom(netip.AddrFrom16(target.Addr().As16()), target.Port()),
		},
	} {
		t.Run(name, func(t *testing.T) {
			var seen []netip.AddrPort
			cfg.Guard = func(ap netip.AddrPort) error {
				seen = append(seen, ap)
				return errRefused
			}
			_, err := d.Dial(t.Context(), cfg)
			require.ErrorIs(t, err, errRefused)
			assert.Equal(t, []netip.AddrPort{target}, seen)

			cfg.Guard = func(netip.AddrPort) error { return nil }
			c, err := d.Dial(t.Context(), cfg)
			require.NoError(t, err)
			require.NoError(t, c.Close())
		})
	}
}

func TestANameIsGuardedByItsAddresses(t *testing.T) {
	d := still(t, Config{})
	var seen []netip.AddrPort
	_, err := d.Dial(t.Context(), DialConfig{Host: need.LoopbackName + ":9", Guard: func(ap netip.AddrPort) error {
		seen = append(seen, ap)
		return errRefused
	}})
	require.ErrorIs(t, err, errRefused)
	require.NotEmpty(t, seen)
	for _, ap := range seen {
		assert.True(t, ap.Addr().IsLoopback(), "%v", ap)
	}
}

// A name with addresses of both families has two attempts under way at a time.
func TestAttemptsOfBothFamiliesMayOverlap(t *testing.T) {
	ln, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		t.Skipf("needs ::1: %v", err)
	}
	require.NoError(t, ln.Close())
	var together sync.WaitGroup
	together.Add(2)
	_, err = still(t, Config{}).Dial(t.Context(), DialConfig{
		Host: need.LoopbackName + ":1",
		Guard: func(netip.AddrPort) error {
			together.Done()
			together.Wait()
			return nil
		},
	})
	require.ErrorIs(t, err, unix.ECONNREFUSED)
}

func TestALegPassesNoMoreRoutersThanItMay(t *testing.T) {
	d := still(t, Config{})
	for address, option := range map[string][2]int{
		loopback4: {unix.IPPROTO_IP, unix.IP_TTL}, "[::1]:0": {unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS},
	} {
		ln, err := Listen(t.Context(), address, false)
		if err != nil {
			t.Skipf("needs %s: %v", address, err)
		}
		defer ln.Close() //nolint:errcheck // it only listened
		target := ln.Addr().(interface{ AddrPort() netip.AddrPort }).AddrPort()
		for _, hops := range []uint8{1, 63, 254} {
			conn, err := d.Dial(t.Context(), DialConfig{Target: target, Hops: hops})
			require.NoError(t, err)
			assert.Equal(t, int(hops), conn.option(t, option[0], option[1]))
			require.NoError(t, conn.Close())
		}
	}
}

func TestADialEndsThoughItsLoopHas(t *testing.T) {
	d := still(t, Config{})
	near, _ := d.pair(t, loopback4)
	ln, err := Listen(t.Context(), loopback4, false)
	require.NoError(t, err)
	defer ln.Close() //nolint:errcheck // it only listened
	cfg := DialConfig{Target: ln.Addr().(*net.TCPAddr).AddrPort(), Near: near}
	d.loops.Close()
	_, err = d.Dial(t.Context(), cfg)
	assert.ErrorIs(t, err, net.ErrClosed)
}

func TestWhatAServerSaysBeforeItResetsIsHeard(t *testing.T) {
	d := still(t, Config{})
	near, _ := d.pair(t, loopback4)
	ln, err := Listen(t.Context(), loopback4, false)
	require.NoError(t, err)
	defer ln.Close() //nolint:errcheck // it only listened
	busy, came := make(chan struct{}), make(chan *Conn, 1)
	near.raw.Loop().Do(func() { <-busy }) // until all is over, nobody looks
	target := ln.Addr().(*net.TCPAddr).AddrPort()
	d.Connect(DialConfig{Target: target, Near: near}, func(c *Conn, err error) {
		assert.NoError(t, err)
		came <- c
	})
	server, err := ln.AcceptTCP()
	require.NoError(t, err)
	_, err = server.Write([]byte("too many"))
	require.NoError(t, err)
	require.NoError(t, server.SetLinger(0))
	require.NoError(t, server.Close())
	close(busy)
	c := <-came
	require.NotNil(t, c)
	defer c.Close() //nolint:errcheck // it is reset
	said, err := io.ReadAll(c)
	require.NoError(t, err, "the dial has collected the error")
	assert.Equal(t, "too many", string(said))
	assert.True(t, c.Aborted())
}

func TestDialErrorsKeepTheirCause(t *testing.T) {
	d := still(t, Config{})
	ln, err := Listen(t.Context(), loopback4, false)
	require.NoError(t, err)
	require.NoError(t, ln.Close())
	_, err = d.Dial(t.Context(), DialConfig{Host: ln.Addr().String()})
	assert.ErrorIs(t, err, unix.ECONNREFUSED)
}

func TestADialWithoutALocalPortNamesTheCure(t *testing.T) {
	failed := func(to string) error {
		at := net.TCPAddrFromAddrPort(netip.MustParseAddrPort(to))
		return &net.OpError{Op: "dial", Addr: at, Err: os.NewSyscallError("connect", unix.EADDRNOTAVAIL)}
	}
	err := explained(failed("192.0.2.1:80"), nil)
	assert.ErrorIs(t, err, ErrNoPort)
	assert.ErrorContains(t, err, "net.ipv4.ip_local_port_range")
	assert.ErrorIs(t, err, unix.EADDRNOTAVAIL)
	assert.NotErrorIs(t, explained(failed("[2001:db8::1]:80"), nil), ErrNoPort,
		"there may be no address to dial it from")
	err = explained(failed("192.0.2.1:80"), unix.EPERM)
	assert.NotErrorIs(t, err, ErrNoPort)
	assert.EqualError(t, err, "dial 192.0.2.1:80: connect: cannot assign requested address: operation not permitted")
}

func TestALegIsDialledFromItsSource(t *testing.T) {
	d := still(t, Config{})
	ln, err := Listen(t.Context(), loopback4, false)
	require.NoError(t, err)
	defer ln.Close() //nolint:errcheck // it only listened
	c, err := d.Dial(t.Context(), DialConfig{
		Host: ln.Addr().String(), Source: netip.MustParseAddrPort("127.0.0.9:0"),
	})
	require.NoError(t, err)
	defer c.Close() //nolint:errcheck // tested elsewhere
	from, err := ln.AcceptTCP()
	require.NoError(t, err)
	defer from.Close() //nolint:errcheck // tested elsewhere
	assert.Equal(t, c.LocalAddr().String(), from.RemoteAddr().String())
	assert.Contains(t, c.LocalAddr().String(), "127.0.0.9:")
}

// netAdmin skips a test that needs the capability.
func netAdmin(t *testing.T) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(fd) //nolint:errcheck // nothing is in it
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, 1) != nil {
		t.Skip("needs CAP_NET_ADMIN")
	}
}

func TestPrivilegedOptionsAreSet(t *testing.T) {
	netAdmin(t)
	d := still(t, Config{})
	for name, loopback := range map[string]string{"IPv4": loopback4, "IPv6": loopback6} {
		t.Run(name, func(t *testing.T) {
			level, option := unix.SOL_IP, unix.IP_TRANSPARENT
			source := netip.MustParseAddrPort("127.0.0.9:0")
			if name == "IPv6" {
				needsIPv6(t)
				level, option = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
				source = netip.MustParseAddrPort(loopback6)
			}
			ln, err := Listen(t.Context(), loopback, true)
			require.NoError(t, err)
			defer ln.Close() //nolint:errcheck // it only listened
			raw, err := ln.SyscallConn()
			require.NoError(t, err)
			var value int
			require.NoError(t, datapath.Control(raw, func(fd int) (err error) {
				value, err = unix.GetsockoptInt(fd, level, option)
				return err
			}))
			assert.Equal(t, 1, value, "the listener takes foreign addresses")

			c, err := d.Dial(t.Context(), DialConfig{Host: ln.Addr().String(), Source: source, Mark: 77})
			require.NoError(t, err)
			defer c.Close() //nolint:errcheck // tested elsewhere
			assert.Equal(t, 1, c.option(t, level, option), "the leg may use foreign addresses")
			assert.Equal(t, 77, c.option(t, unix.SOL_SOCKET, unix.SO_MARK))
			const mptcp = 262 // IPPROTO_MPTCP
			assert.NotEqual(t, mptcp, c.option(t, unix.SOL_SOCKET, unix.SO_PROTOCOL))
		})
	}
}

// option reads an option of a leg's socket.
func (c *Conn) option(t *testing.T, level, name int) (value int) {
	t.Helper()
	require.NoError(t, c.raw.Visit(func(fd int) (err error) {
		value, err = unix.GetsockoptInt(fd, level, name)
		return err
	}))
	return value
}

// unprivileged runs f on a thread without capabilities.
func unprivileged(t *testing.T, f func()) {
	t.Helper()
	assert.NoError(t, need.Unprivileged(func() error {
		f()
		return nil
	}))
}

func TestAMissingCapabilityIsNamed(t *testing.T) {
	d := still(t, Config{})
	ln, err := Listen(t.Context(), loopback4, false)
	require.NoError(t, err)
	defer ln.Close() //nolint:errcheck // it only listened
	unprivileged(t, func() {
		_, err := d.Dial(t.Context(), DialConfig{Host: ln.Addr().String(), Mark: 7})
		assert.ErrorContains(t, err, "CAP_NET_ADMIN", "a mark")

		_, err = d.Dial(t.Context(), DialConfig{
			Host: ln.Addr().String(), Source: netip.MustParseAddrPort("192.0.2.7:0"),
		})
		assert.ErrorContains(t, err, "CAP_NET_ADMIN", "a foreign source")

		c, err := d.Dial(t.Context(), DialConfig{
			Host: ln.Addr().String(), Source: netip.MustParseAddrPort("127.0.0.9:0"),
		})
		if assert.NoError(t, err, "a source of this host's own") {
			assert.NoError(t, c.Close())
		}
		_, err = Listen(t.Context(), loopback4, true)
		assert.ErrorContains(t, err, "CAP_NET_ADMIN", "a transparent listener")
	})
}

func TestADialThatIsGivenUpDialsNobody(t *testing.T) {
	d := still(t, Config{})
	ln, err := net.Listen("tcp", loopback4)
	require.NoError(t, err)
	defer ln.Close() //nolint:errcheck // it only listened
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 100 {
		_, err := d.Dial(ctx, DialConfig{Target: netip.MustParseAddrPort(ln.Addr().String())})
		require.ErrorIs(t, err, context.Canceled)
	}
}

func TestAListenerThatIsClosedSetsNoOption(t *testing.T) {
	tcp, err := Listen(t.Context(), loopback4, false)
	require.NoError(t, err)
	ln, err := still(t, Config{}).Listener(tcp)
	require.NoError(t, err)
	require.NoError(t, ln.Close())
	assert.ErrorIs(t, ln.SetTransparent(), net.ErrClosed, "its descriptor may be another socket's by now")
}
