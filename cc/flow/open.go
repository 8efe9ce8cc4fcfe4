package flow

import (
	"fmt"
	"slices"

	"github.com/penstock-net/penstock/cc"
)

// Open adds a flow to its group, over a leg.
func (m *Manager) Open(now cc.Time, t Terms, leg Leg) (*Flow, error) {
	r, err := m.resolveTerms(t)
	if err != nil {
		return nil, fmt.Errorf("flow: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.forgetIdleGroups(now)
	m.nextID++
	g, fresh := m.findOrMakeGroup(now, r)
	f := &Flow{mgr: m}
	f.member = member{
		id: m.nextID, leg: leg, clock: f, terms: t, allocation: t.newAllocation(),
		limits: limitTimes{since: now},
	}
	if f.enforced = leg.Enforces; f.enforced {
		f.unpaced = unpacedSegments * cc.DefaultMSS
	}
	f.setMaxRate(m.acquireRateLimit(now, t))
	f.home.Store(g.group)
	g.mu.Lock()
	g.addMember(&f.member, m.findOrMakePath(g, t.Host))
	g.mu.Unlock()
	if fresh {
		m.shareHints(now, g)
	}
	m.removeFromIdle(g)
	m.flowsMu.Lock()
	m.flows = append(m.flows, f)
	m.open++
	m.flowsMu.Unlock()
	return f, nil
}

// OpenDatagrams adds datagrams to the group that t leads to; of its window
// they get share at most (above 0, up to 1) while its flows want it, and of a maximum
// rate what the flows leave. wake is called as a flow's is.
func (m *Manager) OpenDatagrams(now cc.Time, t Terms, share float64, wake func()) (*Datagrams, error) {
	if !(share > 0 && share <= 1) {
		return nil, fmt.Errorf("flow: datagrams' share %v is not above 0 and up to 1", share)
	}
	r, err := m.resolveTerms(t)
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	d := &Datagrams{
		closeFunc: m.removeDatagrams, key: r.key, share: share, waiter: waiter{wake: func(cc.Time) { wake() }},
		maxRate: m.acquireRateLimit(now, t),
	}
	if m.datagrams == nil {
		m.datagrams = map[string][]*Datagrams{}
	}
	m.datagrams[d.key] = append(m.datagrams[d.key], d)
	if g := m.groups[d.key]; g != nil {
		g.mu.Lock()
		g.setDatagrams(m.datagrams[d.key])
		g.mu.Unlock()
	}
	return d, nil
}

// removeDatagrams forgets d, which is closed.
func (m *Manager) removeDatagrams(d *Datagrams) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d.maxRate.removeWaiter(&d.waiter)
	m.releaseRateLimit(0, d.maxRate)
	rest := slices.DeleteFunc(m.datagrams[d.key], func(e *Datagrams) bool { return e == d })
	m.datagrams[d.key] = rest
	if len(rest) == 0 {
		delete(m.datagrams, d.key)
	}
	if g := m.groups[d.key]; g != nil {
		g.mu.Lock()
		g.setDatagrams(rest)
		g.changed = true // the flows have the window back
		g.timers.scheduleAt(g.group, 0)
		g.mu.Unlock()
	}
}

// removeFlow takes note that f has gone.
func (m *Manager) removeFlow(f *Flow, now cc.Time) {
	m.flowsMu.Lock()
	f.gone = true
	if m.open--; len(m.flows) > 2*m.open+64 {
		m.flows = slices.DeleteFunc(m.flows, func(f *Flow) bool { return f.gone })
	}
	m.flowsMu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.releaseRateLimit(now, f.maxRate)
	if g := m.noteFewerMembers(f.home.Load().key); g != nil && f.terms.Alone {
		m.dropGroup(g)
	}
	m.forgetIdleGroups(now)
}
