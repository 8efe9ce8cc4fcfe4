package userspace

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"sync"
	"syscall"
	"testing"
	"time"

	connectip "github.com/quic-go/connect-ip-go"
	quicgo "github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/yosida95/uritemplate/v3"
	"golang.zx2c4.com/wireguard/tun"
	wgnetstack "golang.zx2c4.com/wireguard/tun/netstack"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/certs"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/netstack"
	"github.com/penstock-net/penstock/proxy/datapath/quic"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

const (
	phoneToken  = "phone-0123456789abcdef"
	tabletToken = "tablet-0123456789abcdef"
)

func testTokens() []access.Token {
	return []access.Token{{Name: "phone", Value: phoneToken}, {Name: "tablet", Value: tabletToken}}
}

func testClock() func() cc.Time {
	start := time.Now() //nolint:forbidigo // the stacks under test run on it
	return func() cc.Time { return cc.Time(time.Since(start)) + 1 }
}

// masque starts a listener on loopback; change may alter what it is configured as.
func masque(t testing.TB, change func(*MASQUEConfig)) (*MASQUE, ingress.Listener) {
	cfg := MASQUEConfig{
		Name: "masque", Addr: "127.0.0.1:0", Certificate: certs.SelfSigned("vpn.test"), Tokens: testTokens(),
		Pool:  []netip.Prefix{netip.MustParsePrefix("10.10.0.0/24"), netip.MustParsePrefix("fd00:10::/64")},
		Clock: testClock(),
	}
	if change != nil {
		change(&cfg)
	}
	stack, err := netstack.New(netstack.Config{MTU: access.MASQUEMTU, Clock: cfg.Clock})
	require.NoError(t, err)
	m, err := ListenMASQUE(cfg, stack)
	require.NoError(t, err)
	l := Listen("masque", stack, m)
	t.Cleanup(func() { assert.NoError(t, l.Close()) })
	return m, l
}

// answering admits connections and gives them to use, or refuses them with err.
func answering(t testing.TB, l ingress.Listener, err error, use func(ingress.Client)) {
	var done sync.WaitGroup
	done.Go(func() {
		_ = l.Serve(func(c datapath.Conn) {
			done.Go(func() {
				client, greetErr := l.Greet(context.Background(), c)
				if assert.NoError(t, greetErr) && client.Answer(netip.AddrPort{}, err) == nil && err == nil {
					use(client)
				}
			})
		})
	})
	t.Cleanup(func() {
		assert.NoError(t, l.Close())
		done.Wait()
	})
}

// echo sends back what comes, and its end.
func echo(t testing.TB) func(ingress.Client) {
	return func(c ingress.Client) {
		_, err := io.Copy(c.Conn, struct{ io.Reader }{c.Conn})
		assert.NoError(t, err)
		assert.NoError(t, c.Conn.Close())
	}
}

// echoing admits connections, sends back what comes, and tells of each.
func echoing(t testing.TB, l ingress.Listener) <-chan ingress.Client {
	seen := make(chan ingress.Client, 2)
	answering(t, l, nil, func(c ingress.Client) {
		seen <- c
		echo(t)(c)
	})
	return seen
}

// client is a MASQUE client.
type client struct {
	t    testing.TB
	conn *quicgo.Conn
	h3   *http3.ClientConn
}

func connect(t testing.TB, m *MASQUE, certificates ...tls.Certificate) (*client, error) {
	return connectFor(t, m, 0, certificates...)
}

// connectFor gives up when it has heard nothing for idle; 0: quic-go's default.
func connectFor(t testing.TB, m *MASQUE, idle time.Duration, certificates ...tls.Certificate) (*client, error) {
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	conn, err := quicgo.DialAddr(ctx, m.Addr().String(),
		&tls.Config{InsecureSkipVerify: true, NextProtos: []string{http3.NextProtoH3}, Certificates: certificates},
		&quicgo.Config{
			EnableDatagrams: true, InitialPacketSize: 1350, MaxIdleTimeout: idle,
			Tracer: quic.Tracer(testClock(), nil),
		})
	if err != nil {
		return nil, err
	}
	transport := &http3.Transport{EnableDatagrams: true}
	t.Cleanup(func() {
		assert.NoError(t, conn.CloseWithError(0, ""))
		assert.NoError(t, transport.Close())
	})
	return &client{t: t, conn: conn, h3: transport.NewClientConn(conn)}, nil
}

