package proxy_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/linkstat"
)

func TestTowardCountsWhoHasMovedBytesToHostsBehindALink(t *testing.T) {
	r := newRig(t, under("cubic"))
	there := []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
	count := func(prefixes []netip.Prefix, lately time.Duration) [2]int {
		flows, hosts := r.proxy.CountFlowsTo(prefixes, lately)
		return [2]int{flows, hosts}
	}
	assert.Equal(t, [2]int{}, count(there, time.Hour))
	for range 2 {
		client, server := r.pair()
		_, err := client.Write([]byte("x"))
		require.NoError(t, err)
		_, err = server.Read(make([]byte, 1))
		require.NoError(t, err)
	}
	assert.Equal(t, [2]int{2, 1}, count(there, time.Hour), "client and server are one host here")
	assert.Equal(t, [2]int{}, count([]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, time.Hour))
	assert.Equal(t, [2]int{}, count(there, -time.Nanosecond), "nobody has moved a byte after now")
}

func TestSourcesOfHintsTakeARestart(t *testing.T) {
	r := newRig(t, under("cubic"))
	_, err := r.proxy.Reload(r.with(func(c *config.Config) { c.Hints = []linkstat.Settings{{Interface: "wlan0"}} }))
	assert.ErrorContains(t, err, "hints: cannot change while running")
}
