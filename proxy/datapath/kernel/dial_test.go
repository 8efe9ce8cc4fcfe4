//go:build linux

package kernel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/datapath"
)

var errRefused = errors.New("refused by the guard")

func TestTheGuardSeesWhatIsDialled(t *testing.T) {
	d := still(t, Config{})
	ln := listen(t, loopback4)
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

// nameServer answers for one name with these addresses, over a stream. It never answers for the families that it has
// no addresses of.
func nameServer(t *testing.T, addrs ...string) *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
		asks, asked := net.Pipe()
		go func() { assert.NoError(t, answerName(asked, addrs)) }()
		return asks, nil
	}}
}

// answerName reads one query and answers it (RFC 1035 §4.2.2), or waits until nobody waits for an answer.
func answerName(conn net.Conn, addrs []string) error {
	defer conn.Close() //nolint:errcheck // it is read to its end
	var size [2]byte
	if _, err := io.ReadFull(conn, size[:]); err != nil {
		return err
	}
	query := make([]byte, binary.BigEndian.Uint16(size[:]))
	if _, err := io.ReadFull(conn, query); err != nil {
		return err
	}
	var m dnsmessage.Message
	if err := m.Unpack(query); err != nil {
		return err
	}
	q := m.Questions[0]
	m.Response, m.Additionals = true, nil
	for _, a := range addrs {
		var body dnsmessage.ResourceBody
		switch addr := netip.MustParseAddr(a); {
		case q.Type == dnsmessage.TypeA && addr.Is4():
			body = &dnsmessage.AResource{A: addr.As4()}
		case q.Type == dnsmessage.TypeAAAA && addr.Is6():
			body = &dnsmessage.AAAAResource{AAAA: addr.As16()}
		default:
			continue
		}
		m.Answers = append(m.Answers, dnsmessage.Resource{
			Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class}, Body: body,
		})
	}
	if len(m.Answers) == 0 {
		_, _ = conn.Read(size[:])
		return nil
	}
	answer, err := m.Pack()
	if err == nil {
		_, err = conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...))
	}
	return err
}

func TestANameIsReachedThoughItsIPv6AddressesAreNeverTold(t *testing.T) {
	ln := listen(t, loopback4)
	d := still(t, Config{Resolver: nameServer(t, "127.0.0.1")})
	c, err := d.Dial(t.Context(), DialConfig{
		Host: fmt.Sprintf("a.test:%d", ln.Addr().(*net.TCPAddr).Port), Timeout: patience,
	})
	require.NoError(t, err)
	assert.Equal(t, ln.Addr().String(), c.RemoteAddr().String())
	require.NoError(t, c.Close())
}

func TestANameIsReachedThoughItsFirstAddressesAreDead(t *testing.T) {
	dead := need.Silent(t)
	ln := listen(t, fmt.Sprintf("127.0.0.9:%d", dead.Port))
	d := still(t, Config{Resolver: nameServer(t, dead.IP.String(), dead.IP.String(), "127.0.0.9"), Attempts: 4})
	near, _ := d.pair(t, loopback4)
	var mu sync.Mutex
	var seen []netip.AddrPort
	c, err := d.Dial(t.Context(), DialConfig{
		Host: fmt.Sprintf("a.test:%d", dead.Port), Timeout: patience, Near: near, Guard: func(ap netip.AddrPort) error {
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, ap)
			return nil
		},
	})
	require.NoError(t, err)
	assert.Equal(t, ln.Addr().String(), c.RemoteAddr().String())
	assert.Equal(t, []netip.AddrPort{dead.AddrPort(), dead.AddrPort(), ln.Addr().(*net.TCPAddr).AddrPort()}, seen)
	assert.Same(t, near.raw.Loop(), c.raw.Loop())
	require.Eventually(t, func() bool { return d.spareAttempts.Taken() == 0 }, patience, time.Millisecond, "attempts go on")
	require.NoError(t, c.Close())
}

// far is a leg to a client with this address.
type far struct {
	datapath.Conn
	addr netip.AddrPort
}

func (f far) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(f.addr) }

