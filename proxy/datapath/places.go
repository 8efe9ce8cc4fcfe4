package datapath

import (
	"context"
	"net/netip"
	"sync"
)

// Places bounds how often something is done at a time, and divides that between clients. A client may take as many
// places as would be left free (dynamic thresholds, Choudhury and Hahne 1998): one alone half of all, two a third
// each. So a client that takes all it can leaves room for others.
type Places struct {
	most int

	mu    sync.Mutex
	taken int
	by    map[string]int // taken, by client
	freed chan struct{}  // closed when a place is given back; nil: Wait is not called
}

// NewPlaces returns that many places.
func NewPlaces(most int) *Places { return &Places{most: most, by: map[string]int{}} }

// Take takes a place. It returns false if who has as many as are free.
func (p *Places) Take(who string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.take(who)
}

// Wait takes a place as soon as Take can. It returns false if ctx ends before.
func (p *Places) Wait(ctx context.Context, who string) bool {
	for {
		p.mu.Lock()
		taken := p.take(who)
		if !taken && p.freed == nil {
			p.freed = make(chan struct{})
		}
		freed := p.freed
		p.mu.Unlock()
		if taken {
			return true
		}
		select {
		case <-freed:
		case <-ctx.Done():
			return false
		}
	}
}

func (p *Places) take(who string) bool {
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
	if p.freed != nil {
		close(p.freed)
		p.freed = nil
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
