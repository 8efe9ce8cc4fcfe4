package userspace

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// With as many sessions as there may be, each with as many remotes as one alone may have, a tunnel
// would take gigabytes.
func TestSessionsShareTheRoomForRemotes(t *testing.T) {
	d := &Datagrams{sessions: map[origin]*session{}}
	s := &session{d: d, remotes: map[netip.AddrPort]*uplink{}}
	d.sessions[s.from] = s
	learn := func(n int) {
		for port := range n {
			s.learn(netip.AddrPortFrom(outside4, uint16(port)), nil)
		}
	}
	learn(2 * maxRemotes)
	assert.Len(t, s.remotes, maxRemotes)

	const sessions = 4096
	for id := range uint16(sessions - 1) {
		d.sessions[origin{AddrPort: netip.AddrPortFrom(outside4, id), echo: true}] = nil
	}
	last := netip.AddrPortFrom(outside4, 2*maxRemotes) // which is not there: of the others any were forgotten
	s.learn(last, nil)
	assert.Len(t, s.remotes, allRemotes/sessions)
	assert.True(t, s.knows(last))
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