func TestAClientLeavesAttemptsToOthers(t *testing.T) {
	dead := need.Silent(t)
	listen(t, fmt.Sprintf("127.0.0.9:%d", dead.Port))
	addrs := slices.Repeat([]string{dead.IP.String()}, 40)
	d := still(t, Config{Resolver: nameServer(t, addrs...), Attempts: 12})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	dial := func(ctx context.Context, near string) (*Conn, error) {
		return d.Dial(ctx, DialConfig{
			Host: fmt.Sprintf("a.test:%d", dead.Port), Timeout: patience,
			Near: far{addr: netip.MustParseAddrPort(near)},
		})
	}
	var dials sync.WaitGroup
	for range 10 {
		dials.Go(func() { _, _ = dial(ctx, "192.0.2.1:1") })
	}
	require.Eventually(t, func() bool { return d.spareAttempts.TakenBy("192.0.2.1") == 6 }, patience, time.Millisecond)
	dials.Go(func() { _, _ = dial(ctx, "192.0.2.2:1") })
	require.Eventually(t, func() bool { return d.spareAttempts.TakenBy("192.0.2.2") == 3 }, patience, time.Millisecond)
	assert.LessOrEqual(t, d.spareAttempts.TakenBy("192.0.2.1"), 6)
	cancel()
	dials.Wait()
	assert.Zero(t, d.spareAttempts.Taken())
}

// slow never answers.
type slow struct{ asked atomic.Int32 }

func (s *slow) LookupNetIP(ctx context.Context, _, _ string) ([]netip.Addr, error) {
	s.asked.Add(1)
	defer s.asked.Add(-1)
	<-ctx.Done()
	return nil, &net.DNSError{Err: "i/o timeout", IsTimeout: true}
}

func TestLookupsAreBoundedAndLeaveSomeToOthers(t *testing.T) {
	var server slow
	d := still(t, Config{Resolver: &server, Lookups: 12})
	ctx, cancel := context.WithCancel(t.Context())
	var dials sync.WaitGroup
	dial := func(near string) {
		dials.Go(func() {
			_, err := d.Dial(ctx, DialConfig{Host: "a.test:80", Near: far{addr: netip.MustParseAddrPort(near)}})
			assert.ErrorIs(t, err, context.Canceled)
		})
	}
	for range 20 {
		dial("192.0.2.1:1")
	}
	require.Eventually(t, func() bool { return d.lookups.TakenBy("192.0.2.1") == 6 }, patience, time.Millisecond)
	dial("192.0.2.2:1")
	require.Eventually(t, func() bool { return d.lookups.TakenBy("192.0.2.2") == 2 }, patience, time.Millisecond)
	require.Eventually(t, func() bool { return server.asked.Load() == 8 }, patience, time.Millisecond)
	_, err := d.Dial(ctx, DialConfig{
		Host: "a.test:80", Near: far{addr: netip.MustParseAddrPort("192.0.2.1:1")}, Timeout: time.Millisecond,
	})
	assert.ErrorIs(t, err, unix.EMFILE)
	cancel()
	dials.Wait()
	assert.Zero(t, d.lookups.Taken())
}

func TestALookupWithoutADescriptorSaysSo(t *testing.T) {
	short := &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
		return nil, os.NewSyscallError("socket", unix.EMFILE)
	}}
	_, err := still(t, Config{Resolver: short, Lookups: 8}).Dial(t.Context(), DialConfig{Host: "a.test:80"})
	assert.ErrorIs(t, err, unix.EMFILE)
}

func TestANameIsDialledByTheFamilyOfTheSource(t *testing.T) {
	ln := listen(t, loopback4)
	cfg := DialConfig{
		Host:   fmt.Sprintf("a.test:%d", ln.Addr().(*net.TCPAddr).Port),
		Source: netip.MustParseAddrPort("127.0.0.9:0"), Timeout: patience,
	}
	c, err := still(t, Config{Resolver: nameServer(t, "::1", "127.0.0.1")}).Dial(t.Context(), cfg)
	require.NoError(t, err)
	assert.Contains(t, c.LocalAddr().String(), "127.0.0.9:")
	require.NoError(t, c.Close())
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
	ln := listen(t, loopback4)
	cfg := DialConfig{Target: ln.Addr().(*net.TCPAddr).AddrPort(), Near: near}
	d.loops.Close()
	_, err := d.Dial(t.Context(), cfg)
	assert.ErrorIs(t, err, net.ErrClosed)
}

