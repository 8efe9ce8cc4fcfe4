package userspace

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"
	"github.com/quic-go/quic-go/quicvarint"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// udpListener is a MASQUE listener that forwards UDP to wherever verdict lets it; nil:
// everywhere.
func udpListener(t *testing.T, cfg access.Datagrams, verdict func(tunnel.Sent) error) (*MASQUE, *Listener) {
	t.Helper()
	return udpListenerOf(t, nil, cfg, verdict)
}

// udpListenerOf is udpListener with another configuration of the listener.
func udpListenerOf(
	t *testing.T, change func(*MASQUEConfig), cfg access.Datagrams, verdict func(tunnel.Sent) error,
) (*MASQUE, *Listener) {
	t.Helper()
	m, l := masque(t, change)
	if cfg.Sessions == 0 {
		cfg.Sessions = 16
	}
	if cfg.Idle == 0 {
		cfg.Idle = time.Hour
	}
	cfg.MaxSessions = 16
	l.(*Listener).Forward(cfg, tunnel.Forwarding{
		Clock: m.cfg.Clock, Flows: &flow.Manager{},
		Verdict: func(s tunnel.Sent) (down, up flow.Terms, err error) {
			if verdict != nil {
				err = verdict(s)
			}
			down = flow.Terms{Group: s.Peer, Algorithm: "static", Params: cc.Params{"cwnd_packets": 10}}
			return down, up, err
		},
	})
	return m, l.(*Listener)
}

// echoUDP sends back what comes to an address of this machine.
func echoUDP(t *testing.T) netip.AddrPort {
	t.Helper()
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	return need.Echo(t, c).AddrPort()
}

// udp asks for a UDP target; host and port as the path has them.
func (c *client) udp(path string) (*http3.RequestStream, reply) { return c.ask("connect-udp", path) }

func (c *client) ask(protocol, path string) (*http3.RequestStream, reply) {
	c.t.Helper()
	s, err := c.h3.OpenRequestStream(c.t.Context())
	require.NoError(c.t, err)
	r, err := http.NewRequest(http.MethodConnect, "https://vpn.test"+path, nil)
	require.NoError(c.t, err)
	r.Proto, r.Header = protocol, bearer(phoneToken)
	r.Header.Set(http3.CapsuleProtocolHeader, "?1")
	require.NoError(c.t, s.SendRequestHeader(r))
	said, err := read(s)
	require.NoError(c.t, err)
	return s, said
}

func pathOf(a netip.AddrPort) string {
	return fmt.Sprintf("%s%s/%d/", udpPath, url.PathEscape(a.Addr().String()), a.Port())
}

// echoes wants an answer with the words that were sent in a datagram of QUIC's.
func echoes(t *testing.T, s *http3.RequestStream, words string) {
	t.Helper()
	require.NoError(t, s.SendDatagram(append([]byte{0}, words...)))
	got, err := s.ReceiveDatagram(deadlineOf(t))
	require.NoError(t, err)
	assert.Equal(t, append([]byte{0}, words...), got)
}

// What was for one client must not reach the next that has its address.
func TestNothingOfAClientsOutlastsItsAddress(t *testing.T) {
	m, l := udpListener(t, access.Datagrams{}, nil)
	conns := make(chan ingress.Client, 1)
	answering(t, l, nil, func(c ingress.Client) { conns <- c })
	phone := dialMASQUE(t, m).tunnel(phoneToken)
	_, err := phone.DialContextTCPAddrPort(deadlineOf(t), netip.MustParseAddrPort("203.0.113.7:443"))
	require.NoError(t, err)
	conn := <-conns
	silent, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}) // an answer would be late, too
	require.NoError(t, err)
	defer silent.Close()
	server := silent.LocalAddr().(*net.UDPAddr).AddrPort()
	l.datagrams.UDP(netip.AddrPortFrom(phone.addrs[0], 5000), server, 64, []byte("ping"))
	require.Equal(t, 1, l.datagrams.Stats().Sessions)
	l.datagrams.mu.Lock()
	s := l.datagrams.sessions[origin{AddrPort: netip.AddrPortFrom(phone.addrs[0], 5000)}]
	l.datagrams.mu.Unlock()
	unanswered, err := l.Greet(t.Context(), conn.Conn)
	require.NoError(t, err)

	require.NoError(t, phone.ip.Close())
	free := func() bool {
		m.mu.RLock()
		defer m.mu.RUnlock()
		return m.sessionsPerPeer["phone"] == 0
	}
	require.Eventually(t, free, soon, time.Millisecond)
	_, err = conn.Conn.Write([]byte("for the phone"))
	require.ErrorIs(t, err, syscall.ECONNABORTED)
	assert.Zero(t, l.datagrams.Stats().Sessions)
	s.peer.sendPacket(packet{fiveTuple: fiveTuple{target: s.from}, answers: s}) // that has waited
	assert.EqualValues(t, 1, l.datagrams.Stats().Late)
	require.ErrorContains(t, unanswered.Answer(netip.AddrPort{}, nil), "has gone while its server was dialled")
}

