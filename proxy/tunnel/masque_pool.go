package tunnel

import (
	"errors"
	"fmt"
	"net/netip"
)

// pool hands out addresses: to each session one of every prefix.
type pool struct {
	ranges []*addressRange
	used   map[netip.Addr]bool
}

// addressRange is one prefix of the pool.
type addressRange struct {
	prefix netip.Prefix
	next   netip.Addr // where to look first: addresses come back as late as can be
}

// errPoolExhausted is why a session has no address.
var errPoolExhausted = errors.New("no address is free")

func newPool(prefixes []netip.Prefix) (*pool, error) {
	p := &pool{used: map[netip.Addr]bool{}}
	for i, a := range prefixes {
		if !a.IsValid() || a.Addr().Is4In6() || a.Addr().BitLen()-a.Bits() < 2 {
			return nil, fmt.Errorf("pool: %v has no room for clients; a prefix such as 10.10.0.0/24 or fd00:10::/64 has", a)
		}
		for _, b := range prefixes[:i] {
			if a.Overlaps(b) {
				return nil, fmt.Errorf("pool: %v and %v overlap", b, a)
			}
		}
		r := &addressRange{prefix: a.Masked()}
		r.next = r.least()
		p.ranges = append(p.ranges, r)
	}
	return p, nil
}

// least is the first address for clients: the prefix's own is nobody's, and the
// one after it by custom the gateway's.
func (r *addressRange) least() netip.Addr { return r.prefix.Addr().Next().Next() }

// after is the address to look at after a; the last of an IPv4 prefix is
// everybody's.
func (r *addressRange) after(a netip.Addr) netip.Addr {
	next := a.Next()
	if !r.prefix.Contains(next) || next.Is4() && !r.prefix.Contains(next.Next()) {
		return r.least()
	}
	return next
}

// take hands out one address of each prefix.
func (p *pool) take() ([]netip.Addr, error) {
	taken := make([]netip.Addr, 0, len(p.ranges))
	for _, r := range p.ranges {
		a := r.next
		// At most as many steps as addresses are out, and one: then it has been round.
		for tries := 0; p.used[a]; tries++ {
			if a = r.after(a); tries > len(p.used) || a == r.next {
				p.give(taken)
				return nil, fmt.Errorf("%w in %v", errPoolExhausted, r.prefix)
			}
		}
		p.used[a] = true
		r.next = r.after(a)
		taken = append(taken, a)
	}
	if len(taken) == 0 {
		return nil, errPoolExhausted
	}
	return taken, nil
}

// give takes addresses back.
func (p *pool) give(addrs []netip.Addr) {
	for _, a := range addrs {
		delete(p.used, a)
	}
}
