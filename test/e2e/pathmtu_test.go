//go:build linux

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/capture"
)

// narrowPath is a scene whose last hops, to a host behind the client and to one behind the server, carry less
// than the links of the edge: the client and the server are routers there and say so by ICMP.
type narrowPath struct {
	*scene
	phone, site         *netlab.Node
	phoneAddr, siteAddr netlab.Addrs
}

// narrowMTU is that of the last hops, as PPPoE inside a tunnel may have it.
const narrowMTU = 1300

func newNarrowPath(t *testing.T) narrowPath {
	t.Helper()
	n := narrowPath{scene: newScene(t)}
	for _, hop := range []struct {
		name   string
		net    int
		host   **netlab.Node
		addr   *netlab.Addrs
		router *netlab.Node
		via    netlab.Addrs // the router as the edge reaches it
	}{
		{"phone", 8, &n.phone, &n.phoneAddr, n.Client, n.ClientAddr},
		{"site", 9, &n.site, &n.siteAddr, n.Server, n.ServerAddr},
	} {
		node, err := n.Node(hop.name)
		require.NoError(t, err)
		v4, v6 := fmt.Sprintf("10.77.%d.", hop.net), fmt.Sprintf("fd77:%d::", hop.net)
		*hop.host = node
		*hop.addr = netlab.Addrs{V4: netip.MustParseAddr(v4 + "2"), V6: netip.MustParseAddr(v6 + "2")}
		prefixes := []netip.Prefix{netip.MustParsePrefix(v4 + "0/24"), netip.MustParsePrefix(v6 + "/64")}
		require.NoError(t, n.Veth(
			netlab.End{Node: node, Device: "up", Addrs: []netip.Prefix{
				netip.PrefixFrom(hop.addr.V4, 24), netip.PrefixFrom(hop.addr.V6, 64),
			}},
			netlab.End{Node: hop.router, Device: "down", Addrs: []netip.Prefix{
				netip.MustParsePrefix(v4 + "1/24"), netip.MustParsePrefix(v6 + "1/64"),
			}}))
		require.NoError(t, hop.router.Forward())
		for i, via := range []netip.Addr{hop.via.V4, hop.via.V6} {
			require.NoError(t, n.Edge.Route(prefixes[i], via))
		}
		for _, router := range []string{v4 + "1", v6 + "1"} {
			require.NoError(t, node.Route(netip.Prefix{}, netip.MustParseAddr(router)))
		}
		require.NoError(t, hop.router.Do(func() error {
			link, err := netlink.LinkByName("down")
			for _, host := range []netip.Addr{hop.addr.V4, hop.addr.V6} {
				if err == nil {
					err = netlink.RouteAdd(&netlink.Route{
						Dst:       &net.IPNet{IP: host.AsSlice(), Mask: net.CIDRMask(host.BitLen(), host.BitLen())},
						LinkIndex: link.Attrs().Index, MTU: narrowMTU, MTULock: true,
					})
				}
			}
			return err
		}))
	}
	return n
}

// connect opens a connection from a port of the phone to the site.
func (n narrowPath) connect(t *testing.T, v6 bool, from, to uint16) (phone, site *net.TCPConn) {
	t.Helper()
	here, there := n.phoneAddr.V4, n.siteAddr.V4
	if v6 {
		here, there = n.phoneAddr.V6, n.siteAddr.V6
	}
	target := netip.AddrPortFrom(there, to)
	ln, err := n.site.Listen("tcp", target.String())
	require.NoError(t, err)
	defer ln.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := n.phone.DialWith(ctx, &net.Dialer{
		LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(here, from)),
	}, "tcp", target.String())
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	require.NoError(t, ln.(*net.TCPListener).SetDeadline(time.Now().Add(patience)))
	s, err := ln.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { s.Close() })
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

// requireTransfer sends a megabyte and reads it at the other end.
func requireTransfer(t *testing.T, from, to *net.TCPConn, what string) {
	t.Helper()
	sent := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	for _, c := range []*net.TCPConn{from, to} {
		require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
	}
	failed := make(chan error, 1)
	go func() {
		_, err := from.Write(sent)
		if err == nil {
			err = from.CloseWrite()
		}
		failed <- err
	}()
	got, err := io.ReadAll(to)
	require.NoError(t, err, "%s: %d bytes came", what, len(got))
	require.NoError(t, <-failed, what)
	require.True(t, bytes.Equal(sent, got), what)
}

