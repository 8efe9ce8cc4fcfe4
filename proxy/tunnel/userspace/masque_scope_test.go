package userspace

import (
	"context"
	"io/fs"
	"net/http"
	"net/netip"
	"net/url"
	"testing"
	"time"

	connectip "github.com/quic-go/connect-ip-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

func scoped(t testing.TB, rest string) (ipScope, error) {
	u, err := url.Parse("https://vpn.test" + ipPath + rest)
	require.NoError(t, err)
	lookup := func(_ context.Context, name string) ([]netip.Addr, error) {
		if name != "named.test" {
			return nil, fs.ErrNotExist
		}
		return []netip.Addr{netip.MustParseAddr("203.0.113.7")}, nil
	}
	return scopeOf((&http.Request{URL: u}).WithContext(t.Context()), lookup)
}

func TestScopesAreReadAndTold(t *testing.T) {
	route := func(from, to string, protocol uint8) connectip.IPRoute {
		return connectip.IPRoute{
			StartIP: netip.MustParseAddr(from), EndIP: netip.MustParseAddr(to),
			IPProtocol: protocol,
		}
	}
	const last6 = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
	both := []netip.Addr{client4, client6}
	for rest, want := range map[string][]connectip.IPRoute{
		"*/*/":                     {route("0.0.0.0", "255.255.255.255", 0), route("::", last6, 0)},
		"%2A/17/":                  {route("0.0.0.0", "255.255.255.255", 17), route("::", last6, 17)},
		"203.0.113.7/6/":           {route("203.0.113.7", "203.0.113.7", 6)},
		"named.test/*/":            {route("203.0.113.7", "203.0.113.7", 0)},
		"203.0.113.0%2F24/*/":      {route("203.0.113.0", "203.0.113.255", 0)},
		"2001%3Adb8%3A%3A%2F32/*/": {route("2001:db8::", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", 0)},
	} {
		s, err := scoped(t, rest)
		require.NoError(t, err, rest)
		assert.Equal(t, want, s.advertisedRoutes(both), rest)
	}
	four, err := scoped(t, "203.0.113.7/*/")
	require.NoError(t, err)
	assert.Empty(t, four.advertisedRoutes([]netip.Addr{client6}), "from an address of the other family")

	for _, rest := range []string{
		"", "*", "*/*", "*/*/x", "/*/", "*//", "*/0/", "*/256/", "*/tcp/", "203.0.113.7%2F24/*/", "fe80%3A%3A1%25eth0/*/", "a%2Fb/*/",
	} {
		_, err := scoped(t, rest)
		assert.Error(t, err, rest)
	}
}

func TestProtocolsAreFoundBehindExtensionHeaders(t *testing.T) {
	udp := make([]byte, 8)
	extension := func(next uint8, units uint8, rest []byte) []byte {
		return append(append([]byte{next, units}, make([]byte, 6+8*int(units))...), rest...)
	}
	assert.EqualValues(t, 17, protocolOf(ip(client4, server4, 17, udp)))
	assert.EqualValues(t, 17, protocolOf(ip(client6, server6, 17, udp)))
	assert.EqualValues(t, 17, protocolOf(ip(client6, server6, 0, extension(60, 1, extension(17, 0, udp)))))
	assert.EqualValues(t, 6, protocolOf(ip(client6, server6, 44, extension(6, 0, udp))))
	for n := range 24 { // however short it is
		protocolOf(ip(client6, server6, 0, extension(60, 1, udp))[:ipv6Header+n])
	}
}

func TestASessionCarriesWhatItAskedFor(t *testing.T) {
	m, _ := masque(t, nil)
	s := dialMASQUE(t, m).scoped(t, m, 1, "203.0.113.0%2F24/17/")
	from := m.Sessions()[0].Addresses[0]
	elsewhere := netip.MustParseAddr("198.51.100.1")
	for _, p := range [][]byte{udp(from, elsewhere, 100), syn(from, server4, header.TCPFlagSyn, nil)} {
		require.NoError(t, s.SendDatagram(append([]byte{0}, p...)))
	}
	require.Eventually(t, func() bool { return m.Drops().Destination == 2 }, soon, time.Millisecond)
	for _, p := range [][]byte{udp(from, server4, 100), ip(from, server4, 1, make([]byte, 80))} {
		require.NoError(t, s.SendDatagram(append([]byte{0}, p...)))
	}
	require.Eventually(t, func() bool { return m.Sessions()[0].Received == 200 }, soon, time.Millisecond)
	assert.EqualValues(t, 2, m.Drops().Destination)
}

func FuzzProtocolOf(f *testing.F) {
	f.Add(ip(client6, server6, 0, make([]byte, 40)))
	f.Fuzz(func(t *testing.T, p []byte) {
		if _, _, ok := endsOf(p); ok {
			protocolOf(p)
		}
	})
}
