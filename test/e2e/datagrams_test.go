//go:build linux

package e2e

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/netlab"
)

// listenUDP opens a UDP socket inside a node.
func listenUDP(t *testing.T, n *netlab.Node, at netip.AddrPort) *net.UDPConn {
	t.Helper()
	var conn *net.UDPConn
	require.NoError(t, n.Do(func() (err error) {
		conn, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(at))
		return err
	}))
	t.Cleanup(func() { conn.Close() })
	return conn
}

// TestAPhoneAsksForNamesAndPingsThroughItsTunnel has a name server at the server.
func TestAPhoneAsksForNamesAndPingsThroughItsTunnel(t *testing.T) {
	onceIsEnough(t)
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

	var conn *icmp.PacketConn
	require.NoError(t, s.Client.Do(func() (err error) {
		conn, err = icmp.ListenPacket("ip4:icmp", phoneAddrs[0].Addr().String())
		return err
	}))
	defer conn.Close()
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
	echo := icmp.Message{Type: ipv4.ICMPTypeEcho, Body: &icmp.Echo{ID: 7, Seq: 1, Data: []byte("are you there?")}}
	b, err := echo.Marshal(nil)
	require.NoError(t, err)
	_, err = conn.WriteTo(b, &net.IPAddr{IP: s.ServerAddr.V4.AsSlice()})
	require.NoError(t, err)
	buf := make([]byte, 1500)
	n, from, err := conn.ReadFrom(buf)
	require.NoError(t, err)
	assert.Equal(t, s.ServerAddr.V4.String(), from.String())
	reply, err := icmp.ParseMessage(1, buf[:n])
	require.NoError(t, err)
	assert.Equal(t, ipv4.ICMPTypeEchoReply, reply.Type)
	assert.Equal(t, echo.Body, reply.Body)
}

// TestADownloadByQUICThroughATunnelOverACellularLink is of connections that the
// gateway cannot end: their datagrams are forwarded.
func TestADownloadByQUICThroughATunnelOverACellularLink(t *testing.T) {
	onceIsEnough(t)
	const size = 2 * megabyte
	trace, err := sim.Generate("lte", 1, time.Minute)
	require.NoError(t, err)
	w := named("wireguard over IPv4")
	s, path := newCellular(t, sim.LinkConfig{Trace: trace, Delay: 20 * time.Millisecond, QueueBytes: 2_000_000})
	s.start(w.yaml(""))
	s.capture(w)
	path.StartOnData()

	cert, _ := certificate(t, "server.test")
	ln, err := quic.Listen(listenUDP(t, s.Server, netip.AddrPortFrom(s.ServerAddr.V4, 443)),
		&tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"test"}}, nil)
	require.NoError(t, err)
	defer ln.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	go func() {
		conn, err := ln.Accept(ctx)
		if err != nil {
			return
		}
		stream, err := conn.OpenUniStreamSync(ctx)
		if err == nil {
			_, _ = io.Copy(stream, random(5, size))
			_ = stream.Close()
		}
	}()
	conn, err := quic.Dial(ctx, listenUDP(t, s.Client, netip.AddrPortFrom(phoneAddrs[0].Addr(), 0)), net.UDPAddrFromAddrPort(netip.AddrPortFrom(s.ServerAddr.V4, 443)),
		&tls.Config{InsecureSkipVerify: true, NextProtos: []string{"test"}}, nil) //nolint:gosec // the server's key is made on the spot
	require.NoError(t, err)
	defer conn.CloseWithError(0, "") //nolint:errcheck // read to its end
	stream, err := conn.AcceptUniStream(ctx)
	require.NoError(t, err)
	got, n, err := digest(stream)
	require.NoError(t, err)
	assert.Equal(t, int64(size), n)
	assert.Equal(t, digestOf(5, size), got)
}
