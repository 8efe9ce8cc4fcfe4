package userspace

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/quic-go/quic-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
	wgnetstack "golang.zx2c4.com/wireguard/tun/netstack"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/certs"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/wgclient"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath/netstack"
	"github.com/penstock-net/penstock/proxy/destination"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

var inner6 = netip.MustParseAddr("fd00:9::2")

// gateway is a WireGuard endpoint that forwards datagrams, and one client of it.
type gateway struct {
	*Datagrams
	stack    *netstack.Stack
	outside  *WireGuard
	listener *Listener
	phone    *wgnetstack.Net
	flows    *flow.Manager
	ahead    atomic.Int64 // of the clock
	still    atomic.Int64 // where the clock stands; 0: it does not
	terms    flow.Terms
	asked    atomic.Int64 // how often policy was
}

var anywhere = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}

// gate opens a gateway; allow is what its guard lets through of the gateway's own.
func gate(t *testing.T, cfg access.Datagrams, allow []netip.Prefix, refuse func(netip.AddrPort) error) *gateway {
	needNamespace(t)
	const most = 128
	start := time.Now() //nolint:forbidigo // the stack under test runs on it
	g := &gateway{flows: &flow.Manager{}}
	clock := func() cc.Time {
		if at := g.still.Load(); at != 0 {
			return cc.Time(at)
		}
		return cc.Time(int64(time.Since(start)) + g.ahead.Load() + 1)
	}
	private, public := keys(t)
	phoneKey, phonePublic := keys(t)
	_, otherPublic := keys(t)
	stack, err := netstack.New(netstack.Config{MTU: mtu, Clock: clock})
	require.NoError(t, err)
	w, err := ListenWireGuard(WireGuardConfig{Name: "vpn", PrivateKey: private, MTU: mtu, Peers: []access.Peer{
		{Name: "phone", PublicKey: phonePublic, AllowedIPs: []netip.Prefix{
			netip.PrefixFrom(inner, 32),
			netip.PrefixFrom(inner6, 128),
		}},
		{Name: "tablet", PublicKey: otherPublic, AllowedIPs: []netip.Prefix{netip.MustParsePrefix("10.9.0.3/32")}},
	}}, stack)
	require.NoError(t, err)
	l := Listen("vpn", stack, w)
	g.stack, g.outside, g.listener = stack, w, l
	cfg.MaxSessions = most
	ofPeer := func(a netip.Addr) bool { return l.Place(a) == tunnel.OfPeer }
	guard := destination.Guard{Allow: allow, Own: new(ingress.Routes).Local, Inner: ofPeer}
	g.Datagrams = forwardDatagrams("vpn", stack, w, cfg, tunnel.Forwarding{
		Flows: g.flows, Clock: clock,
		Verdict: func(sent tunnel.Sent) (down, up flow.Terms, err error) {
			g.asked.Add(1)
			if err := guard.Check(sent.Target.Addr()); err != nil {
				return down, up, err
			}
			if refuse != nil {
				return down, up, refuse(sent.Target)
			}
			return g.terms, up, nil
		},
	})
	l.datagrams = g.Datagrams
	t.Cleanup(func() { assert.NoError(t, l.Close()) })

	g.phone = wgclient.Client{
		PrivateKey: phoneKey, ServerKey: public, Endpoint: loopback(w.Addr()),
		Addresses: []netip.Addr{inner, inner6}, DNS: []netip.Addr{outside4}, MTU: mtu,
	}.Open(t)
	return g
}

func usual() access.Datagrams {
	return access.Datagrams{Idle: 5 * time.Minute, Sessions: 64, MaxSessions: 1 << 14, Isolate: true}
}

// answer runs a UDP server that answers with what f makes of what it is sent.
func answer(t *testing.T, at netip.AddrPort, f func([]byte) []byte) netip.AddrPort {
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
	require.NoError(t, err)
	var done sync.WaitGroup
	done.Go(func() {
		b := make([]byte, 1<<16)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, err = c.WriteToUDPAddrPort(f(b[:n]), from)
			assert.NoError(t, err)
		}
	})
	t.Cleanup(func() {
		assert.NoError(t, c.Close())
		done.Wait()
	})
	return c.LocalAddr().(*net.UDPAddr).AddrPort()
}