func dialMASQUE(t testing.TB, m *MASQUE) *client {
	c, err := connect(t, m)
	require.NoError(t, err)
	return c
}

func bearer(token string) http.Header {
	if token == "" {
		return http.Header{}
	}
	return http.Header{"Authorization": {"Bearer " + token}}
}

// reply is what a server says to a request.
type reply struct {
	status int
	header http.Header
}

// read reads the answer to a request.
func read(s *http3.RequestStream) (reply, error) {
	r, err := s.ReadResponse() //nolint:bodyclose // the body is the stream, whose owner closes it
	if err != nil {
		return reply{}, err
	}
	return reply{r.StatusCode, r.Header}, nil
}

// stream asks for a TCP connection.
func (c *client) stream(to, token string) (*quic.Conn, reply, error) {
	s, err := c.h3.OpenRequestStream(context.Background())
	if err != nil {
		return nil, reply{}, err
	}
	err = s.SendRequestHeader(&http.Request{
		Method: http.MethodConnect, URL: &url.URL{Host: to}, Host: to,
		Header: bearer(token),
	})
	if err != nil {
		return nil, reply{}, err
	}
	said, err := read(s)
	if err != nil || said.status != http.StatusOK {
		return nil, said, err
	}
	leg := quic.NewConn(c.conn.LocalAddr(), c.conn.RemoteAddr(), nil)
	return leg, said, leg.Admit(s)
}

func (c *client) mustStream(to string) *quic.Conn {
	s, _, err := c.stream(to, phoneToken)
	require.NoError(c.t, err)
	require.NotNil(c.t, s)
	return s
}

// packets asks for a CONNECT-IP session.
func (c *client) packets(token string) (*connectip.Conn, reply, error) {
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	c.t.Cleanup(cancel)
	r, err := connectip.NewRequest(ctx, uritemplate.MustNew("https://vpn.test"+ipPath+"*/*/"))
	require.NoError(c.t, err)
	for name, values := range bearer(token) {
		r.Header()[name] = values
	}
	conn, said, err := connectip.NewClientConn(c.h3).Dial(r) //nolint:bodyclose // the body is the session's stream
	if said == nil {
		return conn, reply{}, err
	}
	return conn, reply{said.StatusCode, said.Header}, err
}

// tunnelled is a client's machine: a stack of its own behind a CONNECT-IP session.
type tunnelled struct {
	*wgnetstack.Net
	ip    *connectip.Conn
	addrs []netip.Addr
}

func (c *client) tunnel(token string) *tunnelled { return c.tunnelMTU(token, access.MASQUEMTU) }

func (c *client) tunnelMTU(token string, mtu int) *tunnelled {
	ip, _, err := c.packets(token)
	require.NoError(c.t, err)
	given, err := ip.ReceiveAddressAssignment(deadlineOf(c.t))
	require.NoError(c.t, err)
	n := &tunnelled{ip: ip}
	for _, a := range given {
		require.True(c.t, a.IPPrefix.IsSingleIP())
		n.addrs = append(n.addrs, a.IPPrefix.Addr())
	}
	routes, err := ip.Routes(deadlineOf(c.t))
	require.NoError(c.t, err)
	require.Len(c.t, routes, len(n.addrs))
	dev, stack, err := wgnetstack.CreateNetTUN(n.addrs, nil, mtu)
	require.NoError(c.t, err)
	n.Net = stack
	var done, arriving sync.WaitGroup
	errors := make(chan []byte, 1024) // ICMP: that device waits for its reader before it takes any
	done.Go(func() {
		for icmp := range errors {
			deliver(dev, icmp)
		}
	})
	done.Go(func() { // towards the gateway
		defer close(errors)
		bufs, sizes := makeBuffers(1, largestPacket)
		for {
			if _, err := dev.Read(bufs, sizes, 0); err != nil {
				return
			}
			icmp, err := ip.WritePacket(bufs[0][:sizes[0]])
			if err != nil {
				return
			}
			errors <- icmp
		}
	})
	arriving.Go(func() {
		b := make([]byte, largestPacket)
		for {
			size, err := ip.ReadPacket(b)
			if err != nil {
				return
			}
			deliver(dev, b[:size])
		}
	})
	c.t.Cleanup(func() {
		_ = ip.Close()
		arriving.Wait() // what comes while the device closes, and is answered, panics
		assert.NoError(c.t, dev.Close())
		done.Wait()
	})
	return n
}

