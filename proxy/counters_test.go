package proxy

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
)

// A peer may leave its tunnel between the decision about a connection and the moment that counts it.
func TestAPeerThatHasLeftIsCountedUntilItsConnectionEnds(t *testing.T) {
	var sums totals
	vpn := access.Listener{Name: "vpn", Mode: "wireguard"}
	sums.dropStale(&config.Config{Listeners: []access.Listener{vpn}})
	route, peer := sums.countOpened(routeKey{listener: "vpn"}, "phone", "", "")
	rows, peers := sums.copyTotals()
	require.Len(t, rows, 1)
	require.Len(t, peers, 1)
	sums.countClosed(route, peer, &FlowInfo{}, Cause{}, 0)
	rows, peers = sums.copyTotals()
	assert.Len(t, rows, 1, "rule and listener are in force")
	assert.Empty(t, peers)
}
