package userspace

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/access"
)

// The phone says nothing after the first endpoint has gone: it hears from the second,
// and sends there from then on.
func TestAPeerIsSoughtWhereItWasBeforeTheEndpointWasRestarted(t *testing.T) {
	private, public := keys(t)
	phoneKey, phonePublic := keys(t)
	_, strangerPublic := keys(t)
	peers := []access.Peer{
		{Name: "phone", PublicKey: phonePublic, AllowedIPs: []netip.Prefix{netip.PrefixFrom(inner, 32)}},
		{Name: "stranger", PublicKey: strangerPublic, AllowedIPs: []netip.Prefix{netip.MustParsePrefix("10.9.0.3/32")}},
	}
	w, l := endpoint(t, private, peers...)
	net0 := phone(t, phoneKey, public, w.Addr())
	first, err := net0.DialUDPAddrPort(netip.AddrPort{}, netip.MustParseAddrPort("203.0.113.1:9"))
	require.NoError(t, err)
	_, err = first.Write([]byte("hello"))
	require.NoError(t, err)
	require.NoError(t, first.Close())
	handshake := func(w *WireGuard) bool {
		states, err := w.States()
		return assert.NoError(t, err) && !states[0].Handshake.IsZero()
	}
	const patience = 30 * time.Second
	require.Eventually(t, func() bool { return handshake(w) }, patience, time.Millisecond)
	states, err := w.States()
	require.NoError(t, err)
	at, err := netip.ParseAddrPort(states[0].Endpoint)
	require.NoError(t, err)
	require.NoError(t, l.Close())

	again, _ := endpoint(t, private, peers...) // at another port, since this one may be another's by now
	again.Resume(map[access.Key]netip.AddrPort{phonePublic: at})
	require.Eventually(t, func() bool { return handshake(again) }, patience, time.Millisecond)
	states, err = again.States()
	require.NoError(t, err)
	assert.Empty(t, states[1].Endpoint, "nothing is known of the stranger")

	before, _ := again.stack.Traffic()
	second, err := net0.DialUDPAddrPort(netip.AddrPort{}, netip.MustParseAddrPort("203.0.113.1:9"))
	require.NoError(t, err)
	defer second.Close()                //nolint:errcheck // a socket in memory
	require.Eventually(t, func() bool { // what leaves before the new keys are confirmed is lost
		_, _ = second.Write([]byte("hello")) // that it is refused there is told here
		now, _ := again.stack.Traffic()
		return now > before
	}, patience, 10*time.Millisecond)
}