func deliver(dev tun.Device, packet []byte) {
	if len(packet) > 0 {
		_, _ = dev.Write([][]byte{packet}, 0)
	}
}

func deadlineOf(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	t.Cleanup(cancel)
	return ctx
}

func randomBytes(n int) []byte {
	data := make([]byte, n)
	_, _ = mathrand.NewChaCha8([32]byte{1}).Read(data)
	return data
}

// halfCloser is what a connection has in common with TCP's.
type halfCloser interface {
	net.Conn
	CloseWrite() error
}

// exchange sends data, ends its direction, and wants it back.
func exchange(t testing.TB, c halfCloser, data []byte) {
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(data)
		sent <- errors.Join(err, c.CloseWrite())
	}()
	got, err := io.ReadAll(c)
	require.NoError(t, err)
	require.NoError(t, <-sent)
	assert.Equal(t, sha256.Sum256(data), sha256.Sum256(got))
	require.NoError(t, c.Close())
}

func TestAStreamGoesWhereItsClientAsked(t *testing.T) {
	m, l := masque(t, nil)
	seen := echoing(t, l)
	c := dialMASQUE(t, m)
	exchange(t, c.mustStream("192.0.2.80:443"), randomBytes(3<<20))
	got := <-seen
	assert.Equal(t, "192.0.2.80:443", got.Target.String())
	assert.Equal(t, "phone", got.Peer)
	assert.Equal(t, c.conn.LocalAddr().(*net.UDPAddr).Port, int(got.Source.Port()))

	exchange(t, c.mustStream("origin.test:443"), []byte("question"))
	got = <-seen
	assert.Equal(t, "origin.test:443", got.Host)
	assert.False(t, got.Target.IsValid())
}

func TestAClientThatSaysNothingIsAskedWhetherItIsThere(t *testing.T) {
	m, l := masque(t, nil)
	accepted := echoing(t, l)
	c, err := connectFor(t, m, 5*time.Second) // the least that a server asks within
	require.NoError(t, err)
	s := c.mustStream("203.0.113.7:443")
	<-accepted
	heard := c.conn.ConnectionStats().PacketsReceived
	require.Eventually(t, func() bool { return c.conn.ConnectionStats().PacketsReceived > heard+2 }, soon,
		10*time.Millisecond)
	exchange(t, s, []byte("still there"))
}

func TestManyStreamsShareAConnection(t *testing.T) {
	m, l := masque(t, nil)
	answering(t, l, nil, echo(t))
	c := dialMASQUE(t, m)
	var done sync.WaitGroup
	for i := range 50 {
		done.Go(func() { exchange(t, c.mustStream("192.0.2.80:443"), randomBytes(1000*i)) })
	}
	done.Wait()
}

func TestADialThatFailedIsToldInHTTPsWords(t *testing.T) {
	m, l := masque(t, nil)
	answering(t, l, fmt.Errorf("dial: %w", syscall.ECONNREFUSED), nil)
	_, said, err := dialMASQUE(t, m).stream("192.0.2.80:443", phoneToken)
	require.NoError(t, err)
	assert.Equal(t, http.StatusBadGateway, said.status)
	assert.Equal(t, "penstock; error=connection_refused", said.header.Get("Proxy-Status"))
}

func TestAResetOfAStreamIsAResetAtTheOtherEnd(t *testing.T) {
	m, l := masque(t, nil)
	accepted := make(chan ingress.Client, 2)
	answering(t, l, nil, func(c ingress.Client) { accepted <- c })
	c := dialMASQUE(t, m)
	near := c.mustStream("192.0.2.80:443")
	far := <-accepted
	require.NoError(t, near.Reset())
	_, err := far.Read(make([]byte, 1))
	assert.ErrorIs(t, err, syscall.ECONNRESET)
	require.NoError(t, far.Conn.Close())

	near, far = c.mustStream("192.0.2.80:443"), <-accepted
	require.NoError(t, far.Reset())
	_, err = near.Read(make([]byte, 1))
	assert.ErrorIs(t, err, syscall.ECONNRESET)
	require.NoError(t, near.Close())
}

