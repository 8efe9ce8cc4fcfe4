package ingress

import (
	"errors"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Local reports whether what is sent to addr ends on this machine, by the
// kernel's routes of this moment: any address of an interface, loopback, and
// what else is routed here.
func Local(addr netip.Addr) (bool, error) {
	routes, err := netlink.RouteGet(addr.Unmap().WithZone("").AsSlice())
	for _, no := range []error{
		unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL, // no route, and the routes that refuse
		unix.EAFNOSUPPORT, unix.EOPNOTSUPP, // no such family
	} {
		if errors.Is(err, no) {
			return false, nil
		}
	}
	if err != nil {
		return false, err
	}
	for _, r := range routes {
		if r.Type == unix.RTN_LOCAL || r.Type == unix.RTN_ANYCAST {
			return true, nil
		}
	}
	return false, nil
}
