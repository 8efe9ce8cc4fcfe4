package need

import (
	"net"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestLoopbackNameHasAnAddressOfEachFamily(t *testing.T) {
	machines := net.DefaultResolver
	defer func() { net.DefaultResolver = machines }()
	ResolveLoopbackName()

	found, err := net.DefaultResolver.LookupNetIP(t.Context(), "ip", LoopbackName)
	require.NoError(t, err)
	assert.ElementsMatch(t, []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()}, found)

	_, err = net.DefaultResolver.LookupNetIP(t.Context(), "ip", "other.test")
	var unknown *net.DNSError
	require.ErrorAs(t, err, &unknown)
	assert.True(t, unknown.IsNotFound)
}
