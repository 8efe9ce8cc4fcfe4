package ingress_test

import (
	"fmt"
	"net/netip"
	"os"
	"syscall"

	"github.com/penstock-net/penstock/proxy/ingress"
)

// Clients ask for an address or for a name. An address in the place of a name is an address.
func ExampleDestination() {
	for _, asked := range []string{"203.0.113.7:443", "[2001:db8::7]:443", "www.example.com:443", "www.example.com:0"} {
		target, host, err := ingress.Destination(asked)
		switch {
		case err != nil:
			fmt.Println("refused:", err)
		case target.IsValid():
			fmt.Println("address", target)
		default:
			fmt.Println("name", host)
		}
	}
	// Output:
	// address 203.0.113.7:443
	// address [2001:db8::7]:443
	// name www.example.com:443
	// refused: port "0" is not in 1..65535
}

// A server behind the proxy learns the client's address from the first line of the connection.
func ExampleWriteProxyHeader() {
	client, server := netip.MustParseAddrPort("192.0.2.1:40000"), netip.MustParseAddrPort("203.0.113.7:443")
	_ = ingress.WriteProxyHeader(os.Stdout, 1, client, server, netip.AddrPort{})
	// Output: PROXY TCP4 192.0.2.1 203.0.113.7 40000 443
}

// A failed dial becomes an answer in the client's protocol.
func ExampleHTTPFailure() {
	status, proxyStatus, reason := ingress.HTTPFailure(fmt.Errorf("dial: %w", syscall.ECONNREFUSED))
	fmt.Println(status, proxyStatus)
	fmt.Println(reason)
	// Output:
	// 502 penstock; error=connection_refused
	// the server refused the connection
}
