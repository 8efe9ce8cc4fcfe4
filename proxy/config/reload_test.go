package config

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/access"
)

func TestWhatHoldsUDPCannotChangeWhileItsListenerIsOpen(t *testing.T) {
	held := access.UDPSettings{Queue: 2510, UplinkQueue: 2511}
	for key, next := range map[string]access.UDPSettings{
		"listeners[1].udp.queue":    {UplinkQueue: 2511},
		"listeners[1].udp.up_queue": {Queue: 2510, UplinkQueue: 2512},
		"listeners[1].udp.up_echo":  {Queue: 2510, UplinkQueue: 2511, UplinkEcho: netip.MustParseAddr("192.0.2.1")},
	} {
		old := access.Listener{Mode: access.TPROXY, UDP: held}
		require.NoError(t, CheckListenerReload(1, old, old))
		changed := old
		changed.UDP = next
		assert.ErrorContains(t, CheckListenerReload(1, old, changed), key+": cannot change while running")
		assert.ErrorContains(t, CheckListenerReload(1, changed, old), key+": cannot change while running")
	}
}
