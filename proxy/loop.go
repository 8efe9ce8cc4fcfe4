package proxy

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// loopGuard keeps the proxy from talking to itself. The firewall mark keeps
// our connections out of capture rules that know it; this is for all others.
type loopGuard struct {
	listening atomic.Pointer[[]netip.AddrPort] // where our listeners are
	local     func(netip.Addr) (bool, error)   // reports whether an address is this machine's

	mu       sync.Mutex
	dialling map[wire]int // our server legs, from us to the server
	captured map[wire]int // captured client legs, from the client to where it meant to go
	lately   map[wire]int // of dialling, to this machine, that have gone: what came by them may be yet to be read
}

// readLate is how long a service of this machine may take to read what came by a connection that has gone,
// more than the telemetry address waits for a request.
const readLate = 30 * time.Second

// wire is a connection as it is on the wire. Addresses alone would not do: on
// one machine, a client and we may use one port for different destinations.
type wire struct{ from, to endpoint }

// endpoint is an address without a zone, and a port.
type endpoint struct {
	addr [16]byte
	port uint16
}

func wireOf(from, to netip.AddrPort) wire { return wire{endpointOf(from), endpointOf(to)} }

func endpointOf(a netip.AddrPort) endpoint { return endpoint{a.Addr().As16(), a.Port()} }

func newLoopGuard(local func(netip.Addr) (bool, error)) *loopGuard {
	g := &loopGuard{local: local, dialling: map[wire]int{}, captured: map[wire]int{}, lately: map[wire]int{}}
	g.setListeners(nil)
	return g
}

// setListeners says where our listeners are from now on.
func (g *loopGuard) setListeners(at []netip.AddrPort) { g.listening.Store(&at) }

// checkTarget refuses a destination that is one of our listeners. Other services of
// this machine are fine.
func (g *loopGuard) checkTarget(target netip.AddrPort) error {
	for _, l := range *g.listening.Load() {
		if l.Port() == target.Port() && g.listensAt(l.Addr(), target.Addr()) {
			return fmt.Errorf("destination %v is the proxy itself", target)
		}
	}
	return nil
}

// listensAt reports whether a listener on l gets what is sent to target.
func (g *loopGuard) listensAt(l, target netip.Addr) bool {
	if !l.IsUnspecified() || target.IsLoopback() || target.IsUnspecified() {
		return l.IsUnspecified() || l == target
	}
	local, err := g.local(target) // only for our very ports, so the cost does not matter
	return err != nil || local    // a refused connection is cheaper than a loop
}

var errLoop = errors.New("the connection is one of the proxy's own, captured; exempt those from capture, by mark")

// noteCaptured notes a captured connection, unless it is one of our own come back.
func (g *loopGuard) noteCaptured(w wire) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.dialling[w] > 0 {
		return errLoop
	}
	g.captured[w]++
	return nil
}

// noteDialled notes a server leg, unless it has been captured in the meantime.
func (g *loopGuard) noteDialled(w wire) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.captured[w] > 0 {
		return errLoop
	}
	g.dialling[w]++
	return nil
}

// Dialled reports whether a connection of this machine, as it arrives, is one that was opened for a client,
// though that may have gone since.
func (s *Server) Dialled(from, to netip.AddrPort) bool {
	s.loops.mu.Lock()
	defer s.loops.mu.Unlock()
	w := wireOf(from, to)
	return s.loops.dialling[w] > 0 || s.loops.lately[w] > 0
}

// forgetCaptured forgets what capture noted.
func (g *loopGuard) forgetCaptured(w wire) { g.removeWire(g.captured, w) }

// forgetDialled forgets what dialled noted.
func (g *loopGuard) forgetDialled(w wire) {
	if from := netip.AddrFrom16(w.from.addr); from.Unmap().IsLoopback() || w.from.addr == w.to.addr {
		g.mu.Lock()
		g.lately[w]++
		g.mu.Unlock()
		time.AfterFunc(readLate, func() { g.removeWire(g.lately, w) })
	}
	g.removeWire(g.dialling, w)
}

func (g *loopGuard) removeWire(m map[wire]int, w wire) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if m[w]--; m[w] <= 0 {
		delete(m, w)
	}
}
