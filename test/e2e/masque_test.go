//go:build linux

package e2e

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/certs"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/access"
)

const (
	masquePort  = 8443
	masqueToken = "a-token-of-a-phone-s-own"
)

// masqueConfig has a certificate that was made on the spot.
var masqueConfig = func() string {
	certificate, key := certs.PEM(certs.SelfSigned("vpn.test"))
	return fmt.Sprintf("mode: masque\n    address: \":%d\"\n    tls: {certificate: %q, key: %q}\n    masque: {pool: "+
		"[10.10.0.0/24, \"fd00:10::/64\"], tokens: [{name: phone, token: %s}]}",
		masquePort, certificate, key, masqueToken)
}()

var throughMASQUE = &tunnelled{open: func(s *scene) { s.connectMASQUE() }}

// connectMASQUE brings a CONNECT-IP session up inside the client, and the way to
// the server with it.
func (s *scene) connectMASQUE() {
	s.t.Helper()
	m, err := s.openMASQUE(masqueToken)
	require.NoError(s.t, err)
	s.t.Cleanup(m.Close)
}

func (s *scene) openMASQUE(token string) (*netlab.MASQUE, error) {
	s.t.Helper()
	need.TUN(s.t)
	return s.Client.MASQUE(netlab.MASQUEConfig{
		Device: "masque0", MTU: access.MASQUEMTU, Gateway: netip.AddrPortFrom(s.EdgeNear.V4, masquePort), Token: token,
		Through: []netip.Prefix{netip.PrefixFrom(s.ServerAddr.V4, 24), netip.PrefixFrom(s.ServerAddr.V6, 64)},
	})
}

func TestAWrongTokenIsRefusedAndCounted(t *testing.T) {
	s := newScene(t)
	p := s.start(named("masque over IPv4").yaml(""))
	_, err := s.openMASQUE("a-token-of-nobody-at-all")
	require.ErrorContains(t, err, "401")
	require.Eventually(t, func() bool {
		return p.metric("penstock_tunnel_refused_packets_total") > 0 || p.metric("penstock_rejected_total") > 0
	}, patience, 20*time.Millisecond)
	assert.Zero(t, p.metric("penstock_flows_total"))
}
