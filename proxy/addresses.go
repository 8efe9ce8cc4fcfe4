package proxy

import (
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/access"
)

const (
	// addressGrace is how long an address may be gone: a link that flaps, or a lease that is renewed, brings
	// it back.
	addressGrace  = 30 * time.Second
	addressPeriod = 2 * time.Second // how often the machine's addresses are read
)

// readAddresses returns the addresses of this machine's interfaces.
func readAddresses() ([]netip.Addr, error) {
	nets, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	addrs := make([]netip.Addr, 0, len(nets))
	for _, n := range nets {
		if ip, ok := n.(*net.IPNet); ok {
			if addr, ok := netip.AddrFromSlice(ip.IP); ok {
				addrs = append(addrs, addr.Unmap())
			}
		}
	}
	return addrs, nil
}

// addressWatch notices addresses that leave the machine. Those that it never had, such as the foreign ones
// of transparent sockets, cannot.
type addressWatch struct {
	present map[netip.Addr]bool
	left    map[netip.Addr]cc.Time
}

// update takes the addresses that the machine has now, and returns those that have been gone for
// addressGrace.
func (w *addressWatch) update(now cc.Time, addrs []netip.Addr) (gone map[netip.Addr]bool) {
	before := w.present
	w.present = make(map[netip.Addr]bool, len(addrs))
	for _, a := range addrs {
		w.present[a] = true
		delete(w.left, a)
	}
	for a := range before {
		if !w.present[a] {
			if w.left == nil {
				w.left = map[netip.Addr]cc.Time{}
			}
			w.left[a] = now
		}
	}
	for a, since := range w.left {
		if now.Sub(since) >= addressGrace {
			if gone == nil {
				gone = map[netip.Addr]bool{}
			}
			gone[a] = true
			delete(w.left, a)
		}
	}
	return gone
}

// watchAddresses resets connections with a leg whose own address has left the machine: nothing arrives
// there any more, and the kernel would try for a quarter of an hour.
func (s *Server) watchAddresses(done <-chan struct{}) {
	tick := time.NewTicker(addressPeriod)
	defer tick.Stop()
	var watch addressWatch
	for {
		addrs, err := s.parts.Addresses()
		if err != nil {
			s.log.Debug("this machine's addresses cannot be read", "err", err)
		} else if gone := watch.update(s.clock(), addrs); gone != nil {
			s.resetAt(gone)
		}
		select {
		case <-done:
			return
		case <-tick.C:
		}
	}
}

// ownAddresses returns the addresses of the legs that this machine has to have. Transparent legs, and those inside a
// tunnel, have the addresses of other machines: they work whether this machine has had the same address or not.
func (c *connection) ownAddresses() (own []netip.Addr) {
	l := &c.listener.cfg
	if l.Mode != access.TPROXY && !l.Mode.Tunnels() {
		own = append(own, addrPort(c.client.conn.LocalAddr()).Addr())
	}
	if c.dialled {
		own = append(own, addrPort(c.server.conn.LocalAddr()).Addr())
	}
	return own
}

func (s *Server) resetAt(gone map[netip.Addr]bool) {
	reset := 0
	for _, c := range s.liveConnections() {
		c.mu.Lock()
		state := c.state
		c.mu.Unlock()
		if state != StateOpen && state != StateHalfClosed {
			continue // the dial, or the greeting, has a timeout of its own
		}
		if slices.ContainsFunc(c.ownAddresses(), func(a netip.Addr) bool { return gone[a] }) {
			c.tearDown(Cause{ProxySide, ClosedAddressGone}, nil)
			reset++
		}
	}
	if reset > 0 {
		s.log.Warn("connections are reset: their address on this machine has been gone", "connections", reset,
			"for", addressGrace)
	}
}
