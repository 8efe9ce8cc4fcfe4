package netstack

import (
	"context"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// What goes to an outlet's addresses is collected there, the rest by the stack, which
// also has it once the outlet is closed. Flush waits for both.
func TestAnOutletHasWhatIsForItsAddresses(t *testing.T) {
	const headers, most = header.IPv4MinimumSize + header.UDPMinimumSize, 3
	a := newAlone(t)
	from := netip.MustParseAddrPort("192.0.2.1:53")
	to4, to6 := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::2")
	send := func(to netip.Addr, size int) {
		source := from
		if to.Is6() {
			source = netip.MustParseAddrPort("[2001:db8::1]:53")
		}
		require.NoError(t, a.SendUDP(source, netip.AddrPortFrom(to, 4000), make([]byte, size)))
	}
	o := a.Outlet(most, []netip.Addr{to4, to6})
	send(to4, 1)
	send(netip.MustParseAddr("10.0.0.3"), 2)
	send(to6, 3)
	require.Len(t, a.next(), headers+2)
	a.silent()
	over, cancel := context.WithCancel(t.Context())
	cancel()
	a.Flush(over)
	assert.False(t, a.wire.isEmpty())

	bufs, sizes := [][]byte{make([]byte, mtu), make([]byte, mtu)}, make([]int, 2)
	n, err := o.Collect(t.Context(), bufs, sizes, 8)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	assert.Equal(t, to4, netip.AddrFrom4([4]byte(bufs[0][8+16:])))
	assert.Equal(t, to6, netip.AddrFrom16([16]byte(bufs[1][8+24:])))
	assert.True(t, a.wire.isEmpty())

	for range most + 1 {
		send(to4, 1)
	}
	assert.EqualValues(t, 1, a.Counts().Lost)
	o.Close()
	_, err = o.Collect(t.Context(), bufs, sizes, 0)
	require.Error(t, err)
	send(to4, 4)
	assert.Len(t, a.next(), headers+4)
}
