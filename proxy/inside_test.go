package proxy_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.zx2c4.com/wireguard/tun/netstack"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
)

// together is a gateway with two peers in a pool of 10.9.0.0/24.
func together(t *testing.T, isolate bool, change func(*config.Config)) (g *gateway, p, q *phone) {
	p, q = newPhone(t, "phone", "10.9.0.2"), newPhone(t, "tablet", "10.9.0.3")
	g = newGateway(t, func(c *config.Config) {
		l := &c.Listeners[0]
		l.Allow, l.Tunnel.Isolate = nil, &isolate
		l.WireGuard.Pool = []netip.Prefix{netip.MustParsePrefix("10.9.0.0/24")}
		c.Limits.DialTimeout = patience
		if change != nil {
			change(c)
		}
	}, p, q)
	p.connect(g)
	q.connect(g)
	// Each has been heard from, so that it can be called.
	for _, one := range []*phone{p, q} {
		_, err := one.dial(t, "10.9.0.99:80")
		require.ErrorContains(t, err, "refused")
	}
	return g, p, q
}

// greets has q say hello to whoever connects to port 80.
func (p *phone) greets(t *testing.T) {
	ln, err := p.net.ListenTCP(&net.TCPAddr{Port: 80})
	require.NoError(t, err)
	need.Serve(t, ln, func(c net.Conn) { _, _ = fmt.Fprint(c, "hello ", c.RemoteAddr().(*net.TCPAddr).IP) })
}

func TestPeersReachEachOtherOnlyWhereTheyAreNotIsolated(t *testing.T) {
	t.Run("isolated", func(t *testing.T) {
		g, p, q := together(t, true, nil)
		q.greets(t)
		_, err := p.dial(t, "10.9.0.3:80")
		require.ErrorContains(t, err, "refused")
		require.Eventually(t, g.rejected(proxy.RejectedDenied), patience, time.Millisecond)
	})
	t.Run("not isolated", func(t *testing.T) {
		g, p, q := together(t, false, func(c *config.Config) { c.Defaults.Algorithm = "cubic" })
		q.greets(t)
		c, err := p.dial(t, "10.9.0.3:80")
		require.NoError(t, err)
		assert.Equal(t, "hello 10.9.0.2", receive(t, c), "from the phone's own address")
		require.NoError(t, c.Close())
		_, err = p.dial(t, "10.9.0.3:81")
		require.ErrorContains(t, err, "refused", "as the tablet says")
		require.Eventually(t, func() bool { return g.proxy.Counters().Active == 0 }, patience, time.Millisecond)
		assert.Zero(t, g.proxy.Counters().Listeners[0].Rejected[proxy.RejectedDenied])
	})
	t.Run("isolated but for one", func(t *testing.T) {
		_, p, q := together(t, true, func(c *config.Config) {
			c.Listeners[0].Allow = []netip.Prefix{netip.MustParsePrefix("10.9.0.3/32")}
		})
		p.greets(t)
		q.greets(t)
		c, err := p.dial(t, "10.9.0.3:80")
		require.NoError(t, err)
		assert.Equal(t, "hello 10.9.0.2", receive(t, c))
		_, err = q.dial(t, "10.9.0.2:80")
		require.ErrorContains(t, err, "refused")
	})
}

func TestPeersKeepTheirConnectionsWhileTheirTunnelDrains(t *testing.T) {
	g, p, q := together(t, false, func(c *config.Config) { c.Shutdown.Drain = time.Hour })
	t.Cleanup(g.proxy.Abort)
	ln, err := q.net.ListenTCP(&net.TCPAddr{Port: 90})
	require.NoError(t, err)
	from, err := p.dial(t, "10.9.0.3:90")
	require.NoError(t, err)
	to, err := ln.Accept()
	require.NoError(t, err)
	send(t, from, "hello")
	hears(t, to, "hello")
	left := access.Listener{Name: "left", Mode: "mixed", Address: "127.0.0.1:0"}
	assert.Equal(t, proxy.Reloaded{Opened: 1, Closing: 1}, g.reload(listeners(left)))
	send(t, to, "still here")
	hears(t, from, "still here")
}

// echoes has p send back the datagrams that come to port 90.
func (p *phone) echoes(t *testing.T) {
	c, err := p.net.ListenUDP(&net.UDPAddr{Port: 90})
	require.NoError(t, err)
	need.Echo(t, c)
}