func TestWhatAServerSaysBeforeItResetsIsHeard(t *testing.T) {
	d := still(t, Config{})
	near, _ := d.pair(t, loopback4)
	ln := listen(t, loopback4)
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
	err := explainDialError(failed("192.0.2.1:80"), nil)
	assert.ErrorIs(t, err, ErrNoPort)
	assert.ErrorContains(t, err, "net.ipv4.ip_local_port_range")
	assert.ErrorIs(t, err, unix.EADDRNOTAVAIL)
	assert.NotErrorIs(t, explainDialError(failed("[2001:db8::1]:80"), nil), ErrNoPort,
		"there may be no address to dial it from")
	err = explainDialError(failed("192.0.2.1:80"), unix.EPERM)
	assert.NotErrorIs(t, err, ErrNoPort)
	assert.EqualError(t, err, "dial 192.0.2.1:80: connect: cannot assign requested address: operation not permitted")
}

func TestALegIsDialledFromItsSource(t *testing.T) {
	d := still(t, Config{})
	ln := listen(t, loopback4)
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
	ln := listen(t, loopback4)
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

// ended tells whether the leg's loop knows that the peer sends no more.
func (c *Conn) ended() bool {
	known := make(chan bool)
	c.raw.Loop().Do(func() { known <- c.raw.Ended() })
	return <-known
}

func TestADialEndsWhenTheLegThatItBelongsToIsReset(t *testing.T) {
	d := still(t, Config{})
	at := need.Silent(t)
	for name, cfg := range map[string]DialConfig{
		"an address": {Target: at.AddrPort()}, "a name": {Host: fmt.Sprintf("%s:%d", need.LoopbackName, at.Port)},
	} {
		for when, early := range map[string]bool{"reset before": true, "reset while it is dialled": false} {
			t.Run(name+", "+when, func(t *testing.T) {
				near, client := d.pair(t, loopback4)
				cfg.Near = near
				if early {
					require.NoError(t, client.Reset())
				} else {
					require.NoError(t, client.CloseWrite())
				}
				require.Eventually(t, near.ended, patience, time.Millisecond)
				over := make(chan error, 1)
				cancel := d.Connect(cfg, func(c *Conn, err error) {
					assert.Nil(t, c)
					over <- err
				})
				defer cancel()
				if !early {
					near.ended() // its loop has begun the dial,
					near.ended() // and looked what has become of it
					assert.Empty(t, over, "a client may end its request and wait for the answer")
					require.NoError(t, client.Reset())
				}
				select {
				case err := <-over:
					assert.ErrorIs(t, err, ErrNearReset)
				case <-time.After(patience): //nolint:forbidigo // nothing tells of what does not happen
					t.Fatal("it goes on")
				}
			})
		}
	}
}

func TestADialGoesOnForWhatALegHadSentBeforeItsReset(t *testing.T) {
	d := still(t, Config{})
	at := need.Silent(t)
	for name, cfg := range map[string]DialConfig{
		"an address": {Target: at.AddrPort()}, "a name": {Host: fmt.Sprintf("%s:%d", need.LoopbackName, at.Port)},
	} {
		t.Run(name, func(t *testing.T) {
			near, client := d.pair(t, loopback4)
			cfg.Near = near
			_, err := client.Write([]byte("x"))
			require.NoError(t, err)
			over := make(chan error, 1)
			cancel := d.Connect(cfg, func(_ *Conn, err error) { over <- err })
			require.NoError(t, client.Reset())
			require.Eventually(t, near.ended, patience, time.Millisecond)
			near.ended() // its loop has looked what has become of the dial
			assert.Empty(t, over)
			cancel()
			assert.NotErrorIs(t, <-over, ErrNearReset)
			got := make([]byte, 2)
			n, err := near.Read(got)
			require.NoError(t, err)
			assert.Equal(t, "x", string(got[:n]))
		})
	}
}

// An attempt takes over the memory of one that has succeeded. The cancel of that one then ends nothing.
func TestALateCancelEndsNoLaterAttempt(t *testing.T) {
	d := still(t, Config{})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close() //nolint:errcheck // nothing is in it
	cfg := DialConfig{Target: ln.Addr().(*net.TCPAddr).AddrPort(), Timeout: patience}
	late := func() {}
	came := make(chan error, 1)
	for range 100 {
		next := d.Connect(cfg, func(c *Conn, err error) {
			if err == nil {
				err = c.Reset()
			}
			came <- err
		})
		late()
		require.NoError(t, <-came)
		late = next
	}
}
