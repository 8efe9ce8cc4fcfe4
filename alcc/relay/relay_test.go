package relay

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestOnlyPublicAddressesAreReached(t *testing.T) {
	for address, public := range map[string]bool{
		"8.8.8.8": true, "2606:4700::1111": true, "::ffff:8.8.8.8": true,
		"127.0.0.1": false, "::ffff:127.0.0.1": false, "10.1.2.3": false, "192.168.0.1": false, "100.64.0.1": false,
		"169.254.169.254": false, "0.0.0.0": false, "255.255.255.255": false, "224.0.0.1": false, "198.18.0.1": false,
		"168.63.129.16": false, // metadata at an address of the public network
		"::1":           false, "fe80::1%eth0": false, "fec0::1": false, "fd00::1": false, "ff02::1": false,
		"64:ff9b::7f00:1": false, "2002:7f00:1::": false, "::ffff:0:7f00:1": false,
	} {
		assert.Equal(t, public, isPublic(netip.MustParseAddr(address)), address)
	}
}
