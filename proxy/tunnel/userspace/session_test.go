package userspace

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/datapath/netstack"
)

// With as many sessions as there may be, each with as many remotes as one alone may have, a tunnel
// would take gigabytes.
func TestSessionsShareTheRoomForRemotes(t *testing.T) {
	d := &Datagrams{sessions: map[origin]*session{}}
	s := &session{d: d, remotes: map[netip.AddrPort]*uplink{}}
	d.sessions[s.from] = s
	learn := func(n int) {
		for port := range n {
			s.addRemote(netip.AddrPortFrom(outside4, uint16(port)), nil)
		}
	}
	learn(2 * maxRemotes)
	assert.Len(t, s.remotes, maxRemotes)

	const sessions = 4096
	for id := range uint16(sessions - 1) {
		d.sessions[origin{AddrPort: netip.AddrPortFrom(outside4, id), echo: true}] = nil
	}
	last := netip.AddrPortFrom(outside4, 2*maxRemotes) // which is not there: of the others any were forgotten
	s.addRemote(last, nil)
	assert.Len(t, s.remotes, maxRemotesTotal/sessions)
	assert.True(t, s.knowsRemote(last))
}

func TestTheSessionsOfAPeerThatIsGoneEndAtOnce(t *testing.T) {
	f := newForwarder(t, 100)
	server := silent(t)
	for _, peer := range []string{"10.9.0.2", "10.9.0.3"} {
		f.UDP(netip.AddrPortFrom(netip.MustParseAddr(peer), 1000), server, 64, []byte("hello"))
	}
	require.Equal(t, 2, f.Stats().Sessions)
	f.outside.revoked.Store("10.9.0.2")
	f.Configure(usual())
	assert.Zero(t, f.of("10.9.0.2"))
	assert.Equal(t, 1, f.of("10.9.0.3"))
}

// The peer asks over one family, and the server's host answers over the other that nobody listens.
func TestANameServerOfTheOtherFamilyThatRefusesIsToldOf(t *testing.T) {
	needNamespace(t)
	for server, own := range map[netip.Addr]string{outside4: "[fd00:9::1]:53", outside6: "10.9.0.1:53"} {
		cfg := usual()
		cfg.DNS = netip.AddrPortFrom(server, 9)
		g := gate(t, cfg, anywhere, nil)
		g.outside.SetPool([]netip.Prefix{netip.MustParsePrefix("10.9.0.0/24"), netip.MustParsePrefix("fd00:9::/64")})
		c, err := g.phone.DialUDPAddrPort(netip.AddrPort{}, netip.MustParseAddrPort(own))
		require.NoError(t, err)
		assert.Eventually(t, func() bool {
			_, err := c.Write([]byte("anybody?"))
			return err != nil && strings.Contains(err.Error(), "refused")
		}, soon, 10*time.Millisecond, own)
		require.NoError(t, c.Close())
	}
}

func TestErrorsAreTranslated(t *testing.T) {
	for _, row := range []struct {
		is, becomes netstack.Unreachable
		six         bool
	}{
		{netstack.Unreachable{Type: 3, Code: 3}, netstack.Unreachable{Type: 1, Code: 4}, true},
		{netstack.Unreachable{Type: 3, Code: 13}, netstack.Unreachable{Type: 1, Code: 1}, true},
		{netstack.Unreachable{Type: 3, Code: 10}, netstack.Unreachable{Type: 1, Code: 3}, true},
		{netstack.Unreachable{Type: 11}, netstack.Unreachable{Type: 1, Code: 3}, true},
		{netstack.Unreachable{Type: 1, Code: 4}, netstack.Unreachable{Type: 3, Code: 3}, false},
		{netstack.Unreachable{Type: 3, Code: 1}, netstack.Unreachable{Type: 3, Code: 1}, false},
	} {
		assert.Equal(t, row.becomes, translateICMP(row.is, row.six))
	}
}
