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

	"github.com/pires/go-proxyproto"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/policy"
)

// loopbackAllowed lets clients of the asking listener reach the test's servers.
var loopbackAllowed = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}

// asking makes the rig's listener one that is asked.
func asking(change func(*config.Config)) func(*config.Config) {
	return func(cfg *config.Config) {
		cfg.Listeners[0].Mode, cfg.Listeners[0].Target = "connect", ""
		if change != nil {
			change(cfg)
		}
	}
}

// ask sends a CONNECT with early data behind it and returns the status.
func (r *rig) ask(target, early string) (net.Conn, *bufio.Reader, int) {
	r.tb.Helper()
	conn, err := net.Dial("tcp", r.addr())
	require.NoError(r.tb, err)
	r.tb.Cleanup(func() { _ = conn.Close() })
	require.NoError(r.tb, conn.SetDeadline(time.Now().Add(patience)))
	_, err = fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n%s", target, target, early)
	require.NoError(r.tb, err)
	in := bufio.NewReader(conn)
	resp, err := http.ReadResponse(in, &http.Request{Method: http.MethodConnect})
	require.NoError(r.tb, err)
	require.NoError(r.tb, resp.Body.Close())
	return conn, in, resp.StatusCode
}

func (r *rig) rejected(reason proxy.Reason) func() bool {
	return func() bool { return r.proxy.Counters().Listeners[0].Rejected[reason] == 1 }
}

func TestAClientThatResetsEndsTheDialOfItsServer(t *testing.T) {
	resets := func(t *testing.T, r *rig, listener int) {
		counts := func() proxy.ListenerCounters { return r.proxy.Counters().Listeners[listener] }
		client, err := net.Dial("tcp", r.proxy.Addrs()["fwd"].String())
		require.NoError(t, err)
		require.Eventually(t, func() bool { return counts().Active == 1 }, patience, time.Millisecond)
		require.NoError(t, client.(*net.TCPConn).SetLinger(0))
		require.NoError(t, client.Close())
		require.Eventually(t, func() bool { return counts().Active == 0 }, patience, time.Millisecond)
		assert.Equal(t, map[proxy.Reason]uint64{proxy.RejectedClientGone: 1}, counts().Rejected)
	}
	t.Run("outside", func(t *testing.T) {
		silent := need.Silent(t)
		resets(t, newRig(t, func(c *config.Config) {
			c.Listeners[0].Target = silent.String()
			c.Limits.DialTimeout = time.Hour
		}), 0)
	})
	t.Run("inside a tunnel", func(t *testing.T) {
		p := newPhone(t, "phone", "10.9.0.2")
		g := newGateway(t, func(c *config.Config) {
			vpn := &c.Listeners[0].WireGuard
			vpn.Pool = []netip.Prefix{netip.MustParsePrefix("10.9.0.0/24")}
			silent := netip.MustParsePrefix("10.9.1.0/24") // the phone has none of these addresses
			vpn.Peers[0].AllowedIPs = append(vpn.Peers[0].AllowedIPs, silent)
			c.Listeners = append(c.Listeners,
				access.Listener{Name: "fwd", Mode: "forward", Address: "127.0.0.1:0", Target: "10.9.1.1:80"})
			c.Limits.DialTimeout = time.Hour
		}, p)
		p.connect(g)
		_, err := p.dial(t, "10.9.0.99:80")
		require.ErrorContains(t, err, "refused", "it has been heard from")
		resets(t, g.rig, 1)
	})
}

func TestWhereAskingClientsMayGo(t *testing.T) {
	for _, row := range []struct {
		name   string
		change func(*config.Config)
		target func(backend string) string
		status int
		reason proxy.Reason
	}{
		{"loopback is denied", nil, func(b string) string { return b }, http.StatusForbidden, proxy.RejectedDenied},
		{"also under a name", nil, func(b string) string { return need.LoopbackName + ":" + port(b) }, http.StatusForbidden, proxy.RejectedDenied},
		{"also mapped into IPv6", nil, func(b string) string { return "[::ffff:127.0.0.1]:" + port(b) }, http.StatusForbidden, proxy.RejectedDenied},
		{"metadata is denied", nil, func(string) string { return "169.254.169.254:80" }, http.StatusForbidden, proxy.RejectedDenied},
		{"what is listed is allowed", func(c *config.Config) { c.Listeners[0].Allow = loopbackAllowed }, func(b string) string { return b }, http.StatusOK, ""},
		{"a rule refuses", func(c *config.Config) {
			c.Listeners[0].Allow = loopbackAllowed
			c.Rules = []policy.RuleSettings{{Name: "no", Refuse: "not today"}}
		}, func(b string) string { return b }, http.StatusForbidden, proxy.RejectedRule},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := newRig(t, asking(row.change))
			conn, _, status := r.ask(row.target(r.backend.Addr().String()), "")
			assert.Equal(t, row.status, status)
			require.NoError(t, conn.Close()) // the proxy waits a moment for those it has refused
			if row.reason != "" {
				require.Eventually(t, r.rejected(row.reason), patience, time.Millisecond)
			}
		})
	}
}