func TestUDPGoesWhereItsClientAsked(t *testing.T) {
	server := echoUDP(t)
	var asked atomic.Pointer[tunnel.Sent]
	m, l := udpListener(t, access.Datagrams{}, func(s tunnel.Sent) error {
		asked.Store(&s)
		if s.Target.Addr().Is6() {
			return fs.ErrPermission
		}
		return nil
	})
	c := dialMASQUE(t, m)
	s, said := c.udp(pathOf(server))
	require.Equal(t, http.StatusOK, said.status)
	assert.Equal(t, "?1", said.header.Get(http3.CapsuleProtocolHeader))
	echoes(t, s, "question")
	assert.Equal(t, "phone", asked.Load().Peer)
	assert.Equal(t, server, asked.Load().Target)
	assert.Equal(t, c.conn.LocalAddr().(*net.UDPAddr).Port, int(asked.Load().Source.Port()))

	// By name: the first of its addresses that may be reached.
	named, said := c.udp(fmt.Sprintf("%s%s/%d/", udpPath, need.LoopbackName, server.Port()))
	require.Equal(t, http.StatusOK, said.status)
	echoes(t, named, "by name")
	assert.Equal(t, need.LoopbackName, asked.Load().Host)

	// In a capsule, among others that nobody knows, and of a context that nobody has.
	var b []byte
	for _, capsule := range []struct {
		kind    uint64
		content string
	}{{0x2345, "grease"}, {0, "\x07of an extension"}, {0, "\x00in a capsule"}} {
		b = quicvarint.Append(quicvarint.Append(b, capsule.kind), uint64(len(capsule.content)))
		b = append(b, capsule.content...)
	}
	_, err := s.Write(b)
	require.NoError(t, err)
	got, err := s.ReceiveDatagram(deadlineOf(t))
	require.NoError(t, err)
	assert.Equal(t, "\x00in a capsule", string(got))

	status, err := l.Status()
	require.NoError(t, err)
	assert.Equal(t, 2, status.Datagrams.Sessions)
	assert.EqualValues(t, 3, status.Datagrams.ReceivedPackets)
	for _, stream := range []*http3.RequestStream{s, named} {
		require.NoError(t, stream.Close()) // the client ends it
	}
	require.Eventually(t, func() bool { return l.datagrams.Stats().Sessions == 0 }, soon, time.Millisecond)
}

// TestQUICAcknowledgesTheUDPOfAClient has clients that answer no pings, without TCP beside.
func TestQUICAcknowledgesTheUDPOfAClient(t *testing.T) {
	for name, open := range map[string]func(c *client, l *Listener) func(){
		"CONNECT-UDP": func(c *client, _ *Listener) func() {
			s, said := c.udp(pathOf(echoUDP(t)))
			require.Equal(t, http.StatusOK, said.status)
			return func() { echoes(t, s, "question") }
		},
		"CONNECT-IP": func(c *client, l *Listener) func() {
			phone := c.tunnel(phoneToken)
			server := echoUDP(t)
			return func() {
				l.datagrams.UDP(netip.AddrPortFrom(phone.addrs[0], 5000), server, 64, []byte("question"))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, l := udpListener(t, access.Datagrams{}, nil)
			send := open(dialMASQUE(t, m), l)
			require.Eventually(t, func() bool {
				send()
				l.datagrams.mu.Lock()
				p := l.datagrams.peers["phone"]
				l.datagrams.mu.Unlock()
				p.shaper.mu.Lock()
				defer p.shaper.mu.Unlock()
				return p.window.Source() == flow.ByEcho && p.window.Snapshot().SRTT > 0
			}, soon, 10*time.Millisecond)
		})
	}
}