func same(b []byte) []byte { return b }

// ask sends b from the phone and returns what comes back, or an error after patience.
func ask(t *testing.T, c net.Conn, b []byte, patience time.Duration) ([]byte, error) {
	require.NoError(t, c.SetReadDeadline(time.Now().Add(patience))) //nolint:forbidigo // a deadline is by the clock
	_, err := c.Write(b)
	require.NoError(t, err)
	got := make([]byte, 1<<16)
	n, err := c.Read(got)
	return got[:n], err
}

const (
	soon = time.Minute            // bounds every wait; only a hang reaches it
	now  = 300 * time.Millisecond // for what does not come
)

func TestADatagramIsAnsweredThroughTheTunnel(t *testing.T) {
	for _, outside := range []netip.Addr{outside4, outside6} {
		for _, size := range []int{0, 1, 512, 1200, 9000, 40000} {
			t.Run(fmt.Sprintf("%v with %d bytes", outside, size), func(t *testing.T) {
				g := gate(t, usual(), anywhere, nil)
				server := answer(t, netip.AddrPortFrom(outside, 0), same)
				c, err := g.phone.DialUDPAddrPort(netip.AddrPort{}, server)
				require.NoError(t, err)
				data := make([]byte, size)
				_, _ = rand.NewChaCha8([32]byte{1}).Read(data)
				got, err := ask(t, c, data, soon)
				require.NoError(t, err)
				assert.Equal(t, data, got)
				require.NoError(t, c.Close())
				s := g.Stats()
				assert.Equal(t, uint64(1), s.SentPackets)
				assert.Equal(t, uint64(1), s.ReceivedPackets)
				assert.Equal(t, uint64(size), s.ReceivedBytes)
				assert.Zero(t, s.Refused+s.Failed+s.Late+s.Crowded)
			})
		}
	}
}

func TestTheGatewaysOwnAddressAnswersDNSWhereThereIsAServer(t *testing.T) {
	needNamespace(t)
	cfg := usual()
	server := answer(t, netip.AddrPortFrom(outside4, 0), same)
	cfg.DNS = server
	g := gate(t, cfg, anywhere, nil)
	g.outside.SetPool([]netip.Prefix{netip.MustParsePrefix("10.9.0.0/24")})
	own := netip.MustParseAddrPort("10.9.0.1:53")
	local := netip.AddrPortFrom(inner, 4000)
	c, err := g.phone.DialUDPAddrPort(local, own)
	require.NoError(t, err)
	for _, question := range []string{"first", "second"} {
		got, err := ask(t, c, []byte(question), soon)
		require.NoError(t, err, "from the address that was asked, as DialUDP wants")
		assert.Equal(t, question, string(got))
	}
	require.NoError(t, c.Close())
	g.UDP(local, own, 0, []byte("whose hops end here"))
	assert.Zero(t, g.Stats().Failed)
	assert.Equal(t, server, g.listener.targetOf(own), "over TCP")
	assert.Equal(t, 1, g.Stats().Sessions)
	for _, other := range []netip.AddrPort{netip.MustParseAddrPort("10.9.0.1:80"), netip.AddrPortFrom(outside4, 53)} {
		assert.Equal(t, other, g.listener.targetOf(other))
	}
	cfg.DNS = netip.MustParseAddrPort("[2001:db8::53]:53")
	g.Configure(cfg)
	g.UDP(local, own, 64, []byte("from the port of the session with the server before"))
	assert.Equal(t, 2, g.Stats().Sessions)
}

