package proxy

import (
	"fmt"
	"net"
	"net/netip"
	"sync"
)

// loopGuard keeps the proxy from talking to itself. The firewall mark keeps
// our connections out of capture rules that know it; this is for all others.
type loopGuard struct {
	listening  []netip.AddrPort             // where our listeners are
	localAddrs func() ([]netip.Addr, error) // of this machine
	mu         sync.Mutex
	dialling   map[netip.AddrPort]int // local addresses of our server legs
	clients    map[netip.AddrPort]int // remote addresses of our client legs
}

func newLoopGuard(listening []netip.AddrPort) *loopGuard {
	return &loopGuard{
		listening: listening, localAddrs: interfaceAddrs,
		dialling: map[netip.AddrPort]int{}, clients: map[netip.AddrPort]int{},
	}
}

func interfaceAddrs() ([]netip.Addr, error) {
	list, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for _, a := range list {
		if n, ok := a.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(n.IP); ok {
				out = append(out, ip.Unmap())
			}
		}
	}
	return out, nil
}

// check refuses a connection that is one of our own come back, or that would
// go to one of our listeners. Other services of this machine are fine.
func (g *loopGuard) check(client, target netip.AddrPort) error {
	g.mu.Lock()
	ours := g.dialling[client] > 0
	g.mu.Unlock()
	if ours {
		return fmt.Errorf("connection from %v is the proxy's own; exempt them from capture, by mark", client)
	}
	for _, l := range g.listening {
		if l.Port() == target.Port() && g.same(l.Addr(), target.Addr()) {
			return fmt.Errorf("destination %v is the proxy itself", target)
		}
	}
	return nil
}

// same reports whether a listener on l gets what is sent to target.
func (g *loopGuard) same(l, target netip.Addr) bool {
	if !l.IsUnspecified() || target.IsLoopback() || target.IsUnspecified() {
		return l.IsUnspecified() || l == target
	}
	addrs, err := g.localAddrs() // only for our very ports, so the cost does not matter
	if err != nil {
		return true // a refused connection is cheaper than a loop
	}
	for _, a := range addrs {
		if a == target {
			return true
		}
	}
	return false
}

func (g *loopGuard) accepted(client netip.AddrPort) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.clients[client]++
}

// dialled notes a server leg and reports whether it is fine: not if we have
// accepted it ourselves in the meantime.
func (g *loopGuard) dialled(local netip.AddrPort) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.clients[local] > 0 {
		return false
	}
	g.dialling[local]++
	return true
}

// gone forgets a connection; either address may be invalid.
func (g *loopGuard) gone(client, local netip.AddrPort) {
	g.mu.Lock()
	defer g.mu.Unlock()
	forget(g.clients, client)
	forget(g.dialling, local)
}

func forget(m map[netip.AddrPort]int, k netip.AddrPort) {
	if m[k]--; m[k] <= 0 {
		delete(m, k)
	}
}