func TestARequestThatNobodyTakesUpIsAnswered(t *testing.T) {
	m, l := masque(t, nil)
	c := dialMASQUE(t, m)
	answered := make(chan reply, 1)
	go func() {
		_, said, err := c.stream("192.0.2.80:443", phoneToken)
		assert.NoError(t, err)
		answered <- said
	}()
	taken, err := l.(*Listener).acceptNext()
	require.NoError(t, err)
	_, err = taken.Write([]byte("x"))
	require.ErrorContains(t, err, "not been answered")
	require.NoError(t, taken.Reset())
	assert.Equal(t, http.StatusServiceUnavailable, (<-answered).status)
}

func TestAClientThatGoesWhileItsServerIsDialledGetsNothing(t *testing.T) {
	m, l := masque(t, nil)
	c := dialMASQUE(t, m)
	go func() { _, _, _ = c.stream("192.0.2.80:443", phoneToken) }()
	taken, err := l.(*Listener).acceptNext()
	require.NoError(t, err)
	asked, err := l.Greet(t.Context(), taken)
	require.NoError(t, err)
	require.NoError(t, c.conn.CloseWithError(0, ""))
	<-taken.(*request).done
	assert.ErrorIs(t, asked.Answer(netip.AddrPort{}, nil), net.ErrClosed)
	require.NoError(t, taken.Close())
}

func TestPacketsOfASessionAreConnectionsOfItsPeer(t *testing.T) {
	m, l := masque(t, nil)
	seen := echoing(t, l)
	n := dialMASQUE(t, m).tunnel(phoneToken)
	require.Len(t, n.addrs, 2)
	for i, to := range []string{"203.0.113.7:443", "[2001:db8::7]:443"} {
		c, err := n.DialContextTCPAddrPort(deadlineOf(t), netip.MustParseAddrPort(to))
		require.NoError(t, err)
		exchange(t, c, randomBytes(3<<20))
		got := <-seen
		assert.Equal(t, to, got.Target.String())
		assert.Equal(t, n.addrs[i], got.Source.Addr())
		assert.Equal(t, "phone", got.Peer)
	}
	sessions := m.Sessions()
	require.Len(t, sessions, 1)
	assert.Equal(t, "phone", sessions[0].Name)
	assert.Greater(t, sessions[0].Sent, uint64(6<<20))
	assert.Greater(t, sessions[0].Received, uint64(6<<20))
	assert.Zero(t, m.Drops().Large, "what the stack sends fits from the first packet on")
}

func TestAResetInsideATunnelIsOneAtTheOtherEnd(t *testing.T) {
	m, l := masque(t, nil)
	answering(t, l, nil, func(c ingress.Client) { assert.NoError(t, c.Conn.Reset()) })
	c, err := dialMASQUE(t, m).tunnel(phoneToken).DialContextTCPAddrPort(deadlineOf(t),
		netip.MustParseAddrPort("203.0.113.7:443"))
	require.NoError(t, err)
	_, err = c.Read(make([]byte, 1))
	assert.ErrorContains(t, err, "reset")
	require.NoError(t, c.Close())
}

// jumbo is a stack whose packets are larger than any datagram, behind a listener.
func jumbo(t testing.TB) (*MASQUE, ingress.Listener) {
	clock := testClock()
	stack, err := netstack.New(netstack.Config{MTU: jumboMTU, Clock: clock})
	require.NoError(t, err)
	m, err := ListenMASQUE(MASQUEConfig{
		Name: "masque", Addr: "127.0.0.1:0", Certificate: certs.SelfSigned("vpn.test"), Tokens: testTokens(), Clock: clock,
		Pool: []netip.Prefix{netip.MustParsePrefix("10.10.0.0/24"), netip.MustParsePrefix("fd00:10::/64")},
	}, stack)
	require.NoError(t, err)
	return m, Listen("masque", stack, m)
}

const jumboMTU = 9000

func TestSegmentsFitTheirDatagramsWhateverTheStacksSay(t *testing.T) {
	m, l := jumbo(t)
	answering(t, l, nil, echo(t))
	n := dialMASQUE(t, m).tunnelMTU(phoneToken, jumboMTU)
	for _, to := range []string{"203.0.113.7:443", "[2001:db8::7]:443"} {
		c, err := n.DialContextTCPAddrPort(deadlineOf(t), netip.MustParseAddrPort(to))
		require.NoError(t, err)
		exchange(t, c, randomBytes(1<<20))
	}
	assert.Zero(t, m.Drops().Large)
}

