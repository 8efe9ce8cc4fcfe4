package userspace

import (
	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// maxUplinks bounds the maximum rates that a peer is held to at once: with the usual group
// each host outside has its own.
const maxUplinks = 64

// rateLimit is a maximum rate that a group's datagrams and connections share.
type rateLimit struct {
	group string
	rate  cc.Rate
}

// uplink holds what a peer sends outside to a maximum rate.
type uplink struct {
	shaper
	terms   flow.Terms
	used    cc.Time // guarded by d.mu, as is what follows
	evicted bool    // it made room for another
}

// uplinkFor returns the uplink for the maximum rate of terms; nil: they have none. If the peer has
// maxUplinks, the one that was idle longest makes room. The caller holds d.mu.
func (p *peer) uplinkFor(terms flow.Terms) *uplink {
	if terms.MaxRate == 0 {
		return nil
	}
	l := rateLimit{terms.Group, terms.MaxRate}
	if u := p.uplinks[l]; u != nil {
		return u
	}
	if len(p.uplinks) >= maxUplinks {
		var oldest *uplink
		for _, u := range p.uplinks {
			if oldest == nil || u.used < oldest.used {
				oldest = u
			}
		}
		p.dropUplink(oldest)
	}
	u := &uplink{shaper: shaper{d: p.d}, terms: terms}
	u.openWindow(p.name, u.terms, 1)
	p.uplinks[l] = u
	return u
}

// dropUplink forgets an uplink and what waits there. The caller holds d.mu.
func (p *peer) dropUplink(u *uplink) {
	delete(p.uplinks, rateLimit{u.terms.Group, u.terms.MaxRate})
	u.evicted = true
	u.closeWindow()
}
