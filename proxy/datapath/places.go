package datapath

import (
	"net/netip"
	"sync"
)

// Places are what so many may have at a time. Each may take as many as would be left free
// (dynamic thresholds, Choudhury and Hahne 1998): one alone half of all, two a third each.
// So whoever takes what he can leaves room for others.
type Places struct {
	most int

	mu    sync.Mutex
	taken int
	by    map[string]int
}

// NewPlaces makes that many.
func NewPlaces(most int) *Places { return &Places{most: most, by: map[string]int{}} }

// Take takes a place; false: who has as many as are free.
func (p *Places) Take(who string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.taken+p.by[who] >= p.most {
		return false
	}
	p.taken++
	p.by[who]++
	return true
}

// Leave gives back a place that was taken.
func (p *Places) Leave(who string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.taken--
	if p.by[who]--; p.by[who] == 0 {
		delete(p.by, who)
	}
}

// Taken is how many are.
func (p *Places) Taken() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.taken
}

// TakenBy is how many one has.
func (p *Places) TakenBy(who string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.by[who]
}

// Host is what counts as one host: an IPv4 address, or an IPv6 /64, since any may use all
// of its own.
func Host(addr netip.Addr) netip.Addr {
	addr = addr.Unmap().WithZone("")
	if !addr.Is6() || addr.IsLoopback() {
		return addr
	}
	p, err := addr.Prefix(64)
	if err != nil {
		return addr
	}
	return p.Addr()
}