func TestAPacketThatIsTooBigIsCountedAndTheNextIsSent(t *testing.T) {
	m, l := jumbo(t)
	t.Cleanup(func() { assert.NoError(t, l.Close()) })
	ip, _, err := dialMASQUE(t, m).packets(phoneToken)
	require.NoError(t, err)
	given, err := ip.ReceiveAddressAssignment(deadlineOf(t))
	require.NoError(t, err)
	from, to := netip.AddrPortFrom(server4, 53), netip.AddrPortFrom(given[0].IPPrefix.Addr(), 4000)
	const headers = ipv4Header + 8
	for _, size := range []int{jumboMTU, 100} {
		require.NoError(t, m.stack.SendUDP(from, to, make([]byte, size-headers)))
	}
	got := make([]byte, jumboMTU)
	n, err := ip.ReadPacket(got)
	require.NoError(t, err)
	assert.Equal(t, 100, n)
	assert.EqualValues(t, 1, m.Drops().Large)
	require.NoError(t, ip.Close())
}

func TestWhoMayNotIsRefusedAndCounted(t *testing.T) {
	m, _ := masque(t, nil)
	c := dialMASQUE(t, m)
	refusals, wrong := uint64(0), uint64(0)
	for _, token := range []string{"", "wrong-0123456789abcdef", phoneToken + "x", phoneToken[:len(phoneToken)-1]} {
		_, said, err := c.stream("192.0.2.80:443", token)
		require.NoError(t, err)
		assert.Equal(t, http.StatusUnauthorized, said.status)
		assert.Equal(t, "Bearer", said.header.Get("WWW-Authenticate"))
		_, said, err = c.packets(token)
		require.Error(t, err)
		assert.Equal(t, http.StatusUnauthorized, said.status)
		refusals += 2
		assert.Equal(t, refusals, m.Refused())
		if token != "" {
			wrong += 2
		}
		var s tunnel.Status
		require.NoError(t, m.Report(&s))
		assert.Equal(t, wrong, s.Unauthorized)
	}
	began := time.Now()
	_, said, err := c.stream("192.0.2.80:443", "wrong-0123456789abcdef")
	require.NoError(t, err)
	assert.Equal(t, http.StatusUnauthorized, said.status)
	assert.GreaterOrEqual(t, time.Since(began), 2*time.Second, "who guesses waits")
	assert.Empty(t, m.Sessions())
	ip, _, err := c.packets(phoneToken)
	require.NoError(t, err, "who knows it does not")
	require.NoError(t, ip.Close())
}

func TestACertificateOpensTheDoorToWhoeverItIsOf(t *testing.T) {
	ours, others := certs.NewAuthority(), certs.NewAuthority()
	m, l := masque(t, func(c *MASQUEConfig) { c.Tokens, c.ClientCAs = nil, ours.Pool() })
	seen := echoing(t, l)
	c, err := connect(t, m, ours.Issue("laptop", "vpn.test"))
	require.NoError(t, err)
	s, _, err := c.stream("192.0.2.80:443", "")
	require.NoError(t, err)
	exchange(t, s, []byte("question"))
	assert.Equal(t, "laptop", (<-seen).Peer)

	for i, certificates := range [][]tls.Certificate{nil, {others.Issue("laptop", "vpn.test")}} {
		c, err := connect(t, m, certificates...)
		if err == nil { // a client's handshake is over before the server has looked at its certificate
			_, _, err = c.stream("192.0.2.80:443", "")
		}
		assert.ErrorContains(t, err, "tls:")
		assert.EqualValues(t, i+1, m.Refused())
	}
}

func TestOtherAuthoritiesOpenTheDoorFromThenOn(t *testing.T) {
	ours, others := certs.NewAuthority(), certs.NewAuthority()
	m, l := masque(t, func(c *MASQUEConfig) { c.Tokens, c.ClientCAs = nil, ours.Pool() })
	echoing(t, l)
	m.authorities.Store(others.Pool())
	c, err := connect(t, m, others.Issue("laptop", "vpn.test"))
	require.NoError(t, err)
	s, _, err := c.stream("192.0.2.80:443", "")
	require.NoError(t, err)
	exchange(t, s, []byte("question"))
	c, err = connect(t, m, ours.Issue("laptop", "vpn.test"))
	if err == nil {
		_, _, err = c.stream("192.0.2.80:443", "")
	}
	assert.ErrorContains(t, err, "tls:")
}

