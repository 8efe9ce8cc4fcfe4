package flow

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// maxGroupHosts bounds the hosts that a Group names.
const maxGroupHosts = 64

// Group is the state of one macroflow at one moment.
//
// Members are due their part of the window by weight alone. Lent is what some
// have in flight beyond theirs, as far as others have less; Unused is what is
// free while no member waits for any.
type Group struct {
	Name      string // Terms.Group
	Algorithm string
	Phase     string
	Hosts     []netip.Addr  // where its members' bytes go, in order, at most maxGroupHosts of them; of one that lingers, where they went of late
	Members   int           // 0: it lingers, its window waits for the next
	Active    int           // members with something in flight, or waiting to be
	Idle      time.Duration // since the last member left; 0 with members

	Cwnd       cc.Bytes // all members' together; 0 before the first event
	Inflight   cc.Bytes
	Lent       cc.Bytes // of the window, what members are due and leave to others
	Unused     cc.Bytes // of the window, what nobody wants
	PacingRate cc.Rate  // 0: not paced

	SRTT, MinRTT, LatestRTT time.Duration // 0: no sample yet
	QueueingDelay           time.Duration // newest sample above the least
	DeliveryRate            cc.Rate       // newest sample
	Delivered               cc.Bytes      // by members past and present
	LimitedBy               LimitedBy     // what holds most of the active members back
	Hint                    *cc.Hint      // the network's newest word; nil: none
	Capped                  bool          // that word holds window or rate below what the algorithm asks for
	Internals               cc.Internals  // in the order of the algorithm's Spec
}

// Groups returns the state of every macroflow at now, those that linger
// included, ordered by name.
func (m *Manager) Groups(now cc.Time) []Group {
	m.mu.Lock()
	all := slices.SortedFunc(maps.Values(m.groups), func(a, b *macroflow) int { return cmp.Compare(a.key, b.key) })
	m.mu.Unlock()
	groups := make([]Group, len(all))
	for i, g := range all {
		groups[i] = g.describe(now)
	}
	return groups
}

// describe is m's state at now.
func (m *macroflow) describe(now cc.Time) Group {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.members) == 0 {
		m.fade(now)
	}
	g := Group{
		Name: m.group, Algorithm: m.spec.Name, Phase: m.ctl.Phase, Members: len(m.members),
		Cwnd: m.ctl.Cwnd, Inflight: m.inflight, PacingRate: m.ctl.PacingRate,
		SRTT: m.rtt.srtt, MinRTT: m.rtt.min, LatestRTT: m.rtt.latest, QueueingDelay: m.rtt.latest - m.rtt.min,
		DeliveryRate: m.rate, Delivered: m.delivered, Capped: m.capped, Internals: m.inspect(),
	}
	for _, r := range m.routes {
		if m.inUse(r) && r.host.IsValid() {
			g.Hosts = append(g.Hosts, r.host)
		}
	}
	slices.SortFunc(g.Hosts, netip.Addr.Compare)
	g.Hosts = g.Hosts[:min(len(g.Hosts), maxGroupHosts)]
	if len(m.members) == 0 {
		g.Idle = max(0, now.Sub(m.idleSince))
		if m.memory > 0 {
			g.Cwnd = m.remembered(now)
		}
	}
	if m.hinted {
		hint := m.hint
		g.Hint = &hint
	}
	m.account(now, &g)
	return g
}

// account fills in who uses how much of the window.
func (m *macroflow) account(now cc.Time, g *Group) {
	weights := cc.Bytes(0)
	for _, f := range m.members {
		weights += f.weight
	}
	var over, under cc.Bytes
	var held [numLimits]int
	waiting := false
	for _, f := range m.members {
		due := m.ctl.Cwnd * f.weight / weights
		over += max(0, f.counted()-due)
		under += max(0, due-f.counted())
		waiting = waiting || f.contends(now)
		if f.want > 0 || f.inflight > 0 {
			g.Active++
			held[f.limits.by]++
		}
	}
	g.Lent = min(over, under)
	if !waiting {
		g.Unused = max(0, m.ctl.Cwnd-m.inflight)
	}
	for by, n := range held {
		if n > held[g.LimitedBy] {
			g.LimitedBy = LimitedBy(by)
		}
	}
}