func TestANameIsFoundThroughTheTunnel(t *testing.T) {
	g := gate(t, usual(), anywhere, nil)
	answer(t, netip.AddrPortFrom(outside4, dnsPort), func(b []byte) []byte {
		var m dnsmessage.Message
		if !assert.NoError(t, m.Unpack(b)) {
			return nil
		}
		m.Response, m.RecursionAvailable = true, true
		if q := m.Questions[0]; q.Type == dnsmessage.TypeA {
			m.Answers = []dnsmessage.Resource{{
				Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 60},
				Body:   &dnsmessage.AResource{A: [4]byte{203, 0, 113, 7}},
			}}
		}
		out, err := m.Pack()
		assert.NoError(t, err)
		return out
	})
	found, err := g.phone.LookupContextHost(deadlineOf(t), "penstock.example")
	require.NoError(t, err)
	assert.Contains(t, found, "203.0.113.7")
	require.Positive(t, g.Stats().Sessions)
	g.ahead.Add(int64(dnsIdleTimeout + time.Second)) // long before any other session's time is over
	require.Eventually(t, func() bool { return g.Stats().Sessions == 0 }, soon, 10*time.Millisecond)
	assert.Zero(t, g.Stats().Peers)
}

func TestAQUICDownloadComesThroughTheTunnel(t *testing.T) {
	g := gate(t, usual(), anywhere, nil)
	data := make([]byte, 5<<20)
	_, _ = rand.NewChaCha8([32]byte{2}).Read(data)
	out, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(outside4, 0)))
	require.NoError(t, err)
	server := &quic.Transport{Conn: out}
	l, err := server.Listen(&tls.Config{
		Certificates: []tls.Certificate{certs.SelfSigned("penstock.example")}, NextProtos: []string{"test"},
	}, nil)
	require.NoError(t, err)
	var done sync.WaitGroup
	done.Go(func() {
		c, err := l.Accept(deadlineOf(t))
		if !assert.NoError(t, err) {
			return
		}
		s, err := c.AcceptStream(deadlineOf(t))
		if assert.NoError(t, err) {
			_, err = s.Write(data)
			assert.NoError(t, err)
			assert.NoError(t, s.Close())
		}
		<-c.Context().Done()
	})
	in, err := g.phone.ListenUDPAddrPort(netip.AddrPortFrom(inner, 0))
	require.NoError(t, err)
	client := &quic.Transport{Conn: in}
	c, err := client.Dial(deadlineOf(t), out.LocalAddr(),
		&tls.Config{InsecureSkipVerify: true, NextProtos: []string{"test"}}, nil)
	require.NoError(t, err)
	s, err := c.OpenStreamSync(deadlineOf(t))
	require.NoError(t, err)
	_, err = s.Write([]byte("GET"))
	require.NoError(t, err)
	got, err := io.ReadAll(s)
	require.NoError(t, err)
	assert.Equal(t, sha256.Sum256(data), sha256.Sum256(got))
	require.NoError(t, c.CloseWithError(0, ""))
	done.Wait()
	for _, closer := range []io.Closer{client, in, server, out} {
		assert.NoError(t, closer.Close())
	}
	assert.Greater(t, g.Stats().ReceivedBytes, uint64(len(data)))
	assert.Equal(t, int64(1), g.asked.Load(), "policy is asked once for a destination")
}

func TestAPingIsAnsweredFromOutsideAndNotByTheGateway(t *testing.T) {
	for _, kind := range []struct{ name, groups string }{
		{"by a ping socket", "0 2147483647"},
		{"by a raw socket", "1 0"},
	} {
		for _, to := range []netip.Addr{outside4, outside6} {
			t.Run(fmt.Sprintf("%s to %v", kind.name, to), func(t *testing.T) {
				needNamespace(t)
				if err := os.WriteFile(pingGroups, []byte(kind.groups), 0o600); err != nil {
					t.Skipf("needs %s to be writable: %v", pingGroups, err)
				}
				g := gate(t, usual(), anywhere, nil)
				for k := range byte(3) {
					echo := []byte{8, 0, 0, 0, 0, 0, 0, k, 'h', 'e', 'l', 'l', 'o', k}
					reply := byte(0)
					if to.Is6() {
						echo[0], reply = 128, 129
					}
					// That client is deaf for good to an answer that comes before it reads.
					require.Eventually(t, func() bool {
						c, err := g.phone.DialPingAddr(netip.Addr{}, to)
						require.NoError(t, err)
						require.NoError(t, c.SetReadDeadline(time.Now().Add(now))) //nolint:forbidigo // a deadline is by the clock
						answer := make(chan []byte)
						go func() {
							got := make([]byte, 1<<10)
							n, _ := c.Read(got) // nothing, where there is an error
							answer <- got[:n]
						}()
						runtime.Gosched()
						_, err = c.Write(echo)
						require.NoError(t, err)
						got := <-answer
						require.NoError(t, c.Close())
						return len(got) > 6 && got[0] == reply && bytes.Equal(got[6:], echo[6:])
					}, soon, time.Millisecond)
				}
				assert.Eventually(t, func() bool {
					s := g.Stats()
					return s.SentPackets >= 3 && s.SentPackets == s.ReceivedPackets
				}, soon, time.Millisecond)
				assert.Positive(t, g.Stats().Sessions)

				// to which there is no route
				none, err := g.phone.DialPingAddr(netip.Addr{}, netip.MustParseAddr("198.51.100.1"))
				require.NoError(t, err)
				_, err = ask(t, none, []byte{8, 0, 0, 0, 0, 0, 0, 1}, now)
				assert.Error(t, err)
				require.NoError(t, none.Close())
			})
		}
	}
}

