//go:build linux

package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
)

// listenUDP opens a UDP socket inside a node.
func listenUDP(t *testing.T, n *netlab.Node, at netip.AddrPort) *net.UDPConn {
	t.Helper()
	var conn *net.UDPConn
	require.NoError(t, n.Do(func() (err error) {
		conn, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		return err
	}))
	t.Cleanup(func() { conn.Close() })
	return conn
}

// TestAPhoneAsksForNamesAndPingsThroughItsTunnel has a name server at the server.
func TestAPhoneAsksForNamesAndPingsThroughItsTunnel(t *testing.T) {
	needsPrivilege(t) // or a namespace that lets everybody ping
	s := named("wireguard over IPv4").open(t, "")
	answer := netip.MustParseAddr("203.0.113.9")
	dns := listenUDP(t, s.Server, netip.AddrPortFrom(s.ServerAddr.V4, 53))
	go func() {
		buf := make([]byte, 1500)
		for {
			n, from, err := dns.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(buf[:n]) != nil || len(m.Questions) == 0 {
				continue
			}
			m.Response, m.Additionals = true, nil
			if m.Questions[0].Type == dnsmessage.TypeA {
				m.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: m.Questions[0].Name, Class: dnsmessage.ClassINET, TTL: 1},
					Body:   &dnsmessage.AResource{A: answer.As4()},
				}}
			}
			if b, err := m.Pack(); err == nil {
				_, _ = dns.WriteToUDPAddrPort(b, from)
			}
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	resolver := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return s.Client.DialContext(ctx, "udp4", netip.AddrPortFrom(s.ServerAddr.V4, 53).String())
	}}
	addrs, err := resolver.LookupNetIP(ctx, "ip4", "phone.test.")
	require.NoError(t, err)
	assert.Equal(t, []netip.Addr{answer}, addrs)

	s.ping(false)
}

// ping has the phone ping the server through its tunnel.
func (s *scene) ping(v6 bool) {
	t := s.t
	t.Helper()
	network, source, target, protocol := "ip4:icmp", phoneAddrs[0].Addr(), s.ServerAddr.V4, 1
	request, reply := icmp.Type(ipv4.ICMPTypeEcho), icmp.Type(ipv4.ICMPTypeEchoReply)
	if v6 {
		network, source, target, protocol = "ip6:ipv6-icmp", phoneAddrs[1].Addr(), s.ServerAddr.V6, 58
		request, reply = ipv6.ICMPTypeEchoRequest, ipv6.ICMPTypeEchoReply
	}
	var conn *icmp.PacketConn
	require.NoError(t, s.Client.Do(func() (err error) {
		conn, err = icmp.ListenPacket(network, source.String())
		return err
	}))
	defer conn.Close()
	echo := icmp.Message{Type: request, Body: &icmp.Echo{ID: 7, Seq: 1, Data: []byte("are you there?")}}
	b, err := echo.Marshal(nil)
	require.NoError(t, err)
	var got *icmp.Message
	require.Eventually(t, func() bool { // the client drops IPv6 until its kernel has made the route to its own address
		_, err = conn.WriteTo(b, &net.IPAddr{IP: target.AsSlice()})
		require.NoError(t, err)
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(time.Second)))
		for buf := make([]byte, 1500); ; {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return false
			}
			got, err = icmp.ParseMessage(protocol, buf[:n])
			require.NoError(t, err)
			if from.String() == target.String() && got.Type == reply {
				return true
			}
		}
	}, patience, time.Millisecond)
	assert.Equal(t, echo.Body, got.Body)
}

// TestPingsPassWithoutPrivilegesLater is of the program as it is shipped, which has
// dropped its privileges before the first ping comes.
func TestPingsPassWithoutPrivilegesLater(t *testing.T) {
	needsPrivilege(t)
	need.Users(t)
	use(t, released)
	user := []string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"}
	for name, c := range map[string]struct {
		groups  string
		command []string
	}{
		"root, and the kernel's default": {"1 0", nil},
		"as the systemd unit starts it": {
			"1 0",
			append(user, "--inh-caps=-all,+net_raw", "--ambient-caps=+net_raw", "--bounding-set=-all,+net_raw"),
		},
		"an ordinary user who may open the sockets": {
			"0 2147483647",
			append(user, "--inh-caps=-all", "--bounding-set=-all"),
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := named("wireguard over IPv4")
			s := newScene(t)
			require.NoError(t, s.Edge.Sysctl("net/ipv4/ping_group_range", c.groups))
			s.start(w.yaml("envelope: auto\n"), c.command...)
			s.capture(w)
			s.proxy.hasLess(unix.CAP_NET_RAW)
			s.ping(false)
			s.ping(true)
		})
	}
}