// ping waits for the answer to an echo request. A socket that misses it, since it comes
// before the wait for it has begun, hears of no other: each request has its own.
func (p *phone) ping(t *testing.T, to string, wait time.Duration) (err error) {
	for ; wait > 0; wait -= time.Second {
		var c *netstack.PingConn
		c, err = p.net.DialPingAddr(p.inner, netip.MustParseAddr(to))
		require.NoError(t, err)
		var got []byte
		got, err = answer(t, c, []byte{8, 0, 0, 0, 0, 7, 0, 1, 'h', 'i'}, min(wait, time.Second))
		_ = c.Close() // a socket in memory
		if err == nil {
			assert.Equal(t, "hi", string(got[8:]))
			return nil
		}
	}
	return err
}

const notAtAll = 200 * time.Millisecond // for what is not to come

func TestDatagramsAndPingsGoFromPeerToPeer(t *testing.T) {
	at := &net.UDPAddr{IP: net.IPv4(10, 9, 0, 3), Port: 90}
	t.Run("not isolated", func(t *testing.T) {
		g, p, q := together(t, false, nil)
		q.echoes(t)
		for range 3 {
			got, err := p.ask(t, at, patience)
			require.NoError(t, err)
			assert.Equal(t, "hello", got)
		}
		require.NoError(t, p.ping(t, "10.9.0.3", patience))
		require.NoError(t, q.ping(t, "10.9.0.2", patience))
		d := g.proxy.Tunnels()[0].Datagrams
		assert.Zero(t, d.Sessions, "no socket plays a part")
		assert.Zero(t, d.Refused+d.Failed+d.Unsolicited)
	})
	t.Run("isolated", func(t *testing.T) {
		g, p, q := together(t, true, nil)
		q.echoes(t)
		_, err := p.ask(t, at, notAtAll)
		require.Error(t, err)
		require.Error(t, p.ping(t, "10.9.0.3", notAtAll))
		refused := func() bool { return g.proxy.Tunnels()[0].Datagrams.Refused == 2 }
		assert.Eventually(t, refused, patience, time.Millisecond, "once the tunnel is up, which may take longer")
	})
	t.Run("isolated but for one", func(t *testing.T) {
		_, p, q := together(t, true, func(c *config.Config) {
			c.Listeners[0].Allow = []netip.Prefix{netip.MustParsePrefix("10.9.0.3/32")}
		})
		p.echoes(t)
		q.echoes(t)
		got, err := p.ask(t, at, patience)
		require.NoError(t, err, "who is asked may answer")
		assert.Equal(t, "hello", got)
		require.NoError(t, p.ping(t, "10.9.0.3", patience))
		_, err = q.ask(t, &net.UDPAddr{IP: net.IPv4(10, 9, 0, 2), Port: 90}, notAtAll)
		require.Error(t, err)
		require.Error(t, q.ping(t, "10.9.0.2", notAtAll))
	})
}

func TestTheGatewayAnswersPingsInsideAndUnusedAddressesAreUnreachable(t *testing.T) {
	for _, isolate := range []bool{true, false} {
		g, p, _ := together(t, isolate, nil)
		require.NoError(t, p.ping(t, "10.9.0.1", patience))
		require.Error(t, p.ping(t, "10.9.0.77", notAtAll))
		for _, last := range []byte{1, 77} {
			_, err := p.ask(t, &net.UDPAddr{IP: net.IPv4(10, 9, 0, last), Port: 90}, notAtAll)
			require.Error(t, err)
		}
		for _, to := range []string{"10.9.0.1:80", "10.9.0.77:80"} {
			_, err := p.dial(t, to)
			require.ErrorContains(t, err, "refused")
		}
		d := g.proxy.Tunnels()[0].Datagrams
		assert.Equal(t, uint64(3), d.Refused)
		assert.Equal(t, uint64(3), d.Notices, "whoever sent it is told")
		assert.Zero(t, d.Sessions)
	}
}

func TestWhatIsSentToAPeerByAnotherSharesItsWindow(t *testing.T) {
	g, p, q := together(t, false, func(c *config.Config) { c.Defaults.Algorithm = "cubic" })
	ln, err := q.net.ListenTCP(&net.TCPAddr{Port: 80})
	require.NoError(t, err)
	t.Cleanup(func() { _ = ln.Close() })
	c, err := p.dial(t, "10.9.0.3:80")
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	server, err := ln.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = server.Close() })
	send(t, c, "hello")
	hears(t, server, "hello")
	var flows []proxy.FlowInfo
	require.Eventually(t, func() bool { // a dial that nobody answers may still be on its way
		flows = flowsOf(g.proxy)
		return len(flows) == 1
	}, patience, time.Millisecond)
	assert.Equal(t, "down|vpn|through phone", flows[0].Down.Flow.Group)
	assert.Equal(t, "down|vpn|through tablet", flows[0].Up.Flow.Group)
	assert.Equal(t, "netstack", flows[0].Server.Tier)
}