// What is larger than any datagram of QUIC's does not wait for one: 64 KB each, of 64 in
// each of a peer's requests, would be gigabytes.
func TestUDPThatFitsNoDatagramDoesNotWait(t *testing.T) {
	server := echoUDP(t)
	m, l := udpListener(t, access.Datagrams{}, nil)
	s, said := dialMASQUE(t, m).udp(pathOf(server))
	require.Equal(t, http.StatusOK, said.status)
	large := make([]byte, 1+20_000) // with its context, in a capsule
	_, err := s.Write(append(quicvarint.Append([]byte{0}, uint64(len(large))), large...))
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		status, err := l.Status()
		require.NoError(t, err)
		return status.Datagrams.Failed == 1
	}, soon, time.Millisecond)
	echoes(t, s, "and on it goes")
}

func TestUDPIsRefusedLikeConnections(t *testing.T) {
	m, _ := udpListener(t, access.Datagrams{}, func(tunnel.Sent) error {
		return fmt.Errorf("not there: "+
			"%w", fs.ErrPermission)
	})
	c := dialMASQUE(t, m)
	for path, status := range map[string]int{
		udpPath + "192.0.2.1/443/":          http.StatusForbidden,
		udpPath + "2001%3Adb8%3A%3A1/443/":  http.StatusForbidden,
		udpPath + "10.10.0.9/443/":          http.StatusBadGateway, // inside, and no client's
		udpPath + "192.0.2.1/0/":            http.StatusBadRequest,
		udpPath + "192.0.2.1/65536/":        http.StatusBadRequest,
		udpPath + "192.0.2.1/443":           http.StatusBadRequest,
		udpPath + "a%2Fb/443/":              http.StatusBadRequest,
		udpPath + "/443/":                   http.StatusBadRequest,
		"/.well-known/masque/ip/*/*/":       http.StatusBadRequest,
		udpPath + "nothing.invalid/443/x/y": http.StatusBadRequest,
	} {
		_, said := c.udp(path)
		assert.Equal(t, status, said.status, path)
	}
}

// over waits for the end of a request.
func over(t *testing.T, s *http3.RequestStream) {
	t.Helper()
	require.NoError(t, s.SetReadDeadline(time.Now().Add(soon))) //nolint:forbidigo // a deadline is by the clock
	_, err := s.Read(make([]byte, 1))
	require.Error(t, err)
	assert.NotContains(t, err.Error(), "deadline")
}

func TestAnIdleUDPRequestEnds(t *testing.T) {
	m, l := udpListener(t, access.Datagrams{Idle: 50 * time.Millisecond}, nil)
	s, said := dialMASQUE(t, m).udp(pathOf(echoUDP(t)))
	require.Equal(t, http.StatusOK, said.status)
	over(t, s)
	assert.Zero(t, l.datagrams.Stats().Sessions)
}

func TestAUDPRequestEndsWhereItsTargetIsNotThere(t *testing.T) {
	at := netip.AddrPortFrom(netip.MustParseAddr(need.Host()), 9) // nobody listens there
	m, _ := udpListener(t, access.Datagrams{}, nil)
	s, said := dialMASQUE(t, m).udp(pathOf(at))
	require.Equal(t, http.StatusOK, said.status)
	require.NoError(t, s.SendDatagram([]byte("\x00anybody?")))
	over(t, s)
}

func TestUDPRequestsOfAClientAreBounded(t *testing.T) {
	server := echoUDP(t)
	m, l := udpListener(t, access.Datagrams{Sessions: 2}, nil)
	c := dialMASQUE(t, m)
	var streams []*http3.RequestStream
	for i := range 3 {
		s, said := c.udp(pathOf(server))
		require.Equal(t, http.StatusOK, said.status)
		echoes(t, s, fmt.Sprint("number ", i))
		streams = append(streams, s)
	}
	over(t, streams[0])
	echoes(t, streams[1], "still here")
	echoes(t, streams[2], "and here")
	assert.EqualValues(t, 1, l.datagrams.Stats().Evicted)
}

