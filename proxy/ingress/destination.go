package ingress

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"github.com/penstock-net/penstock/proxy/config/check"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// maxAuthority bounds a "host:port", in bytes. No name or address with a port is as long.
const maxAuthority = 300

// Destination reads the "host:port" that a client asks for. It returns an address, or else "name:port".
func Destination(authority string) (netip.AddrPort, string, error) {
	if len(authority) > maxAuthority {
		return netip.AddrPort{}, "", fmt.Errorf("host and port of %d bytes", len(authority))
	}
	host, port, err := net.SplitHostPort(authority)
	if err != nil {
		return netip.AddrPort{}, "", err
	}
	return destinationOf(host, port)
}

// destinationOf returns the address or the "name:port" that a client asked for. A name in the form of an address
// becomes an address, so that policy's rules for addresses apply.
func destinationOf(host, port string) (netip.AddrPort, string, error) {
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || port[0] == '+' {
		return netip.AddrPort{}, "", fmt.Errorf("port %.8q is not in 1..65535", port)
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		return datapath.PlainAddr(netip.AddrPortFrom(addr, uint16(n))), "", nil
	}
	if len(host) == 0 || len(host) > 255 {
		return netip.AddrPort{}, "", fmt.Errorf("host name of %d bytes", len(host))
	}
	if !check.IsHostName(host) {
		return netip.AddrPort{}, "", fmt.Errorf("host name %q has a byte that no host name has", host)
	}
	return netip.AddrPort{}, net.JoinHostPort(host, strconv.FormatUint(n, 10)), nil
}