func TestATokenThatIsTakenAwayEndsWhatItOpened(t *testing.T) {
	m, l := masque(t, nil)
	accepted := make(chan ingress.Client, 2)
	answering(t, l, nil, func(c ingress.Client) { accepted <- c })
	c := dialMASQUE(t, m)
	near := c.mustStream("192.0.2.80:443")
	far := <-accepted
	require.NoError(t, m.SetTokens([]access.Token{{Name: "tablet", Value: tabletToken}}))
	_, err := far.Read(make([]byte, 1))
	assert.ErrorIs(t, err, syscall.ECONNRESET)
	_, err = near.Read(make([]byte, 1))
	assert.ErrorIs(t, err, syscall.ECONNRESET)
	require.NoError(t, far.Conn.Close())
	require.NoError(t, near.Close())

	_, said, err := dialMASQUE(t, m).stream("192.0.2.80:443", phoneToken)
	require.NoError(t, err)
	assert.Equal(t, http.StatusUnauthorized, said.status)
	assert.Error(t, m.SetTokens([]access.Token{{Name: "short", Value: "abc"}}))
}

func TestNoListenerIsOpenByAccident(t *testing.T) {
	stack, err := netstack.New(netstack.Config{MTU: access.MASQUEMTU, Clock: testClock()})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, stack.Close()) })
	cert := certs.SelfSigned("vpn.test")
	for want, cfg := range map[string]MASQUEConfig{
		"needs a certificate":     {Tokens: testTokens()},
		"nobody could be refused": {Certificate: cert},
		"cannot be open":          {Certificate: cert, Open: true, Tokens: testTokens()},
		"openssl rand":            {Certificate: cert, Tokens: []access.Token{{Name: "phone", Value: "short"}}},
		"have the same token": {
			Certificate: cert,
			Tokens:      []access.Token{{Name: "a", Value: phoneToken}, {Name: "b", Value: phoneToken}},
		},
		"10.0.0.0/32 has no room": {
			Certificate: cert, Open: true,
			Pool: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/32")},
		},
		"10.0.0.0/8 and 10.1.0.0/1": {
			Certificate: cert, Open: true,
			Pool: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("10.1.0.0/16")},
		},
		`UDP address "nonsense"`: {Certificate: cert, Open: true, Addr: "nonsense"},
	} {
		cfg.Name, cfg.Clock = "masque", testClock()
		_, err := ListenMASQUE(cfg, stack)
		assert.ErrorContains(t, err, want)
		assert.ErrorContains(t, err, `tunnel: listener "masque": `)
	}
}

func TestAnOpenListenerTellsClientsApartByTheirAddress(t *testing.T) {
	m, l := masque(t, func(c *MASQUEConfig) { c.Tokens, c.Open = nil, true })
	seen := echoing(t, l)
	s, _, err := dialMASQUE(t, m).stream("192.0.2.80:443", "")
	require.NoError(t, err)
	exchange(t, s, []byte("question"))
	assert.Equal(t, "127.0.0.1", (<-seen).Peer)
	one, _ := m.authenticate(&http.Request{RemoteAddr: "[2001:db8::1]:4000"})
	other, _ := m.authenticate(&http.Request{RemoteAddr: "[2001:db8::2]:4000"})
	assert.Equal(t, one, other, "a host may use all of its /64")
}