func TestARevokedTokenEndsItsUDP(t *testing.T) {
	m, l := udpListener(t, access.Datagrams{}, nil)
	s, said := dialMASQUE(t, m).udp(pathOf(echoUDP(t)))
	require.Equal(t, http.StatusOK, said.status)
	require.NoError(t, m.SetTokens(testTokens()[1:]))
	over(t, s)
	require.Eventually(t, func() bool { return l.datagrams.Stats().Sessions == 0 }, soon, time.Millisecond)
}

func FuzzCapsulesUDP(f *testing.F) {
	f.Add([]byte("\x00\x03\x00hi"))
	f.Add([]byte("\x40\x00\x01"))
	f.Fuzz(func(t *testing.T, b []byte) {
		sum := 0
		err := capsulesUDP(bytes.NewReader(b), func(p []byte) bool { sum += len(p); return true })
		assert.Error(t, err, "it ends with its stream")
		assert.LessOrEqual(t, sum, len(b))
	})
}

func FuzzUDPTarget(f *testing.F) {
	f.Add("192.0.2.1/443/")
	f.Add("%5B::1%5D/1/")
	f.Fuzz(func(t *testing.T, rest string) {
		u, err := url.Parse("https://vpn.test" + udpPath + rest)
		if err != nil {
			return
		}
		target, host, err := udpTarget(&http.Request{URL: u})
		if err != nil {
			return
		}
		assert.NotEqual(t, target.IsValid(), host != "")
		assert.False(t, strings.ContainsAny(host, "/%"))
	})
}

// oneFamily is a name server that never answers for the other family.
type oneFamily struct {
	network string
	addrs   []netip.Addr
}

func (o oneFamily) LookupNetIP(ctx context.Context, network, _ string) ([]netip.Addr, error) {
	if network == o.network {
		return o.addrs, nil
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestNamesAreReachedThoughOneFamilyIsNeverAnswered(t *testing.T) {
	refused, server := netip.MustParseAddr("192.0.2.1"), echoUDP(t)
	resolver := oneFamily{"ip4", []netip.Addr{refused, server.Addr()}}
	m, _ := udpListenerOf(t, func(c *MASQUEConfig) { c.Resolver = resolver }, access.Datagrams{},
		func(s tunnel.Sent) error {
			if s.Target.Addr() == refused {
				return fs.ErrPermission
			}
			return nil
		})
	c := dialMASQUE(t, m)
	_, said := c.udp(fmt.Sprintf("%sa.test/%d/", udpPath, server.Port()))
	assert.Equal(t, http.StatusOK, said.status)
	scope, err := scopeOf(&http.Request{URL: &url.URL{Path: ipPath + "a.test/*/"}},
		func(ctx context.Context, name string) ([]netip.Addr, error) { return m.resolveName(ctx, "phone", name) })
	require.NoError(t, err)
	assert.Equal(t, []netip.Prefix{prefixOf(refused), prefixOf(server.Addr())}, scope.prefixes)
	assert.Zero(t, m.lookups.Taken(), "they are over")
}

func TestNamesThatAreLookedUpAreBoundedForEachPeer(t *testing.T) {
	m, _ := udpListener(t, access.Datagrams{}, nil)
	server := echoUDP(t)
	byName := fmt.Sprintf("%s%s/%d/", udpPath, need.LoopbackName, server.Port())
	c := dialMASQUE(t, m)
	for range maxLookups / 2 {
		require.True(t, m.lookups.Take("phone"))
	}
	refused, said := c.udp(byName)
	assert.Equal(t, http.StatusServiceUnavailable, said.status)
	why, err := io.ReadAll(refused)
	require.NoError(t, err)
	assert.Contains(t, string(why), errLookups.Error())
	_, said = c.ask("connect-ip", ipPath+need.LoopbackName+"/*/")
	assert.Equal(t, http.StatusServiceUnavailable, said.status)
	_, said = c.udp(pathOf(server))
	assert.Equal(t, http.StatusOK, said.status, "an address is not looked up")
	assert.True(t, m.lookups.Take("tablet"), "others have room")

	m.lookups.Leave("phone")
	_, said = c.udp(byName)
	assert.Equal(t, http.StatusOK, said.status)
	assert.Equal(t, maxLookups/2, m.lookups.Taken(), "it is over")
}