// TestManyPortsOfAPeerLeaveRoomForConnections has a phone use more ports than the
// proxy has descriptors.
func TestManyPortsOfAPeerLeaveRoomForConnections(t *testing.T) {
	const ports, descriptors = 1000, 600
	w := named("wireguard over IPv4")
	s := newScene(t)
	s.start(w.yaml(""), "sh", "-c", fmt.Sprintf("ulimit -n %d; exec \"$@\"", descriptors), "sh")
	s.capture(w)
	need.Echo(t, listenUDP(t, s.Server, netip.AddrPortFrom(s.ServerAddr.V4, 53)))
	target := netip.AddrPortFrom(s.ServerAddr.V4, 7)
	var conns []*net.UDPConn
	hello := func(conn *net.UDPConn) {
		_, err := conn.WriteToUDPAddrPort([]byte("hello"), target)
		require.NoError(t, err)
	}
	for range ports {
		conns = append(conns, listenUDP(t, s.Client, netip.AddrPortFrom(phoneAddrs[0].Addr(), 0)))
		hello(conns[len(conns)-1])
	}
	again := 0
	require.Eventually(t, func() bool {
		if s.proxy.metric("penstock_tunnel_datagrams_total") >= ports {
			return true
		}
		for range ports / 20 { // a busy machine loses some of so many at once
			again++
			hello(conns[again%ports])
		}
		return false
	}, patience, 20*time.Millisecond)
	assert.Less(t, s.proxy.metric("penstock_tunnel_datagram_sessions"), float64(descriptors/3))
	assert.Positive(t, s.proxy.metric("penstock_tunnel_datagram_sessions_evicted_total"))
	client, server := w.pair(s)
	exchange(t, client, server, megabyte)

	last := listenUDP(t, s.Client, netip.AddrPortFrom(phoneAddrs[0].Addr(), 0))
	require.NoError(t, last.SetDeadline(time.Now().Add(patience)))
	_, err := last.WriteToUDPAddrPort([]byte("hello"), netip.AddrPortFrom(s.ServerAddr.V4, 53))
	require.NoError(t, err)
	_, _, err = last.ReadFromUDPAddrPort(make([]byte, 10))
	assert.NoError(t, err, "the newest session has room as well")
}

// TestACallLosesNothingBesideADownloadOverACellularLink has a server send the phone
// 50 packets a second, as a call does, beside a download and a flood of datagrams.
func TestACallLosesNothingBesideADownloadOverACellularLink(t *testing.T) {
	const packets, payload = 600, 632 // 0.26 Mbit/s for twelve seconds
	trace, err := sim.Generate("lte", 4, time.Minute)
	require.NoError(t, err)
	w := named("wireguard over IPv4")
	s, path := newCellular(t, sim.LinkConfig{Trace: trace, Delay: 20 * time.Millisecond, QueueBytes: 2_000_000})
	s.start(w.yaml(""))
	s.capture(w)
	path.StartOnData()

	// meet opens a pair of sockets, the server's first, that have heard of each other.
	meet := func(port uint16) (server, phone *net.UDPConn, to netip.AddrPort) {
		at := netip.AddrPortFrom(s.ServerAddr.V4, port)
		server, phone = listenUDP(t, s.Server, at), listenUDP(t, s.Client, netip.AddrPortFrom(phoneAddrs[0].Addr(), 0))
		_, err := phone.WriteToUDPAddrPort([]byte("hello"), at)
		require.NoError(t, err)
		_, to, err = server.ReadFromUDPAddrPort(make([]byte, 10))
		require.NoError(t, err)
		return server, phone, to
	}
	client, server := w.pair(s)
	go func() { _, _ = io.Copy(struct{ io.Writer }{server}, random(1, 1<<40)) }()
	go func() { _, _ = io.Copy(io.Discard, client) }()
	flood, _, to := meet(4000)
	go func() { // 20 Mbit/s
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for {
			<-tick.C
			for range 10 {
				if _, err := flood.WriteToUDPAddrPort(make([]byte, 1222), to); err != nil {
					return
				}
			}
		}
	}()
	caller, callee, to := meet(5000)
	got := make(chan int, 1)
	go func() {
		n := 0
		for buf := make([]byte, 1500); ; n++ {
			if _, _, err := callee.ReadFromUDPAddrPort(buf); err != nil {
				got <- n
				return
			}
		}
	}()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for range packets {
		<-tick.C
		_, err := caller.WriteToUDPAddrPort(make([]byte, payload), to)
		require.NoError(t, err)
	}
	require.NoError(t, callee.SetReadDeadline(time.Now().Add(3*time.Second)))
	lost := packets - <-got
	t.Logf("the call lost %d of %d; late %v, overflow %v", lost, packets,
		s.proxy.metric("penstock_tunnel_datagrams_dropped_total",
			"late"), s.proxy.metric("penstock_tunnel_datagrams_dropped_total", "overflow"))
	assert.LessOrEqual(t, lost, packets/200)
}

// TestADownloadByQUICThroughATunnelOverACellularLink is of connections that the
// gateway cannot end: their datagrams are forwarded.
func TestADownloadByQUICThroughATunnelOverACellularLink(t *testing.T) {
	const size = 2 * megabyte
	trace, err := sim.Generate("lte", 1, time.Minute)
	require.NoError(t, err)
	w := named("wireguard over IPv4")
	s, path := newCellular(t, sim.LinkConfig{Trace: trace, Delay: 20 * time.Millisecond, QueueBytes: 2_000_000})
	s.start(w.yaml(""))
	s.capture(w)
	path.StartOnData()

	stream := s.quicStream(5, size, netip.AddrPortFrom(phoneAddrs[0].Addr(), 0), s.serverUDP(443))
	got, n, err := digest(stream)
	require.NoError(t, err)
	assert.Equal(t, int64(size), n)
	assert.Equal(t, digestOf(5, size), got)
}
