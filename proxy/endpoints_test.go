package proxy_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/config"
)

func TestAGatewayTakesUpItsPeersWhereTheOneBeforeItLeftThem(t *testing.T) {
	p := newPhone(t, "phone", "10.9.0.2")
	first := newGateway(t, nil, p)
	p.connect(first)
	page := website(t, []byte("hello"))
	assert.Empty(t, first.proxy.Endpoints(nil), "nobody has come yet")
	p.download(t, page.URL)
	all := first.proxy.Endpoints(nil)
	require.Len(t, all["vpn"], 1)
	at := all["vpn"][p.public.String()]
	assert.True(t, at.Addr().Unmap().IsLoopback(), at)
	require.NoError(t, first.stop())

	second := newGateway(t, func(c *config.Config) {
		c.Listeners[0].WireGuard.PrivateKey = first.cfg.Listeners[0].WireGuard.PrivateKey
	}, p)
	all["vpn"]["no key"] = netip.MustParseAddrPort("192.0.2.1:1")
	all["gone"] = map[string]netip.AddrPort{p.public.String(): netip.MustParseAddrPort("192.0.2.1:1")}
	second.proxy.Resume(all)
	require.Eventually(t, func() bool { return !second.proxy.Tunnels()[0].Peers[0].Handshake.IsZero() }, patience, time.Millisecond,
		"the phone has said nothing since")
	assert.Equal(t, proxy.Endpoints{"vpn": {p.public.String(): at}}, second.proxy.Endpoints(nil))
	p.download(t, page.URL)
}