// ICMP errors about captured connections are addressed to the address that the socket has, which is another
// machine's: forwarded there, they would leave every path that is narrower further on stuck at its first byte.
func TestPathMTUDiscoveryOfCapturedConnections(t *testing.T) {
	needsPrivilege(t)
	tproxy := capture.Rules{Mode: capture.TPROXY}
	for _, row := range []struct {
		name, listener string
		rules          capture.Rules
		tunnel         bool   // what the kernel's tunnels have in place of rules
		firewall       string // of the edge, for nft
		v4             bool   // alone
	}{
		{name: "tproxy", listener: "mode: tproxy", rules: tproxy},
		{name: "tproxy keeping the client's address", listener: "mode: tproxy, keep_client: true", rules: tproxy},
		{
			name: "tproxy keeping the client's address, translated on the way out", rules: tproxy,
			listener: "mode: tproxy, keep_client: true", v4: true,
			firewall: "table ip nat { chain out { type nat hook postrouting priority srcnat; " +
				"oifname \"" + netlab.FarDevice + "\" masquerade; }; }",
		},
		{
			name: "tproxy behind an input chain that lets in the mark", listener: "mode: tproxy", rules: tproxy,
			firewall: "table inet fw { chain input { type filter hook input priority filter; policy drop; iif lo accept; " +
				"meta mark & 0x01000000 == 0x01000000 accept; iifname \"" + netlab.FarDevice + "\" accept; " +
				"meta l4proto icmpv6 ip6 daddr fe80::/10 accept; " +
				"icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept; }; }",
		},
		{name: "redirect", listener: "mode: redirect", rules: capture.Rules{Mode: capture.Redirect}},
		{name: "a tunnel of the kernel", listener: "mode: tproxy", tunnel: true},
	} {
		t.Run(row.name, func(t *testing.T) {
			n := newNarrowPath(t)
			if row.firewall != "" {
				loadRules(t, n.Edge, row.firewall)
			}
			n.start("listeners: [{name: lan, address: \"[::]:7000\", " + row.listener + "}]\nmark: 0x2000000\n" +
				"telemetry: {address: \"" + telemetryAddr + "\"}\n")
			require.NoError(t, n.Edge.Do(func() error {
				if row.tunnel {
					return capture.Tunnel{
						Interface: netlab.NearDevice, Port: port,
						Inside: []netip.Prefix{netip.MustParsePrefix("10.77.0.0/16"), netip.MustParsePrefix("fd77::/16")},
						// neighbour discovery, which no tunnel has
						Open: []netip.Prefix{netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("ff02::/16"), netip.MustParsePrefix("fd77:1::/64")},
					}.Apply(t.Context())
				}
				row.rules.Port, row.rules.Interfaces = port, []string{netlab.NearDevice}
				row.rules.Connected, row.rules.Ports = capture.ConnectedCapture, []capture.PortRange{{First: 80, Last: 80}}
				return row.rules.Apply(t.Context())
			}))
			families := []bool{false, true}[:map[bool]int{true: 1, false: 2}[row.v4]]
			for _, v6 := range families {
				family := map[bool]string{false: "IPv4", true: "IPv6"}[v6]
				phone, site := n.connect(t, v6, 0, 80)
				requireTransfer(t, site, phone, family+", narrow towards the client")
				phone, site = n.connect(t, v6, 0, 80)
				requireTransfer(t, phone, site, family+", narrow towards the server")
			}
			if row.tunnel {
				return // it captures all ports
			}
			assert.EqualValues(t, 2*len(families), n.proxy.metric("penstock_flows_total"))
			// What is about a forwarded connection is forwarded, though its client has the listener's port.
			for _, v6 := range []bool{false, true} {
				phone, site := n.connect(t, v6, port, 81)
				requireTransfer(t, phone, site, "forwarded past the proxy")
			}
		})
	}
}

// loadRules has nft load a ruleset at a node.
func loadRules(t *testing.T, at *netlab.Node, rules string) {
	t.Helper()
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip("needs nft")
	}
	cmd := at.Command(t.Context(), "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(rules)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// With keep_client, that a server cannot be reached is told to the client's address.
func TestUnreachableServersOfKeptClientsAreHeardOf(t *testing.T) {
	needsPrivilege(t)
	s := newScene(t)
	nowhere := []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24"), netip.MustParsePrefix("2001:db8::/32")}
	for i, via := range []netip.Addr{s.ServerAddr.V4, s.ServerAddr.V6} {
		require.NoError(t, s.Edge.Route(nowhere[i], via))
		require.NoError(t, s.Server.Do(func() error {
			return netlink.RouteAdd(&netlink.Route{Type: unix.RTN_UNREACHABLE, Dst: &net.IPNet{
				IP: nowhere[i].Addr().AsSlice(), Mask: net.CIDRMask(nowhere[i].Bits(), nowhere[i].Addr().BitLen()),
			}})
		}))
	}
	require.NoError(t, s.Server.Forward())
	s.start("listeners: [{name: lan, address: \"[::]:7000\", mode: tproxy, keep_client: true}]\nmark: 0x2000000\n" +
		"telemetry: {address: \"" + telemetryAddr + "\"}\nlimits: {dial_timeout: 1h}\n")
	require.NoError(t, s.Edge.Do(func() error {
		return capture.Rules{
			Mode: capture.TPROXY, Port: port, Interfaces: []string{netlab.NearDevice}, Connected: capture.ConnectedCapture,
		}.Apply(t.Context())
	}))
	for _, target := range []string{"203.0.113.1:80", "[2001:db8::1]:80"} {
		c, err := s.Client.Dial("tcp", target)
		if err == nil { // the handshake is the edge's; the reset may come as soon as that
			defer c.Close()
			require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
			_, err = c.Read(make([]byte, 1))
		}
		require.ErrorIs(t, err, syscall.ECONNRESET, target)
	}
}