// connects asks a listener for a connection.
func (g *gateway) connects(t *testing.T, listener, target string) (net.Conn, *bufio.Reader, int) {
	t.Helper()
	c, err := net.Dial("tcp", g.proxy.Addrs()[listener].String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetDeadline(time.Now().Add(patience))) //nolint:forbidigo // a deadline is by the clock
	_, err = fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", target, target)
	require.NoError(t, err)
	r := bufio.NewReader(c)
	answer, err := http.ReadResponse(r, &http.Request{Method: http.MethodConnect})
	require.NoError(t, err)
	require.NoError(t, answer.Body.Close())
	return c, r, answer.StatusCode
}

func TestOthersReachWhatIsInsideATunnelWhereTheyMay(t *testing.T) {
	site := newPhone(t, "site", "192.168.50.7") // of a network behind a peer, with no address of the pool
	g, _, q := together(t, true, func(c *config.Config) {
		c.Listeners[0].WireGuard.Peers = append(c.Listeners[0].WireGuard.Peers, site.peer())
		c.Listeners = append(c.Listeners,
			access.Listener{Name: "asks", Mode: "mixed", Address: "127.0.0.1:0"},
			access.Listener{
				Name: "may", Mode: "mixed", Address: "127.0.0.1:0",
				Allow: []netip.Prefix{
					netip.MustParsePrefix("10.9.0.0/24"),
					netip.MustParsePrefix("192.168.50.0/24"),
				},
			},
			access.Listener{Name: "forward", Mode: "forward", Address: "127.0.0.1:0", Target: "10.9.0.3:80"})
		c.Defaults.Algorithm = "cubic"
	})
	site.connect(g)
	_, err := site.dial(t, "10.9.0.99:80")
	require.ErrorContains(t, err, "refused", "it has been heard from")
	q.greets(t)
	site.greets(t)
	for _, target := range []string{"10.9.0.1:80", "10.9.0.3:80", "10.9.0.77:80", "[::ffff:10.9.0.3]:80"} {
		_, _, status := g.connects(t, "asks", target)
		assert.Equal(t, http.StatusForbidden, status, target)
	}
	for _, target := range []string{"10.9.0.3:80", "192.168.50.7:80"} {
		c, r, status := g.connects(t, "may", target)
		require.Equal(t, http.StatusOK, status, target)
		said, err := io.ReadAll(r)
		require.NoError(t, err)
		assert.Equal(t, "hello 10.9.0.1", string(said), "from the gateway's own address")
		require.NoError(t, c.Close())
	}
	for target, want := range map[string]int{
		"10.9.0.1:80":  http.StatusBadGateway,
		"10.9.0.77:80": http.StatusBadGateway,
	} {
		_, _, status := g.connects(t, "may", target)
		assert.Equal(t, want, status, "nobody is there: "+target)
	}
	c, err := net.Dial("tcp", g.proxy.Addrs()["forward"].String())
	require.NoError(t, err)
	assert.Equal(t, "hello 10.9.0.1", receive(t, c))
	require.NoError(t, c.Close())
}

// What is uploaded to a peer shares the window of what it downloads, whoever sends it.
func TestWhatOthersSendAPeerSharesItsWindow(t *testing.T) {
	g, _, q := together(t, true, func(c *config.Config) {
		c.Listeners = append(c.Listeners,
			access.Listener{Name: "forward", Mode: "forward", Address: "127.0.0.1:0", Target: "10.9.0.3:80"})
		c.Defaults.Algorithm = "cubic"
	})
	ln, err := q.net.ListenTCP(&net.TCPAddr{Port: 80})
	require.NoError(t, err)
	t.Cleanup(func() { _ = ln.Close() })
	c, err := net.Dial("tcp", g.proxy.Addrs()["forward"].String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	peer, err := ln.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = peer.Close() })
	send(t, c, "hello")
	hears(t, peer, "hello")
	var flows []proxy.FlowInfo
	require.Eventually(t, func() bool {
		flows = flowsOf(g.proxy)
		return len(flows) == 1
	}, patience, time.Millisecond)
	assert.Equal(t, "down|vpn|through tablet", flows[0].Up.Flow.Group)

	// It ends with the peer.
	g.reload(func(c *config.Config) { c.Listeners[0].WireGuard.Peers = c.Listeners[0].WireGuard.Peers[:1] })
	require.NoError(t, c.SetDeadline(time.Now().Add(patience))) //nolint:forbidigo // a deadline is by the clock
	_, err = c.Read(make([]byte, 1))
	require.ErrorContains(t, err, "reset")
}
