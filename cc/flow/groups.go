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

// Group is the state of one group at one moment.
//
// Members are due their part of the window by weight alone. Lent is what some
// have in flight beyond theirs, as far as others have less; Unused is what is
// free while no member waits for any.
type Group struct {
	Key       string // no other has it; of the name, the algorithm and its parameters
	Name      string // Terms.Group
	Algorithm string
	Receives  bool // it is of windows that hosts are let send in
	Phase     string
	// where its members' bytes go, in order, at most maxGroupHosts of them; of one that lingers, where they went of
	// late
	Hosts   []netip.Addr
	Members int           // 0: it lingers, its window waits for the next
	Active  int           // members with something in flight, or waiting to be
	Idle    time.Duration // since the last member left; 0 with members

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
	HintDoubt               HintDoubt     // how delivery contradicts it; empty: it does not
	Believed                float64       // of the rates it says, the part that is believed
	Capped                  bool          // that word holds window or rate below what the algorithm asks for
	Internals               cc.Internals  // in the order of the algorithm's Spec
}

// Groups returns the state of every group at now, those without members included,
// ordered by name.
func (m *Manager) Groups(now cc.Time) []Group {
	m.mu.Lock()
	all := slices.Collect(maps.Values(m.groups))
	m.mu.Unlock()
	slices.SortFunc(all, func(a, b *managedGroup) int { return cmp.Compare(a.key, b.key) })
	groups := make([]Group, len(all))
	for i, g := range all {
		groups[i] = g.describeGroup(now)
		groups[i].Key = g.key
	}
	return groups
}

// describeGroup is g's state at now.
func (g *group) describeGroup(now cc.Time) Group {
	g.mu.Lock()
	defer g.mu.Unlock()
	d := Group{
		Name: g.name, Algorithm: g.spec.Name, Receives: g.receives, Phase: g.ctl.Phase, Members: len(g.members),
		Cwnd: g.ctl.Cwnd, Inflight: g.inflight, PacingRate: g.ctl.PacingRate,
		SRTT: g.rtt.srtt, MinRTT: g.rtt.min, LatestRTT: g.rtt.latest, QueueingDelay: g.rtt.latest - g.rtt.min,
		DeliveryRate: g.rate, Delivered: g.delivered.total, Capped: g.caps.bind, Internals: g.algorithmInternals(),
	}
	for _, p := range g.paths.all {
		if g.pathInUse(p) && p.host.IsValid() {
			d.Hosts = append(d.Hosts, p.host)
		}
	}
	slices.SortFunc(d.Hosts, netip.Addr.Compare)
	d.Hosts = d.Hosts[:min(len(d.Hosts), maxGroupHosts)]
	if len(g.members) == 0 {
		g.forgetAfterIdle(now)
		d.Idle = max(0, now.Sub(g.idle.since))
	}
	if g.idle.cwnd > 0 {
		d.Cwnd = g.rememberedWindow(now)
	}
	if g.caps.hinted {
		hint := g.caps.hint
		d.Hint, d.HintDoubt, d.Believed = &hint, g.caps.check.certainDoubt(), g.caps.check.believedPart()
	}
	g.fillUsage(now, &d)
	return d
}

// fillUsage fills in who uses how much of the window. It looks at active members alone:
// the others have nothing in flight.
func (g *group) fillUsage(now cc.Time, d *Group) {
	var over cc.Bytes // what members have in flight above their parts by weight
	var limited [numLimits]int
	waiting := false
	for _, m := range g.alloc.members {
		over += max(0, m.counts-g.ctl.Cwnd*m.weight/g.weights)
		waiting = waiting || m.wantsMore(now, &g.rtt)
		if m.want > 0 || m.inflight > 0 {
			d.Active++
			limited[m.limits.by]++
		}
	}
	d.Lent = max(0, min(over, over+g.ctl.Cwnd-g.inflight)) // the others have so much less than theirs
	if !waiting {
		d.Unused = max(0, g.ctl.Cwnd-g.inflight)
	}
	for by, n := range limited {
		if n > limited[d.LimitedBy] {
			d.LimitedBy = LimitedBy(by)
		}
	}
}
