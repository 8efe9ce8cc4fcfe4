package userspace

import (
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	pathPeriod  = 10 * time.Second // how long a path's MTU counts where a send fails once it is less
	routePeriod = time.Second      // and where none does
	maxPaths    = 4096
	anyPort     = 9 // a route has none, but a socket needs one

	udpHeader       = 8
	wireGuardHeader = 16 + 16 // with the tag behind the packet
	wireGuardBlock  = 16      // packets are padded to a multiple of it
)

// paths are the paths to peers' endpoints.
type paths struct {
	readMTU func(from netip.Addr, to netip.AddrPort) (int, error)
	period  time.Duration
	changed chan struct{} // has a value once a path's largest packet is another

	mu         sync.Mutex
	byEndpoint map[netip.AddrPort]path
}

type path struct {
	mtu     int // of the route; 0: the kernel does not tell
	largest int // bytes of the largest payload that UDP_SEGMENT is used for
	read    time.Time
}

func newPaths(readMTU func(netip.Addr, netip.AddrPort) (int, error), period time.Duration) *paths {
	return &paths{readMTU: readMTU, period: period, changed: make(chan struct{}, 1), byEndpoint: map[netip.AddrPort]path{}}
}

// largestPayload returns how large a payload to an endpoint may be to leave in one packet, in bytes. It
// asks the kernel again after a period.
func (p *paths) largestPayload(e *udpEndpoint) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.find(e.SrcIP(), e.to).largest
}

// routeMTU returns the MTU of the route to an address; 0: the kernel does not tell.
func (p *paths) routeMTU(to netip.Addr) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.find(netip.Addr{}, netip.AddrPortFrom(to, anyPort)).mtu
}

// find returns what is known of a path, not older than a period. The caller holds p.mu.
func (p *paths) find(from netip.Addr, to netip.AddrPort) path {
	known, exists := p.byEndpoint[to]
	if !exists || time.Since(known.read) > p.period { //nolint:forbidigo // the kernel's routes are of the real clock
		return p.readPath(from, to)
	}
	return known
}

// noteTooLarge notes that UDP_SEGMENT failed for packets of size bytes. If the route's MTU is not the
// reason, no size is tried until a period is over.
func (p *paths) noteTooLarge(e *udpEndpoint, size int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if now := p.readPath(e.SrcIP(), e.to); now.largest >= size {
		now.largest = 0
		p.byEndpoint[e.to] = now
	}
}

// readPath asks the kernel for the path to an address. The caller holds p.mu.
func (p *paths) readPath(from netip.Addr, to netip.AddrPort) path {
	now := path{largest: maxMessage, read: time.Now()} //nolint:forbidigo // see above
	if mtu, err := p.readMTU(from, to); err == nil {
		now.mtu, now.largest = mtu, mtu-outerHeaders(to.Addr())
	}
	before, exists := p.byEndpoint[to]
	if !exists && len(p.byEndpoint) >= maxPaths {
		for other, old := range p.byEndpoint {
			if now.read.Sub(old.read) > p.period {
				delete(p.byEndpoint, other)
			}
		}
		if len(p.byEndpoint) >= maxPaths {
			return now
		}
	}
	p.byEndpoint[to] = now
	if before.mtu != now.mtu {
		select {
		case p.changed <- struct{}{}:
		default:
		}
	}
	return now
}

// largestInner returns how large a packet in WireGuard to an endpoint may be, in bytes, so that the
// packet around it needs no fragments; 0: the path is not known.
func (p *paths) largestInner(to netip.AddrPort) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	known := p.byEndpoint[to]
	if known.mtu == 0 {
		return 0
	}
	return (known.mtu - outerHeaders(to.Addr()) - wireGuardHeader) / wireGuardBlock * wireGuardBlock
}

func outerHeaders(to netip.Addr) int {
	if to.Is4() {
		return ipv4Header + udpHeader
	}
	return ipv6Header + udpHeader
}

// readRouteMTU returns the MTU of the route to an endpoint, with what routers on the path have
// told of it. It sends nothing.
func readRouteMTU(from netip.Addr, to netip.AddrPort) (int, error) {
	family, level, option := unix.AF_INET, unix.IPPROTO_IP, unix.IP_MTU
	if to.Addr().Is6() {
		family, level, option = unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_MTU
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd) //nolint:errcheck // it has sent nothing
	if from.IsValid() && !from.IsLinkLocalUnicast() {
		_ = unix.Bind(fd, sockaddrOf(netip.AddrPortFrom(from, 0))) // it may have left; the route may do without
	}
	if err := unix.Connect(fd, sockaddrOf(to)); err != nil {
		return 0, err
	}
	return unix.GetsockoptInt(fd, level, option)
}

func sockaddrOf(at netip.AddrPort) unix.Sockaddr {
	if at.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}
}
