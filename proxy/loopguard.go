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
	services  []uint16                         // ports of this process's own services; set before it serves
	local     func(netip.Addr) (bool, error)   // reports whether an address is this machine's

	clock func() cc.Time

	mu       sync.Mutex
	dialling map[wire]int // our server legs, from us to the server
	captured map[wire]int // captured client legs, from the client to its destination

	// Server legs to services of this process that have ended: since rotatedAt, and in the time of keepEnded before that.
	// A rotation drops the older ones, so that no leg needs a timer.
	ended, endedBefore map[wire]struct{}
	rotatedAt          cc.Time
}

// keepEnded is for how long a service of this process may still read from a connection that we have closed. The
// telemetry address waits less long for a request.
const keepEnded = 30 * time.Second

// wire identifies a connection by both its ends, because a client on this machine and the proxy may use the same port
// for different destinations.
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

// addCaptured counts a captured connection. It refuses one that the proxy opened itself.
func (g *loopGuard) addCaptured(w wire) error { return g.addWire(g.captured, g.dialling, w) }

// addDialled counts a server leg. It refuses one that was captured before this call.
func (g *loopGuard) addDialled(w wire) error { return g.addWire(g.dialling, g.captured, w) }

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

// isDialled reports whether a connection is a server leg, or was one less than keepEnded ago. It may still report so
// for twice that time.
func (g *loopGuard) isDialled(w wire) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.rotateEnded()
	_, ended := g.ended[w]
	_, endedBefore := g.endedBefore[w]
	return g.dialling[w] > 0 || ended || endedBefore
}

// rotateEnded begins a new map of ended legs once the present one is keepEnded old, and drops the one before it. mu is
// held.
func (g *loopGuard) rotateEnded() {
	now := g.clock()
	age := now.Sub(g.rotatedAt)
	if g.ended != nil && age < keepEnded {
		return
	}
	g.endedBefore = g.ended
	if age >= 2*keepEnded {
		g.endedBefore = nil
	}
	g.ended, g.rotatedAt = map[wire]struct{}{}, now
}

// removeCaptured undoes addCaptured.
func (g *loopGuard) removeCaptured(w wire) { g.removeWire(g.captured, w) }

// removeDialled undoes addDialled. A leg to a service of this process is remembered for keepEnded. Legs to other hosts
// are not: with a service at port 443, every leg to a web site would be.
func (g *loopGuard) removeDialled(w wire) {
	here := w.from.addr == w.to.addr || netip.AddrFrom16(w.from.addr).Unmap().IsLoopback()
	if here && slices.Contains(g.services, w.to.port) {
		g.mu.Lock()
		g.rotateEnded()
		g.ended[w] = struct{}{}
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
