package proxy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// loopGuard keeps the proxy from talking to itself. Capture rules that know the
// firewall mark spare our connections; the guard is for all other rules.
type loopGuard struct {
	listening atomic.Pointer[[]netip.AddrPort] // addresses of our listeners
	services  []uint16                         // ports of this process that ask isDialled; set before it serves
	local     func(netip.Addr) (bool, error)   // reports whether an address is this machine's

	clock func() cc.Time

	mu       sync.Mutex
	dialling map[wire]int // our server legs, from us to the server
	captured map[wire]int // captured client legs, from the client to its destination

	// Server legs to services of this machine that have ended, since renewedAt and in the readLate before it. The two
	// maps change places, so that no leg needs a timer.
	late, older map[wire]struct{}
	renewedAt   cc.Time
}

// readLate is how long a service of this machine may read from a connection after we closed it. The
// telemetry address waits for a request for less.
const readLate = 30 * time.Second

// wire names a connection by both its ends. One address alone would not do: on
// one machine a client and the proxy may use the same port for different destinations.
type wire struct{ from, to endpoint }

// endpoint is an address without a zone, and a port.
type endpoint struct {
	addr [16]byte
	port uint16
}

// wireOf returns the connection between two addresses.
func wireOf(from, to netip.AddrPort) wire { return wire{endpointOf(from), endpointOf(to)} }

// wireOfLeg returns the connection of a leg that was dialled from this machine.
func wireOfLeg(conn datapath.Conn) wire {
	return wireOf(datapath.LocalOf(conn), datapath.RemoteOf(conn))
}

// endpointOf returns an address as an endpoint. IPv4 is written as IPv4-mapped IPv6.
func endpointOf(a netip.AddrPort) endpoint { return endpoint{a.Addr().As16(), a.Port()} }

// newLoopGuard returns a guard without listeners.
func newLoopGuard(local func(netip.Addr) (bool, error), clock func() cc.Time) *loopGuard {
	g := &loopGuard{local: local, clock: clock, dialling: map[wire]int{}, captured: map[wire]int{}}
	g.setListeners(nil)
	return g
}

// setListeners replaces the addresses of our listeners.
func (g *loopGuard) setListeners(at []netip.AddrPort) { g.listening.Store(&at) }

// checkTarget refuses a destination that is one of our listeners. Other services of
// this machine are allowed.
func (g *loopGuard) checkTarget(target netip.AddrPort) error {
	for _, l := range *g.listening.Load() {
		if l.Port() == target.Port() && g.listensAt(l.Addr(), target.Addr()) {
			return fmt.Errorf("destination %v is the proxy itself", target)
		}
	}
	return nil
}

// listensAt reports whether a listener on l receives connections to target.
func (g *loopGuard) listensAt(l, target netip.Addr) bool {
	if !l.IsUnspecified() || target.IsLoopback() || target.IsUnspecified() {
		return l.IsUnspecified() || l == target
	}
	local, err := g.local(target) // only for our very ports, so the cost does not matter
	return err != nil || local    // a refused connection is cheaper than a loop
}

var errLoop = errors.New("the connection is one of the proxy's own, captured; exempt those from capture, by mark")

// noteCaptured counts a captured connection. It refuses one that the proxy opened itself.
func (g *loopGuard) noteCaptured(w wire) error { return g.addWire(g.captured, g.dialling, w) }

// noteDialled counts a server leg. It refuses one that was captured before this call.
func (g *loopGuard) noteDialled(w wire) error { return g.addWire(g.dialling, g.captured, w) }

// addWire adds one count of w to m, unless the other map has it.
func (g *loopGuard) addWire(m, other map[wire]int, w wire) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if other[w] > 0 {
		return errLoop
	}
	m[w]++
	return nil
}

// isDialled reports whether a connection is a server leg, or was one less than readLate ago. Up to twice as long it
// may still be one.
func (g *loopGuard) isDialled(w wire) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.renewLate()
	_, late := g.late[w]
	_, older := g.older[w]
	return g.dialling[w] > 0 || late || older
}

// renewLate begins a new map once the present one is readLate old, and drops the one before. mu is held.
func (g *loopGuard) renewLate() {
	now := g.clock()
	age := now.Sub(g.renewedAt)
	if g.late != nil && age < readLate {
		return
	}
	g.older = g.late
	if age >= 2*readLate {
		g.older = nil
	}
	g.late, g.renewedAt = map[wire]struct{}{}, now
}

// forgetCaptured undoes noteCaptured.
func (g *loopGuard) forgetCaptured(w wire) { g.removeWire(g.captured, w) }

// forgetDialled undoes noteDialled. A leg to a service of this process is kept for readLate. Legs to other hosts are
// not, because a service may have the port of many sites, as 443.
func (g *loopGuard) forgetDialled(w wire) {
	here := w.from.addr == w.to.addr || netip.AddrFrom16(w.from.addr).Unmap().IsLoopback()
	if here && slices.Contains(g.services, w.to.port) {
		g.mu.Lock()
		g.renewLate()
		g.late[w] = struct{}{}
		g.mu.Unlock()
	}
	g.removeWire(g.dialling, w)
}

// removeWire takes one count of w off m.
func (g *loopGuard) removeWire(m map[wire]int, w wire) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if m[w]--; m[w] <= 0 {
		delete(m, w)
	}
}
