package ingress

import (
	"fmt"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// noRoute are the errors of asking for a route where there is none, where it refuses
// (unreachable, prohibit and blackhole), or where the kernel has not the family.
var noRoute = []syscall.Errno{
	unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL, unix.EAFNOSUPPORT, unix.EOPNOTSUPP,
}

// Routes are the kernel's, of the moment. The zero value opens a socket for each question.
type Routes struct{ handle netlink.Handle }

// OpenRoutes returns the routes of this thread's network namespace. All questions go over one
// socket, which Close closes.
func OpenRoutes() (*Routes, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("ingress: open a socket to ask for routes: %w", err)
	}
	return &Routes{handle: *h}, nil
}

// Close closes the socket.
func (r *Routes) Close() { r.handle.Close() }

// Local reports whether packets to addr end on this machine: any address of an interface,
// loopback, and what else is routed here.
func (r *Routes) Local(addr netip.Addr) (bool, error) {
	routes, err := r.handle.RouteGet(addr.Unmap().WithZone("").AsSlice())
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