func TestAClosedPortOutsideIsToldToThePeer(t *testing.T) {
	for _, to := range []netip.Addr{outside4, outside6} {
		g := gate(t, usual(), anywhere, nil)
		c, err := g.phone.DialUDPAddrPort(netip.AddrPort{}, netip.AddrPortFrom(to, 9))
		require.NoError(t, err)
		// A reader that waits already is not told by that stack; who asks again is.
		assert.Eventually(t, func() bool {
			_, err := c.Write([]byte("anybody?"))
			return err != nil && strings.Contains(err.Error(), "refused")
		}, soon, 10*time.Millisecond, to)
		require.NoError(t, c.Close())
	}
}

func TestOnlyWhoWasWrittenToMayAnswer(t *testing.T) {
	g := gate(t, usual(), anywhere, nil)
	c, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(outside4, 0)))
	require.NoError(t, err)
	p, err := g.phone.DialUDPAddrPort(netip.AddrPort{}, c.LocalAddr().(*net.UDPAddr).AddrPort())
	require.NoError(t, err)
	_, err = p.Write([]byte("1"))
	require.NoError(t, err)
	b := make([]byte, 10)
	_, at, err := c.ReadFromUDPAddrPort(b)
	require.NoError(t, err)
	stranger, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(outside4, 0)))
	require.NoError(t, err)
	_, err = stranger.WriteToUDPAddrPort([]byte("2"), at)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return g.Stats().Unsolicited == 1 }, soon, time.Millisecond)

	// Another destination sees the same address and port of the gateway.
	require.NoError(t, p.Close())
	again, err := g.phone.DialUDPAddrPort(p.LocalAddr().(*net.UDPAddr).AddrPort(),
		stranger.LocalAddr().(*net.UDPAddr).AddrPort())
	require.NoError(t, err)
	_, err = again.Write([]byte("3"))
	require.NoError(t, err)
	_, seen, err := stranger.ReadFromUDPAddrPort(b)
	require.NoError(t, err)
	assert.Equal(t, at, seen)
	for _, closer := range []io.Closer{again, stranger, c} {
		require.NoError(t, closer.Close())
	}
}

func TestAnIdleSessionIsForgotten(t *testing.T) {
	cfg := usual()
	cfg.Idle = time.Second
	g := gate(t, cfg, anywhere, nil)
	c, err := g.phone.DialUDPAddrPort(netip.AddrPort{}, answer(t, netip.AddrPortFrom(outside4, 0), same))
	require.NoError(t, err)
	_, err = ask(t, c, []byte("hello"), soon)
	require.NoError(t, err)
	g.ahead.Add(int64(500 * time.Millisecond))
	_, err = ask(t, c, []byte("hello"), soon)
	require.NoError(t, err)
	assert.Equal(t, int64(1), g.asked.Load(), "it is the same session")
	g.ahead.Add(int64(2 * time.Second))
	require.Eventually(t, func() bool { return g.Stats().Sessions == 0 }, soon, time.Millisecond)
	_, err = ask(t, c, []byte("hello"), soon)
	require.NoError(t, err, "the next packet begins another")
	assert.Equal(t, int64(2), g.asked.Load())
	require.NoError(t, c.Close())
}