func TestOnlyWhatIsServedIsAnswered(t *testing.T) {
	m, _ := masque(t, func(c *MASQUEConfig) { c.Pool = nil })
	c := dialMASQUE(t, m)
	for _, row := range []struct {
		name   string
		r      *http.Request
		status int
	}{
		{
			"a page", &http.Request{
				Method: http.MethodGet,
				URL:    &url.URL{Scheme: "https", Host: "vpn.test", Path: "/"},
			},
			http.StatusMethodNotAllowed,
		},
		{"a destination without a port", &http.Request{
			Method: http.MethodConnect, URL: &url.URL{Host: "192.0.2.1"},
			Host: "192.0.2.1",
		}, http.StatusBadRequest},
		{"packets, without a pool", &http.Request{
			Method: http.MethodConnect, Proto: "connect-ip",
			URL: &url.URL{Scheme: "https", Host: "vpn.test", Path: ipPath + "*/*/"},
		}, http.StatusNotImplemented},
		{"UDP without a target", &http.Request{
			Method: http.MethodConnect, Proto: "connect-udp",
			URL: &url.URL{Scheme: "https", Host: "vpn.test", Path: "/x"},
		}, http.StatusBadRequest},
		{"what nobody knows", &http.Request{
			Method: http.MethodConnect, Proto: "connect-ether",
			URL: &url.URL{Scheme: "https", Host: "vpn.test", Path: "/x"},
		}, http.StatusNotImplemented},
	} {
		t.Run(row.name, func(t *testing.T) {
			row.r.Header = bearer(phoneToken)
			s, err := c.h3.OpenRequestStream(t.Context())
			require.NoError(t, err)
			require.NoError(t, s.SendRequestHeader(row.r))
			said, err := read(s)
			require.NoError(t, err)
			assert.Equal(t, row.status, said.status)
		})
	}
}

func TestADrainLetsStreamsAndPacketsFinishAndTakesNoNewOnes(t *testing.T) {
	m, l := masque(t, nil)
	accepted := echoing(t, l)
	c := dialMASQUE(t, m)
	n := c.tunnel(phoneToken)
	inTunnel, err := n.DialContextTCPAddrPort(deadlineOf(t), netip.MustParseAddrPort("203.0.113.7:443"))
	require.NoError(t, err)
	<-accepted
	stream := c.mustStream("203.0.113.7:443")
	<-accepted

	l.Drain()
	s, said, err := c.stream("203.0.113.7:443", phoneToken)
	assert.Nil(t, s)
	assert.True(t, err != nil || said.status == http.StatusServiceUnavailable, "rejected by HTTP/3, or by us before it")
	exchange(t, stream, randomBytes(100_000))
	exchange(t, inTunnel, randomBytes(100_000))
}

func TestWhatIsLeftWhenAListenerClosesIsResetThroughTheTunnel(t *testing.T) {
	m, l := masque(t, nil)
	accepted := make(chan ingress.Client, 2)
	answering(t, l, nil, func(c ingress.Client) { accepted <- c })
	c := dialMASQUE(t, m)
	n := c.tunnel(phoneToken)
	inTunnel, err := n.DialContextTCPAddrPort(deadlineOf(t), netip.MustParseAddrPort("203.0.113.7:443"))
	require.NoError(t, err)
	<-accepted
	stream := c.mustStream("203.0.113.7:443")
	leg := <-accepted
	require.NoError(t, leg.Reset()) // as the proxy does, whose streams they are
	require.NoError(t, l.Close())
	for _, conn := range []net.Conn{inTunnel, stream} {
		_, err := conn.Read(make([]byte, 1))
		assert.ErrorContains(t, err, "reset")
	}
}

// A QUIC connection that is closed takes with it what has arrived and was not read.
func TestAListenerThatClosesWaitsForItsClientsToRead(t *testing.T) {
	m, l := masque(t, nil)
	m.leaveWait = time.Hour
	data := randomBytes(100_000)
	answering(t, l, nil, func(c ingress.Client) {
		_, err := c.Write(data)
		assert.NoError(t, errors.Join(err, c.CloseWrite()))
		_, err = io.Copy(io.Discard, struct{ io.Reader }{c.Conn})
		assert.NoError(t, err)
		assert.Eventually(t, func() bool {
			n, err := c.Conn.(*quic.Conn).Undelivered()
			return err == nil && n == 0
		}, soon, time.Millisecond)
		assert.NoError(t, c.Conn.Close())
	})
	c := dialMASQUE(t, m)
	s := c.mustStream("192.0.2.80:443")
	require.NoError(t, s.CloseWrite())
	closed := make(chan error, 1)
	go func() { closed <- l.Close() }()
	select {
	case <-c.conn.Context().Done():
		require.Fail(t, "closed before all was read")
	case <-time.After(3 * flushWait): //nolint:forbidigo // nothing tells of what does not happen
	}
	got, err := io.ReadAll(s)
	require.NoError(t, err)
	assert.Equal(t, sha256.Sum256(data), sha256.Sum256(got))
	require.NoError(t, <-closed)
	require.NoError(t, s.Close())
}
