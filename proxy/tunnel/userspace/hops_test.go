package userspace

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

// hopsTold returns how to learn the hop limit of the next packet that c gets.
func hopsTold(t *testing.T, c net.PacketConn, six bool) func() int {
	require.NoError(t, c.SetReadDeadline(time.Now().Add(soon))) //nolint:forbidigo // a deadline is by the clock
	b := make([]byte, 1<<10)
	if six {
		p := ipv6.NewPacketConn(c)
		require.NoError(t, p.SetControlMessage(ipv6.FlagHopLimit, true))
		return func() int {
			_, m, _, err := p.ReadFrom(b)
			require.NoError(t, err)
			return m.HopLimit
		}
	}
	p := ipv4.NewPacketConn(c)
	require.NoError(t, p.SetControlMessage(ipv4.FlagTTL, true))
	return func() int {
		_, m, _, err := p.ReadFrom(b)
		require.NoError(t, err)
		return m.TTL
	}
}

// Datagrams go round a loop of gateways until their hops run out, as round one of
// routers. The phone's own stack lets them pass 64.
func TestADatagramLeavesWithOneHopLess(t *testing.T) {
	for _, to := range []netip.Addr{outside4, outside6} {
		t.Run("UDP to "+to.String(), func(t *testing.T) {
			g := gate(t, usual(), anywhere, nil)
			server, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 0)))
			require.NoError(t, err)
			defer server.Close() //nolint:errcheck // it only listened
			next := hopsTold(t, server, to.Is6())
			c, err := g.phone.DialUDPAddrPort(netip.AddrPort{}, server.LocalAddr().(*net.UDPAddr).AddrPort())
			require.NoError(t, err)
			_, err = c.Write([]byte("hello"))
			require.NoError(t, err)
			assert.Equal(t, 63, next())
			require.NoError(t, c.Close())
		})
		t.Run("ping to "+to.String(), func(t *testing.T) {
			g := gate(t, usual(), anywhere, nil)
			network, request := "ip4:icmp", byte(8)
			if to.Is6() {
				network, request = "ip6:ipv6-icmp", 128
			}
			server, err := net.ListenPacket(network, to.String())
			if err != nil {
				t.Skipf("needs CAP_NET_RAW: %v", err)
			}
			defer server.Close() //nolint:errcheck // it only listened
			next := hopsTold(t, server, to.Is6())
			c, err := g.phone.DialPingAddr(netip.Addr{}, to)
			require.NoError(t, err)
			_, err = c.Write([]byte{request, 0, 0, 0, 0, 0, 0, 1})
			require.NoError(t, err)
			assert.Equal(t, 63, next())
			require.NoError(t, c.Close())
		})
	}
}