func TestAPeerWithTooManySessionsLosesItsOldest(t *testing.T) {
	cfg := usual()
	cfg.Sessions = 4
	g := gate(t, cfg, anywhere, nil)
	server := answer(t, netip.AddrPortFrom(outside4, 0), same)
	for range 10 {
		c, err := g.phone.DialUDPAddrPort(netip.AddrPort{}, server)
		require.NoError(t, err)
		_, err = ask(t, c, []byte("hello"), soon)
		require.NoError(t, err)
		assert.LessOrEqual(t, g.Stats().Sessions, 4)
		require.NoError(t, c.Close())
	}
	assert.Equal(t, 4, g.Stats().Sessions)

	g.Configure(access.Datagrams{})
	assert.Zero(t, g.Stats().Sessions)
	c, err := g.phone.DialUDPAddrPort(netip.AddrPort{}, server)
	require.NoError(t, err)
	_, err = ask(t, c, []byte("hello"), now)
	require.Error(t, err, "without sessions nothing is forwarded")
	require.NoError(t, c.Close())
	require.Eventually(t, func() bool { return g.Stats().Crowded == 1 }, soon, time.Millisecond)
}

func TestWhatAPeerMustNotReachIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		allow  []netip.Prefix
		refuse func(netip.AddrPort) error
		to     netip.Addr
	}{
		"the gateway's own address": {to: outside4},
		"its address of the other":  {to: outside6},
		"another peer":              {to: netip.MustParseAddr("10.9.0.3")},
		"what policy says": {
			allow: anywhere, to: outside4,
			refuse: func(netip.AddrPort) error { return errors.New("no") },
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := gate(t, usual(), c.allow, c.refuse)
			if c.to != netip.MustParseAddr("10.9.0.3") {
				answer(t, netip.AddrPortFrom(c.to, 5000), same)
			}
			conn, err := g.phone.DialUDPAddrPort(netip.AddrPort{}, netip.AddrPortFrom(c.to, 5000))
			require.NoError(t, err)
			_, err = ask(t, conn, []byte("hello"), now)
			require.Error(t, err)
			require.NoError(t, conn.Close())
			ping, err := g.phone.DialPingAddr(netip.Addr{}, c.to)
			require.NoError(t, err)
			echo := []byte{8, 0, 0, 0, 0, 0, 0, 1}
			if c.to.Is6() {
				echo[0] = 128
			}
			_, err = ask(t, ping, echo, now)
			require.Error(t, err)
			require.NoError(t, ping.Close())
			require.Eventually(t, func() bool { return g.Stats().Refused == 2 }, soon, time.Millisecond)
			assert.Zero(t, g.Stats().Sessions)
		})
	}
}

// byAddress is an outside whose every address is a peer of its own.
type byAddress struct {
	everybody
	asked   atomic.Int64
	revoked atomic.Value // the name of a peer that has gone
}

func (o *byAddress) Peer(inner netip.Addr) string {
	o.asked.Add(1)
	if inner.String() == o.revoked.Load() {
		return ""
	}
	return inner.String()
}

// forwarder is a forwarder and its stack, without a tunnel around them.
type forwarder struct {
	*Datagrams
	t       *testing.T
	stack   *netstack.Stack
	outside *byAddress
	flows   flow.Manager
	down    flow.Terms                   // zero: what peers receive is not held
	up      func(tunnel.Sent) flow.Terms // nil: what peers send is not held
	still   atomic.Int64                 // where the clock stands; 0: it does not
}

func newForwarder(t *testing.T, most int) *forwarder {
	needNamespace(t)
	start := time.Now() //nolint:forbidigo // the stack under test runs on it
	f := &forwarder{t: t, outside: &byAddress{}}
	clock := func() cc.Time {
		if at := f.still.Load(); at != 0 {
			return cc.Time(at)
		}
		return cc.Time(time.Since(start)) + 1
	}
	stack, err := netstack.New(netstack.Config{MTU: mtu, Clock: clock})
	require.NoError(t, err)
	f.stack = stack
	cfg := usual()
	cfg.MaxSessions = most
	f.Datagrams = forwardDatagrams("vpn", stack, f.outside, cfg, tunnel.Forwarding{
		Flows: &f.flows, Clock: clock,
		Verdict: func(s tunnel.Sent) (_, up flow.Terms, err error) {
			if f.up != nil {
				up = f.up(s)
			}
			return f.down, up, nil
		},
	})
	t.Cleanup(func() {
		require.NoError(t, f.Close())
		require.NoError(t, stack.Close())
	})
	return f
}