func port(addr string) string { return netip.MustParseAddrPort(addr).String()[len("127.0.0.1:"):] }

func TestEarlyBytesArriveFirst(t *testing.T) {
	for _, algorithm := range []policy.Algorithm{"copa", "none"} {
		t.Run(string(algorithm), func(t *testing.T) {
			r := newRig(t, asking(func(c *config.Config) {
				c.Listeners[0].Allow, c.Defaults.Algorithm = loopbackAllowed, algorithm
			}))
			conn, _, status := r.ask(r.backend.Addr().String(), "early, ")
			require.Equal(t, http.StatusOK, status)
			send(t, conn, "then late")
			require.NoError(t, conn.(*net.TCPConn).CloseWrite())
			server, err := r.backend.AcceptTCP()
			require.NoError(t, err)
			defer server.Close() //nolint:errcheck // read to its end
			assert.Equal(t, "early, then late", receive(t, server))
		})
	}
}

func TestTheServerIsToldWhoTheClientIs(t *testing.T) {
	for _, version := range []policy.SendProxy{"v1", "v2"} {
		t.Run(string(version), func(t *testing.T) {
			r := newRig(t, func(c *config.Config) { c.Defaults.SendProxy = version })
			client, server := r.pair()
			send(t, client, "hello")
			require.NoError(t, client.CloseWrite())
			in := bufio.NewReader(server)
			header, err := proxyproto.Read(in)
			require.NoError(t, err)
			assert.Equal(t, string(version), fmt.Sprintf("v%d", header.Version))
			assert.Equal(t, client.LocalAddr().String(), header.SourceAddr.String())
			assert.Equal(t, server.LocalAddr().String(), header.DestinationAddr.String())
			rest, err := io.ReadAll(in)
			require.NoError(t, err)
			assert.Equal(t, "hello", string(rest))
		})
	}
}

func TestTheServerOfAnotherFamilyIsToldWhoTheClientIs(t *testing.T) {
	for _, version := range []policy.SendProxy{"v1", "v2"} {
		t.Run(string(version), func(t *testing.T) {
			if ln, err := net.Listen("tcp", "[::1]:0"); err != nil {
				t.Skipf("needs ::1: %v", err)
			} else {
				require.NoError(t, ln.Close())
			}
			r := newRig(t, func(c *config.Config) {
				c.Defaults.SendProxy, c.Listeners[0].Address = version, "[::1]:0"
			})
			client, server := r.pair()
			header, err := proxyproto.Read(bufio.NewReader(server))
			require.NoError(t, err)
			assert.Equal(t, client.LocalAddr().String(), header.SourceAddr.String())
			assert.Equal(t, client.RemoteAddr().String(), header.DestinationAddr.String())
		})
	}
}

// A load balancer in front tells who the client is; limits are for that host.
func TestTheClientIsWhoTheLoadBalancerSays(t *testing.T) {
	r := newRig(t, func(c *config.Config) {
		c.Listeners[0].ProxyProtocol.From = loopbackAllowed
		c.Limits.PerSource = new(1)
	})
	connect := func(source string) *net.TCPConn {
		conn, err := net.Dial("tcp", r.addr())
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
		send(t, conn, "PROXY TCP4 "+source+" 192.0.2.1 1000 443\r\n")
		return conn.(*net.TCPConn)
	}
	connect("203.0.113.1")
	connect("203.0.113.2")
	require.Eventually(t, func() bool { return len(r.proxy.Counters().Routes) == 1 && r.proxy.Counters().Routes[0].Active == 2 }, patience, time.Millisecond)
	var sources []string
	for _, f := range flowsOf(r.proxy) {
		sources = append(sources, f.Source.String())
	}
	assert.ElementsMatch(t, []string{"203.0.113.1:1000", "203.0.113.2:1000"}, sources)
	connect("203.0.113.1")
	require.Eventually(t, r.rejected(proxy.RejectedSourceLimit), patience, time.Millisecond)
}

// All that a tunnel's far end hands on goes over the one way to it.
func TestClientsBehindOnePeerShareAWindowWhereRulesSaySo(t *testing.T) {
	r := newRig(t, func(c *config.Config) {
		c.Listeners[0].ProxyProtocol.From = loopbackAllowed
		c.Defaults.Algorithm, c.Defaults.Group = "cubic", "tunnel"
	})
	for _, header := range []string{
		"PROXY TCP4 203.0.113.1 192.0.2.1 1000 443\r\n",
		"PROXY TCP4 203.0.113.2 192.0.2.1 1000 443\r\n", "PROXY UNKNOWN\r\n",
	} {
		conn, err := net.Dial("tcp", r.addr())
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		send(t, conn.(*net.TCPConn), header)
	}
	require.EventuallyWithT(t, func(t *assert.CollectT) { // a connection counts before its legs join their groups
		groups := map[string]int{}
		for _, f := range flowsOf(r.proxy) {
			groups[f.Down.Flow.Group]++
		}
		assert.Equal(t, map[string]int{"down|fwd|through 127.0.0.1": 2, "down|fwd|127.0.0.1": 1}, groups,
			"the peer's own connection is its own")
	}, patience, time.Millisecond)
}
