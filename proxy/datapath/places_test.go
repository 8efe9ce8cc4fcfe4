package datapath_test

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/penstock-net/penstock/proxy/datapath"
)

func TestWhoTakesAllPlacesHeCanLeavesSomeToOthers(t *testing.T) {
	p := datapath.NewPlaces(12)
	takes := func(who string) (n int) {
		for p.Take(who) {
			n++
		}
		return n
	}
	assert.Equal(t, 6, takes("a"))
	assert.Equal(t, 3, takes("b"))
	assert.Equal(t, 2, takes("c"))
	assert.Equal(t, 11, p.Taken())
	assert.Equal(t, 1, takes("d"))
	assert.Zero(t, takes("e"), "none is left")
	p.Leave("a")
	assert.Zero(t, takes("a"), "who has many waits until others have had theirs")
	assert.Equal(t, 1, takes("e"))
}

func TestAHostIsAnAddressOrANetworkOfIPv6(t *testing.T) {
	for addr, host := range map[string]string{
		"192.0.2.1": "192.0.2.1", "::ffff:192.0.2.1": "192.0.2.1", "2001:db8:1:2::ffff": "2001:db8:1:2::",
		"fe80::1%eth0": "fe80::",
	} {
		assert.Equal(t, netip.MustParseAddr(host), datapath.Host(netip.MustParseAddr(addr)))
	}
}