// of counts the sessions of a peer.
func (f *forwarder) of(peer string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if p := f.peers[peer]; p != nil {
		return p.sessions.Len()
	}
	return 0
}

// next is the next packet into the tunnel.
func (f *forwarder) next() []byte {
	b := [][]byte{make([]byte, 2*mtu)}
	sizes := make([]int, 1)
	_, err := f.stack.Collect(deadlineOf(f.t), b, sizes, 0)
	require.NoError(f.t, err)
	return b[0][:sizes[0]]
}

// silent is where a UDP server hears and says nothing.
func silent(t *testing.T) netip.AddrPort {
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(outside4, 0)))
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, c.Close()) })
	return c.LocalAddr().(*net.UDPAddr).AddrPort()
}

func TestPeersShareTheSessionsThatThereMayBe(t *testing.T) {
	f := newForwarder(t, 4)
	server := silent(t)
	open := func(peer string, port uint16) {
		f.UDP(netip.AddrPortFrom(netip.MustParseAddr(peer), port), server, 63, []byte("hello"))
	}
	for port := range uint16(10) {
		open("10.9.0.2", 1000+port)
	}
	assert.Equal(t, 4, f.of("10.9.0.2"), "all that there are, while nobody else wants any")
	for _, peer := range []string{"10.9.0.3", "10.9.0.4", "10.9.0.5"} {
		open(peer, 1000)
		assert.Equal(t, 1, f.of(peer))
	}
	assert.Equal(t, 1, f.of("10.9.0.2"))
	require.Equal(t, uint64(9), f.Stats().Evicted)
	open("10.9.0.6", 1000)
	assert.Zero(t, f.of("10.9.0.6"), "nobody loses the last one")
	assert.Equal(t, uint64(1), f.Stats().Crowded)
	open("10.9.0.3", 2000)
	assert.Equal(t, 1, f.of("10.9.0.3"), "but to itself")
	assert.Equal(t, uint64(1), f.Stats().Crowded)
	assert.Equal(t, 4, f.Stats().Sessions)
}

func TestADatagramForWhichThereIsNoRoomCostsNoSocket(t *testing.T) {
	f := newForwarder(t, 1)
	server := silent(t)
	f.UDP(netip.MustParseAddrPort("10.9.0.2:1000"), server, 63, []byte("hello"))
	require.Equal(t, 1, f.of("10.9.0.2"))
	f.with.Mark = 1 // which no socket can have without the capability
	assert.Equal(t, errCrowded, need.Unprivileged(func() error {
		_, _, err := f.sessionFor(origin{AddrPort: netip.MustParseAddrPort("10.9.0.3:1000")}, server, "")
		return err
	}))
}

func TestOwnersAreAskedOncePerAddress(t *testing.T) {
	f := newForwarder(t, 1000)
	server := silent(t)
	for port := range uint16(60) {
		f.UDP(netip.AddrPortFrom(inner, 1000+port), server, 63, []byte("hello"))
	}
	before := f.outside.asked.Load()
	f.endStaleSessions(f.with.Clock())
	assert.LessOrEqual(t, f.outside.asked.Load()-before, int64(4), "the clock may have had it swept as well")
	assert.Equal(t, 60, f.Stats().Sessions)
}

