package tunnel_test

import (
	"fmt"
	"net/netip"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// A site's network lies within the network of all sites: the longest prefix decides.
func ExampleOwnersOf() {
	owners := tunnel.OwnersOf([]access.Peer{
		{Name: "sites", AllowedIPs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}},
		{Name: "berlin", AllowedIPs: []netip.Prefix{netip.MustParsePrefix("10.7.0.0/16")}},
	})
	fmt.Println(owners.Peer(netip.MustParseAddr("10.7.1.2")))
	fmt.Println(owners.Peer(netip.MustParseAddr("10.8.1.2")))
	fmt.Printf("%q\n", owners.Peer(netip.MustParseAddr("192.0.2.1")))
	// Output:
	// berlin
	// sites
	// ""
}
