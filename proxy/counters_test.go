package proxy

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/policy"
)

// A peer may leave its tunnel between the decision about a connection and the moment that counts it.
func TestAPeerThatHasLeftIsCountedUntilItsConnectionEnds(t *testing.T) {
	var sums totals
	vpn := config.Listener{Name: "vpn", Mode: "wireguard"}
	sums.dropStale(&settings{cfg: config.Config{Listeners: []config.Listener{vpn}}})
	c := &connection{
		listener: &listenerState{cfg: vpn}, verdict: &policy.Verdict{}, chosen: ingress.Client{Peer: "phone"},
	}
	sums.countOpened(c)
	rows, peers := sums.copyTotals()
	require.Len(t, rows, 1)
	require.Len(t, peers, 1)
	sums.countClosed(c, &FlowInfo{}, Cause{}, 0)
	rows, peers = sums.copyTotals()
	assert.Len(t, rows, 1, "rule and listener are in force")
	assert.Empty(t, peers)
}