func TestAPeerIsToldWhatTheNetworkDoesNotTake(t *testing.T) {
	f := newForwarder(t, 1000)
	lo, err := netlink.LinkByName("lo")
	require.NoError(t, err)
	for prefix, kind := range map[string]int{
		"198.18.1.0/24": unix.RTN_UNREACHABLE, "198.18.2.0/24": unix.RTN_PROHIBIT,
		"2001:db8:1::/64": unix.RTN_UNREACHABLE, "2001:db8:2::/64": unix.RTN_PROHIBIT,
	} {
		dst, err := netlink.ParseIPNet(prefix)
		require.NoError(t, err)
		route := &netlink.Route{Dst: dst, Type: kind}
		if dst.IP.To4() == nil {
			route.LinkIndex = lo.Attrs().Index
		}
		require.NoError(t, netlink.RouteAdd(route))
		t.Cleanup(func() { assert.NoError(t, netlink.RouteDel(route)) })
	}
	for _, c := range []struct {
		target     string
		code, kind uint8
	}{
		{"198.51.100.1", 0, 3},
		{"198.18.1.1", 1, 3},
		{"198.18.2.1", 13, 3},
		{"2001:db8:9::1", 0, 1},
		{"2001:db8:1::1", 3, 1},
		{"2001:db8:2::1", 1, 1},
	} {
		target, source, header := netip.MustParseAddr(c.target), inner, 20
		if target.Is6() {
			source, header = inner6, 40
		}
		f.UDP(netip.AddrPortFrom(source, 5000), netip.AddrPortFrom(target, 53), 63, []byte("hello"))
		p := f.next()
		assert.Equal(t, []byte{c.kind, c.code}, p[header:header+2], c.target)
		assert.Equal(t, uint16(5000), binary.BigEndian.Uint16(p[header+8+header:]), "it quotes the datagram to %s",
			c.target)
	}
	assert.Equal(t, uint64(6), f.Stats().Notices)
	for range 5000 {
		f.UDP(netip.AddrPortFrom(inner, 5000), netip.MustParseAddrPort("198.51.100.1:53"), 63, nil)
	}
	s := f.Stats()
	assert.Equal(t, uint64(5006), s.Failed)
	assert.Less(t, s.Notices, s.Failed, "not for each, if there are many")
}

func TestADatagramTooBigForThisMachineIsToldWithItsMTU(t *testing.T) {
	message := func(level, kind int, origin uint8) []byte {
		b := make([]byte, unix.CmsgSpace(16+28))
		h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
		h.Level, h.Type = int32(level), int32(kind)
		h.SetLen(unix.CmsgLen(16 + 28))
		data := b[unix.CmsgLen(0):]
		binary.NativeEndian.PutUint32(data, uint32(unix.EMSGSIZE))
		data[4] = origin
		binary.NativeEndian.PutUint32(data[8:], 1280)
		return b
	}
	const local = 1
	assert.Equal(t, &netstack.Unreachable{Type: 3, Code: 4, MTU: 1280, From: netip.IPv4Unspecified()},
		icmpErrorIn(message(unix.IPPROTO_IP, unix.IP_RECVERR, local)))
	assert.Equal(t, &netstack.Unreachable{Type: 2, MTU: 1280, From: netip.IPv6Unspecified()},
		icmpErrorIn(message(unix.IPPROTO_IPV6, unix.IPV6_RECVERR, local)))
}

// TestPingsShareASocketWhereTheyMayHaveNone has the kernel's default for ping sockets.
func TestPingsShareASocketWhereTheyMayHaveNone(t *testing.T) {
	needNamespace(t)
	if err := os.WriteFile(pingGroups, []byte("1 0"), 0o600); err != nil {
		t.Skipf("needs %s to be writable: %v", pingGroups, err)
	}
	f := newForwarder(t, 1000)
	descriptors := func() int {
		all, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		return len(all)
	}
	before := descriptors()
	for k := range uint16(30) {
		for source, target := range map[netip.Addr]netip.Addr{inner: outside4, inner6: outside6} {
			request, reply, header := []byte{8, 0, 0, 0, byte(k >> 8), byte(k), 0, 1, 'x'}, byte(0), 20
			if target.Is6() {
				request[0], reply, header = 128, 129, 40
			}
			f.Echo(source, target, 63, append([]byte(nil), request...))
			p := f.next()
			assert.Equal(t, reply, p[header])
			assert.Equal(t, request[4:], p[header+4:], "with its own identifier and data")
		}
	}
	assert.Equal(t, 60, f.Stats().Sessions)
	assert.LessOrEqual(t, descriptors(), before+2)
}
