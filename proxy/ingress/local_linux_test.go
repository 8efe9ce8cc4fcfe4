package ingress

import (
	"net"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestLocalIsWhatEndsOnThisMachine(t *testing.T) {
	open, err := OpenRoutes()
	require.NoError(t, err)
	t.Cleanup(open.Close)
	for range 4 { // at a time
		t.Run("one socket", func(t *testing.T) {
			t.Parallel()
			checkLocal(t, open)
		})
	}
	t.Run("a socket each", func(t *testing.T) { checkLocal(t, new(Routes)) })
}

func checkLocal(t *testing.T, routes *Routes) {
	here := []string{"127.0.0.1", "127.9.9.9", "::ffff:127.0.0.1"}
	list, err := net.InterfaceAddrs()
	require.NoError(t, err)
	for _, a := range list {
		here = append(here, a.(*net.IPNet).IP.String())
	}
	for _, a := range here {
		local, err := routes.Local(netip.MustParseAddr(a))
		require.NoError(t, err, a)
		assert.True(t, local, a)
	}
	for _, a := range []string{"192.0.2.1", "2001:db8::1", "255.255.255.254"} {
		local, err := routes.Local(netip.MustParseAddr(a))
		require.NoError(t, err, a)
		assert.False(t, local, a)
	}
}
