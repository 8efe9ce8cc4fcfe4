package userspace

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net/netip"
)

// pool hands out addresses: to each session one of every prefix. A name for which some
// are reserved gets these, unless another session of that name has them.
type pool struct {
	ranges   []addressRange
	used     map[netip.Addr]bool
	reserved map[string][]netip.Addr // by name, one of each range
	owner    map[netip.Addr]string   // of reserved ones
}

// addressRange is one prefix of the pool.
type addressRange struct{ prefix netip.Prefix }

// errPoolExhausted is why a session has no address.
var errPoolExhausted = errors.New("no address is free")

func newPool(prefixes []netip.Prefix) (*pool, error) {
	p := &pool{used: map[netip.Addr]bool{}, reserved: map[string][]netip.Addr{}, owner: map[netip.Addr]string{}}
	for i, a := range prefixes {
		if !a.IsValid() || a.Addr().Is4In6() || a.Addr().BitLen()-a.Bits() < 2 {
			return nil, fmt.Errorf("pool: %v has no room for clients; a prefix such as 10.10.0.0/24 or "+
				"fd00:10::/64 has", a)
		}
		for _, b := range prefixes[:i] {
			if a.Overlaps(b) {
				return nil, fmt.Errorf("pool: %v and %v overlap", b, a)
			}
		}
		p.ranges = append(p.ranges, addressRange{a.Masked()})
	}
	return p, nil
}

// leastAddress is the first address for clients: the prefix's own is not used, and the next one
// is by convention the gateway's.
func (r addressRange) leastAddress() netip.Addr { return r.prefix.Addr().Next().Next() }

// containsClient reports whether a client may have an address; the last of an IPv4 prefix is
// for broadcast.
func (r addressRange) containsClient(a netip.Addr) bool {
	return r.prefix.Contains(a) && a.Compare(r.leastAddress()) >= 0 && !(a.Is4() && !r.prefix.Contains(a.Next()))
}

// preferredFor is the address to try first for a name: the same each time, also in another process.
func (r addressRange) preferredFor(name string) netip.Addr {
	a, hash := r.prefix.Addr().AsSlice(), sha256.Sum256([]byte(name))
	for bit := r.prefix.Bits(); bit < 8*len(a); bit++ {
		a[bit/8] |= hash[bit/8] & (0x80 >> (bit % 8))
	}
	if addr, _ := netip.AddrFromSlice(a); r.containsClient(addr) {
		return addr
	}
	return r.leastAddress()
}

// findFree is the first address from of(name) on that is not taken, and false if all are. most is
// an upper bound of how many are taken.
func (r addressRange) findFree(name string, most int, taken func(netip.Addr) bool) (netip.Addr, bool) {
	first := r.preferredFor(name)
	a := first
	for tries := 0; taken(a); tries++ {
		if a = a.Next(); !r.containsClient(a) {
			a = r.leastAddress()
		}
		if a == first || tries > most {
			return netip.Addr{}, false
		}
	}
	return a, true
}

// reserveFor reserves addresses for these names, and frees those of others. A name keeps those
// that it has; one for which all are reserved gets what is free when it asks.
func (p *pool) reserveFor(names []string) {
	before := p.reserved
	p.reserved, p.owner = map[string][]netip.Addr{}, map[netip.Addr]string{}
	keep := func(name string, addrs []netip.Addr) {
		p.reserved[name] = addrs
		for _, a := range addrs {
			p.owner[a] = name
		}
	}
	for _, name := range names {
		if addrs, had := before[name]; had {
			keep(name, addrs)
		}
	}
	for _, name := range names {
		if _, has := p.reserved[name]; has {
			continue
		}
		addrs := make([]netip.Addr, 0, len(p.ranges))
		for _, r := range p.ranges {
			if a, ok := r.findFree(name, len(p.owner), func(a netip.Addr) bool { return p.owner[a] != "" }); ok {
				addrs = append(addrs, a)
			}
		}
		if len(addrs) == len(p.ranges) {
			keep(name, addrs)
		}
	}
}

// takeAddresses hands out one address of each prefix for a session of that name.
func (p *pool) takeAddresses(name string) ([]netip.Addr, error) {
	taken := make([]netip.Addr, 0, len(p.ranges))
	for i, r := range p.ranges {
		a, ok := netip.Addr{}, false
		if own := p.reserved[name]; own != nil && !p.used[own[i]] {
			a, ok = own[i], true
		}
		most := len(p.used) + len(p.owner)
		if !ok {
			a, ok = r.findFree(name, most, func(a netip.Addr) bool { return p.used[a] || p.owner[a] != "" })
		}
		if !ok {
			a, ok = r.findFree(name, most, func(a netip.Addr) bool { return p.used[a] })
		}
		if !ok {
			p.returnAddresses(taken)
			return nil, fmt.Errorf("%w in %v", errPoolExhausted, r.prefix)
		}
		p.used[a] = true
		taken = append(taken, a)
	}
	if len(taken) == 0 {
		return nil, errPoolExhausted
	}
	return taken, nil
}

// returnAddresses takes addresses back.
func (p *pool) returnAddresses(addrs []netip.Addr) {
	for _, a := range addrs {
		delete(p.used, a)
	}
}
