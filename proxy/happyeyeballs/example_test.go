package happyeyeballs_test

import (
	"context"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"github.com/penstock-net/penstock/proxy/happyeyeballs"
)

// addressBook is a resolver that knows one name: its addresses by network.
type addressBook map[string][]netip.Addr

func (b addressBook) LookupNetIP(_ context.Context, network, _ string) ([]netip.Addr, error) {
	return b[network], nil
}

// The IPv6 address is tried first. It has no route here, so the IPv4 address follows at once.
func ExampleDial() {
	host := happyeyeballs.Host{
		Name:    "www.example.com",
		Timeout: 10 * time.Second,
		Resolver: addressBook{
			"ip6": {netip.MustParseAddr("2001:db8::7")},
			"ip4": {netip.MustParseAddr("203.0.113.7")},
		},
	}
	dial := func(_ context.Context, addr netip.Addr) (string, error) {
		fmt.Println("trying", addr)
		if addr.Is6() {
			return "", syscall.ENETUNREACH
		}
		return "a connection to " + addr.String(), nil
	}
	discard := func(string) {} // closes what a slower attempt returns after Dial has

	conn, err := happyeyeballs.Dial(context.Background(), host, dial, discard)
	fmt.Println(conn, err)
	// Output:
	// trying 2001:db8::7
	// trying 203.0.113.7
	// a connection to 203.0.113.7 <nil>
}
