package ingress

import (
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// noRoute are the errors of asking for a route where there is none, where it refuses (unreachable,
// prohibit and blackhole), or where the kernel has not the family.
var noRoute = []syscall.Errno{
	unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL, unix.EAFNOSUPPORT, unix.EOPNOTSUPP,
}

// Local reports whether what is sent to addr ends on this machine, by the
// kernel's routes of this moment: any address of an interface, loopback, and
// what else is routed here.
func Local(addr netip.Addr) (bool, error) {
	routes, err := netlink.RouteGet(addr.Unmap().WithZone("").AsSlice())
	if isOneOf(err, noRoute) {
		return false, nil
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
