package ingress

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// noRoute are the errors of asking for a route where there is none, where it refuses
// (unreachable, prohibit and blackhole), or where the kernel has not the family.
var noRoute = []syscall.Errno{
	unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL, unix.EAFNOSUPPORT, unix.EOPNOTSUPP,
}

// routeChanges are the netlink groups with all changes that can alter an answer of Local.
var routeChanges = []uint{
	unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV4_RULE,
	unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV6_RULE,
}

// maxAnswers bounds the addresses that Routes remembers an answer for: 16,384 take about 1 MB.
const maxAnswers = 16 << 10

// Routes tell which addresses are this machine's. Those of OpenRoutes remember the kernel's answers until it says that
// a link, an address, a route or a rule has changed. The zero value remembers nothing, and opens a socket for each
// question.
type Routes struct {
	handle  netlink.Handle
	changes *nl.NetlinkSocket // nil: answers are not remembered
	done    chan struct{}     // closed once changes are read no more

	mu      sync.Mutex
	answers map[netip.Addr]bool // nil: none is remembered
	version int                 // number of changes so far
	asked   int                 // questions to the kernel so far
}

// OpenRoutes returns the routes of this thread's network namespace. All questions go over one
// socket, which Close closes.
func OpenRoutes() (*Routes, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("ingress: open a socket to ask for routes: %w", err)
	}
	changes, err := nl.Subscribe(unix.NETLINK_ROUTE, routeChanges...)
	if err != nil {
		h.Close()
		return nil, fmt.Errorf("ingress: open a socket for changes of routes: %w", err)
	}
	r := &Routes{handle: *h, changes: changes, done: make(chan struct{}), answers: map[netip.Addr]bool{}}
	go r.forgetChanged()
	return r, nil
}

// Close closes the sockets.
func (r *Routes) Close() {
	r.handle.Close()
	r.changes.Close()
	<-r.done
}

// forgetChanged forgets all answers with each change, until Close.
func (r *Routes) forgetChanged() {
	defer close(r.done)
	for {
		_, _, err := r.changes.Receive()
		if err != nil && !errors.Is(err, unix.ENOBUFS) { // ENOBUFS: changes were lost, so that answers are forgotten too
			r.replaceAnswers(nil)
			return
		}
		r.replaceAnswers(map[netip.Addr]bool{})
	}
}

// replaceAnswers replaces the remembered answers; nil: from now on none are remembered.
func (r *Routes) replaceAnswers(answers map[netip.Addr]bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answers = answers
	r.version++
}

// Local reports whether packets to addr end on this machine: any address of an interface,
// loopback, and what else is routed here.
func (r *Routes) Local(addr netip.Addr) (bool, error) {
	addr = addr.Unmap().WithZone("")
	r.mu.Lock()
	local, known := r.answers[addr]
	version := r.version
	r.mu.Unlock()
	if known {
		return local, nil
	}
	local, err := r.askKernel(addr)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked++
	if err == nil && r.answers != nil && r.version == version { // else the answer may be older than a change
		if len(r.answers) >= maxAnswers {
			clear(r.answers)
		}
		r.answers[addr] = local
	}
	return local, err
}

// askKernel asks the kernel for the route to addr.
func (r *Routes) askKernel(addr netip.Addr) (local bool, err error) {
	routes, err := r.handle.RouteGet(addr.AsSlice())
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
