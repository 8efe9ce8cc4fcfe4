package flow

import (
	"cmp"
	"container/list"
	"fmt"
	"hash/maphash"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/penstock-net/penstock/cc"
)

// maxIdleGroups bounds the groups that are kept without members.
const maxIdleGroups = 4096

// maxIdlePaths bounds the paths that a group remembers without a member on them.
const maxIdlePaths = 16

// Manager keeps the groups. Its zero value is ready. Set its fields before the first Open.
type Manager struct {
	// Shards is on how many clocks the groups are spread, so that as many callers of
	// Tick share the work; 0 counts as 1.
	Shards int
	// Arm, if set, is told when Tick of a shard wants to be called earlier than it last
	// asked for. It must neither block nor call back.
	Arm func(shard int, at cc.Time)
	// Trace, if set, sees every event an algorithm saw, outside all locks.
	Trace func(Event)
	// HintNews, if set, is told which groups' hints delivery contradicts, and which no
	// longer; outside all locks.
	HintNews func(HintNews)
	// Seed feeds the algorithms' randomness.
	Seed uint64
	// Lookup, if set, finds algorithms instead of cc.Lookup.
	Lookup func(name string) (cc.Spec, error)

	once   sync.Once
	shards []timers

	mu        sync.Mutex // taken before any group's
	groups    map[string]*managedGroup
	hosts     map[netip.Addr][]hostPath // the paths of all groups, which hints are about
	hinted    bool                      // there has been a hint
	datagrams map[string][]*Datagrams   // by the keys of their groups, whether there are such or not
	idle      list.List                 // of *indexed without members, the longest idle first
	forgotten list.List                 // likewise, of those whose algorithms are forgotten: idle before all others
	limits    map[limitKey]*rateLimit
	unused    []*rateLimit // of limits, those without users
	nextID    uint64
	delivered map[string]*atomic.Int64 // bytes, by algorithm

	flowsMu sync.Mutex // taken last
	flows   []*Flow    // by ID, some of them closed
	open    int        // how many are not
}

// managedGroup is a group as the manager knows it. The manager's mutex guards it.
type managedGroup struct {
	*group
	waits *list.Element // in one of the manager's lists, while without members
}

// hostPath is a path of a group.
type hostPath struct {
	group *managedGroup
	path  *path
}

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
	f := newFlow(m, m.nextID, now, t, leg, m.acquireRateLimit(now, t))
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

// Receive adds a flow that receives to its group. put is told of each new window:
// it runs with locks held, on any goroutine, and must neither block nor call back.
func (m *Manager) Receive(now cc.Time, t Terms, put func(window cc.Bytes)) (*Receiving, error) {
	t.Receives = true
	f, err := m.Open(now, t, Leg{Enforces: true, Apply: func(l Limit) { put(l.Cwnd) }})
	if err != nil {
		return nil, err
	}
	return &Receiving{flow: f}, nil
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
	d := &Datagrams{closeFunc: m.removeDatagrams, key: r.key, maxRate: m.acquireRateLimit(now, t)}
	d.share, d.wake = share, func(cc.Time) { wake() }
	if m.datagrams == nil {
		m.datagrams = map[string][]*Datagrams{}
	}
	m.datagrams[d.key] = append(m.datagrams[d.key], d)
	if g := m.groups[d.key]; g != nil {
		g.mu.Lock()
		m.attachDatagrams(g)
		g.mu.Unlock()
	}
	return d, nil
}

// Tick serves what time alone brings about in a shard: pacing credit, algorithms' own
// clocks, divisions of windows, groups that are idle. It returns when it wants to be
// called next; cc.Never: not before Arm says so.
func (m *Manager) Tick(shard int, now cc.Time) cc.Time { return m.shardTimers()[shard].runDue(now) }

// Shard is where the clock of the group that t leads to runs. A leg whose reports come
// from there waits for nobody else who ticks.
func (m *Manager) Shard(t Terms) int { return m.shardOf(t.Group) }

// Snapshots returns the state of every open flow, ordered by ID.
func (m *Manager) Snapshots() []Snapshot {
	m.flowsMu.Lock()
	flows := slices.Clone(m.flows)
	m.flowsMu.Unlock()
	all := make([]Snapshot, 0, len(flows))
	for _, f := range flows {
		if s, open := f.takeSnapshot(); open {
			all = append(all, s)
		}
	}
	return all
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

// Hint takes the network's word about the path to the hosts in p. Every
// group all of whose members' bytes go to hosts in p hears it, and its
// algorithm sees it with its next event; one older than the last is ignored.
// Where it assigns no shares, the manager does, by Claims.
// Hint returns how many groups there are; for others nothing is kept, since
// who speaks of a path does so again soon. It may be called from any goroutine.
func (m *Manager) Hint(p netip.Prefix, h cc.Hint) (groups int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hinted = true
	p = plainPrefix(p)
	all, assigns := Claims{}, h.Share == 0
	if assigns {
		all = m.claimsIn(p).withUnknown(h.Flows)
	}
	host := cc.Rate(0) // delivered to the host, if p is one
	if p.IsSingleIP() {
		m.eachIn(p, func(g *group) { host += g.hints.check.recentRate(h.At) })
	}
	m.eachIn(p, func(g *group) {
		groups++
		if assigns {
			h.Share = memberClaims(g).Of(all)
		}
		g.addHint(h, max(0, host-g.hints.check.recentRate(h.At)))
	})
	return groups
}

// Claims adds up those of all flows whose groups' bytes go to hosts in p and
// nowhere else. With the address of a host it is for who tells of a link host by
// host, and so has to divide it by itself.
func (m *Manager) Claims(p netip.Prefix) Claims {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.claimsIn(plainPrefix(p))
}

// moveFlow is Flow.Move.
func (m *Manager) moveFlow(f *Flow, now cc.Time, t Terms) error {
	r, err := m.resolveTerms(t)
	if err != nil {
		return fmt.Errorf("flow: %w", err)
	}
	m.mu.Lock() // so that nobody else moves f
	defer m.mu.Unlock()
	m.forgetIdleGroups(now)
	from := m.groups[f.home.Load().key]
	if from == nil { // f is closed, and its group forgotten
		return nil
	}
	if from.key == r.key {
		from.mu.Lock()
		defer from.divideAndUnlock(now)
		if !f.closed {
			from.changePath(&f.member, now, m.findOrMakePath(from, t.Host))
			m.changeTerms(from.group, f, now, t)
			m.trimPaths(from)
		}
		return nil
	}
	m.nextID++ // for the seed: an algorithm's luck is its own
	to, fresh := m.findOrMakeGroup(now, r)
	from.mu.Lock()
	if f.closed {
		from.mu.Unlock()
		m.noteFewerMembers(to.key) // it may be new
		return nil
	}
	to.mu.Lock()
	to.moveMember(&f.member, from.group, now, m.findOrMakePath(to, t.Host))
	f.home.Store(to.group)
	m.changeTerms(to.group, f, now, t)
	to.divideAndUnlock(now)
	from.divideAndUnlock(now)
	if fresh {
		m.shareHints(now, to)
	}
	m.removeFromIdle(to)
	m.noteFewerMembers(from.key)
	return nil
}

// changeTerms puts terms into force for f within its group. The caller holds m.mu and the group's mutex.
func (m *Manager) changeTerms(g *group, f *Flow, now cc.Time, t Terms) {
	limit := m.acquireRateLimit(now, t)
	before := g.changeTerms(&f.member, now, t, limit)
	m.releaseRateLimit(now, before)
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

// attachDatagrams has the datagrams of g's key share its window. The caller holds m.mu and g.mu.
func (m *Manager) attachDatagrams(g *managedGroup) {
	g.datagrams = g.datagrams[:0]
	for _, d := range m.datagrams[g.key] {
		g.datagrams = append(g.datagrams, &d.datagramShare)
		d.home.Store(g.group)
	}
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
		d.home.Store(nil)
		m.attachDatagrams(g)
		g.changed = true // the flows have the window back
		g.scheduleTick(0)
		g.mu.Unlock()
	}
}

// shardTimers returns the timers of all shards.
func (m *Manager) shardTimers() []timers {
	m.once.Do(func() {
		m.shards = make([]timers, max(1, m.Shards))
		for i := range m.shards {
			if m.Arm != nil {
				m.shards[i].arm = func(at cc.Time) { m.Arm(i, at) }
			}
		}
	})
	return m.shards
}

// shardOf is that of the groups with a name.
func (m *Manager) shardOf(name string) int {
	return int(maphash.String(hashSeed, name) % uint64(len(m.shardTimers())))
}

// hashSeed spreads groups over shards.
var hashSeed = maphash.MakeSeed()

// resolveTerms checks t and finds out where it leads.
func (m *Manager) resolveTerms(t Terms) (resolved, error) {
	if m.Lookup != nil {
		return t.resolveWith(m.Lookup)
	}
	return t.resolveWith(cc.Lookup)
}

// findOrMakeGroup returns the one that r leads to, a new one if need be. The caller holds m.mu.
func (m *Manager) findOrMakeGroup(now cc.Time, r resolved) (g *managedGroup, fresh bool) {
	if m.groups == nil {
		m.groups, m.hosts = map[string]*managedGroup{}, map[netip.Addr][]hostPath{}
		m.delivered = map[string]*atomic.Int64{}
	}
	g = m.groups[r.key]
	if fresh = g == nil; fresh {
		timers := &m.shardTimers()[m.shardOf(r.name)]
		g = &managedGroup{group: newGroup(r, timers, m.Seed+m.nextID, now, m.deliveredCounter(r.spec.Name))}
		g.emit, g.hintNews = m.Trace, m.HintNews
		m.groups[r.key] = g
		g.mu.Lock()
		m.attachDatagrams(g)
		g.mu.Unlock()
	}
	return g, fresh
}

// deliveredCounter counts the bytes that all groups of an algorithm deliver. The caller holds m.mu.
func (m *Manager) deliveredCounter(algorithm string) *atomic.Int64 {
	n := m.delivered[algorithm]
	if n == nil {
		n = new(atomic.Int64)
		m.delivered[algorithm] = n
	}
	return n
}

// noteFewerMembers notes that the group with a key has fewer members, or none, and returns it if
// it has none; nil: it has, or has been dropped. The caller holds m.mu, but not the
// group's.
func (m *Manager) noteFewerMembers(key string) *managedGroup {
	g := m.groups[key]
	if g == nil {
		return nil
	}
	g.mu.Lock()
	m.trimPaths(g)
	empty := len(g.members) == 0
	g.mu.Unlock()
	if !empty {
		return nil
	}
	if g.waits == nil {
		g.waits = m.idle.PushBack(g)
	}
	return g
}

// removeFromIdle has g wait in none of the lists: it has members, or is dropped. The caller holds m.mu.
func (m *Manager) removeFromIdle(g *managedGroup) {
	if g.waits != nil {
		m.idle.Remove(g.waits) // it is in one of them
		m.forgotten.Remove(g.waits)
		g.waits = nil
	}
}

// forgetIdleGroups drops what is known of groups that have been without members for long enough:
// first their algorithms, then all of it. The caller holds m.mu.
func (m *Manager) forgetIdleGroups(now cc.Time) {
	for e := m.idle.Front(); e != nil; e = m.idle.Front() {
		g := e.Value.(*managedGroup)
		g.mu.Lock()
		forgotten := g.forgetAfterIdle(now)
		g.mu.Unlock()
		if !forgotten && m.idle.Len() <= maxIdleGroups {
			break
		}
		m.idle.Remove(e)
		g.waits = m.forgotten.PushBack(g)
	}
	for e := m.forgotten.Front(); e != nil; e = m.forgotten.Front() {
		g := e.Value.(*managedGroup)
		g.mu.Lock()
		recent := now.Sub(g.idle.since) <= memoryLasts
		g.mu.Unlock()
		if recent && m.idle.Len()+m.forgotten.Len() <= maxIdleGroups {
			return
		}
		m.dropGroup(g)
	}
}

// dropGroup forgets a group without members altogether. The caller holds m.mu.
func (m *Manager) dropGroup(g *managedGroup) {
	m.removeFromIdle(g)
	delete(m.groups, g.key)
	g.mu.Lock()
	for _, d := range m.datagrams[g.key] {
		d.home.Store(nil)
	}
	g.datagrams = nil
	g.closeAlgorithm()
	for len(g.paths.all) > 0 {
		m.dropPath(g, len(g.paths.all)-1)
	}
	g.mu.Unlock()
	g.timers.cancelTimer(&g.timer)
}

// findOrMakePath returns g's path to host, a new one if need be. The caller holds m.mu and g.mu.
func (m *Manager) findOrMakePath(g *managedGroup, host netip.Addr) *path {
	host = plainAddr(host)
	known := m.hosts[host]
	if len(g.paths.all) < len(known) {
		if p := g.paths.pathTo(host); p != nil {
			return p
		}
	} else if i := slices.IndexFunc(known, func(l hostPath) bool { return l.group == g }); i >= 0 {
		return known[i].path
	}
	p := &path{host: host, slot: len(known)}
	if len(known) > 0 {
		p.queue.Store(known[0].path.queue.Load())
	}
	g.paths.all = append(g.paths.all, p)
	m.hosts[host] = append(known, hostPath{g, p})
	if g.receives && host.IsValid() && p.queue.Load() == nil {
		shared := new(hostQueue)
		for _, l := range m.hosts[host] {
			l.path.queue.Store(shared)
		}
	}
	return p
}

// dropPath forgets the i-th path of g. The caller holds m.mu and g.mu.
func (m *Manager) dropPath(g *managedGroup, i int) {
	p := g.paths.all[i]
	g.paths.all = slices.Delete(g.paths.all, i, i+1)
	all := m.hosts[p.host]
	last := len(all) - 1
	all[p.slot], all[last].path.slot = all[last], p.slot
	all[last] = hostPath{}
	if last == 0 {
		delete(m.hosts, p.host)
		return
	}
	m.hosts[p.host] = all[:last]
}

// trimPaths forgets the path that has been without members for longest, where there
// are too many of them. The caller holds m.mu and g.mu.
func (m *Manager) trimPaths(g *managedGroup) {
	idle, oldest := 0, -1
	for i, p := range g.paths.all {
		if len(p.members) > 0 {
			continue
		}
		if idle++; oldest < 0 || p.idle < g.paths.all[oldest].idle {
			oldest = i
		}
	}
	if idle > maxIdlePaths {
		m.dropPath(g, oldest)
	}
}

// plainPrefix is plain for a prefix.
func plainPrefix(p netip.Prefix) netip.Prefix {
	bits := p.Bits()
	if p.Addr().Is4In6() && bits >= 96 {
		bits -= 96
		return netip.PrefixFrom(p.Addr().Unmap(), bits)
	}
	return netip.PrefixFrom(p.Addr().WithZone(""), bits)
}

// eachIn calls do with each group all of whose paths in use lead into p, and holds its
// mutex meanwhile. The caller holds m.mu.
func (m *Manager) eachIn(p netip.Prefix, do func(*group)) {
	if p.IsSingleIP() {
		for _, l := range m.hosts[p.Addr()] {
			l.callIfWithin(p, do)
		}
		return
	}
	for host, all := range m.hosts {
		if p.Contains(host) {
			for _, l := range all {
				l.callIfWithin(p, do)
			}
		}
	}
}

// callIfWithin calls do if all paths of the group that are in use lead into p, and this is the
// first of them: so a group is met once. Of a group without members all paths are in use.
func (l hostPath) callIfWithin(p netip.Prefix, do func(*group)) {
	g := l.group.group
	if g.receives { // hints are about the way to a host
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	first := true
	for _, each := range g.paths.all {
		if !g.pathInUse(each) {
			continue
		}
		if first && each != l.path || !p.Contains(each.host) {
			return
		}
		first = false
	}
	if !first {
		do(g)
	}
}

// shareHints tells g, which is new, what others have heard lately whose bytes go along its
// path and no other. The caller holds m.mu, and no group's.
func (m *Manager) shareHints(now cc.Time, g *managedGroup) {
	if !m.hinted || g.receives || len(g.paths.all) != 1 || !g.paths.all[0].host.IsValid() {
		return
	}
	host := g.paths.all[0].host
	var best cc.Hint
	m.eachIn(netip.PrefixFrom(host, host.BitLen()), func(other *group) {
		if other.hints.isFresh(now, other.rtt.srtt) && other.hints.newest.At > best.At {
			best = other.hints.newest
		}
	})
	if best.At > 0 {
		g.mu.Lock()
		g.addHint(best, 0)
		g.mu.Unlock()
	}
}

// acquireRateLimit returns the one that t leads to, counted as used once more; nil if t
// has none. The caller holds m.mu.
func (m *Manager) acquireRateLimit(now cc.Time, t Terms) *rateLimit {
	m.dropUnusedLimits(now)
	if t.MaxRate == 0 {
		return nil
	}
	key := limitKey{t.Group, t.MaxRate}
	l := m.limits[key]
	if l == nil {
		if m.limits == nil {
			m.limits = map[limitKey]*rateLimit{}
		}
		l = newRateLimit(&m.shardTimers()[0], key)
		m.limits[key] = l
	}
	l.users.Add(1)
	return l
}

// releaseRateLimit undoes one call of rateLimit. A rateLimit without users is kept until its
// bucket is full: a client that opens a connection for each object gains nothing. The
// caller holds m.mu.
func (m *Manager) releaseRateLimit(now cc.Time, l *rateLimit) {
	if l != nil && l.users.Add(-1) == 0 && !l.parked {
		l.parked = true
		m.unused = append(m.unused, l)
	}
	m.dropUnusedLimits(now)
}

// dropUnusedLimits drops the rateLimits that have no users and a full bucket. The caller
// holds m.mu.
func (m *Manager) dropUnusedLimits(now cc.Time) {
	kept := m.unused[:0]
	for _, l := range m.unused {
		used := l.users.Load() > 0
		if !used && !l.isFull(now) {
			kept = append(kept, l)
			continue
		}
		l.parked = false
		if !used {
			delete(m.limits, l.key)
		}
	}
	clear(m.unused[len(kept):])
	m.unused = kept
}

// claimsIn is Claims for who holds m.mu.
func (m *Manager) claimsIn(p netip.Prefix) (c Claims) {
	m.eachIn(p, func(g *group) { c = c.addClaims(memberClaims(g)) })
	return c
}

// memberClaims adds up the claims of g's members. The caller holds m.mu.
func memberClaims(g *group) (c Claims) {
	priority := g.params["priority"]
	if priority == 0 {
		priority = 1
	}
	c.flows, c.priority = len(g.members), priority*float64(len(g.members))
	for _, f := range g.members {
		if f.terms.Target > 0 {
			c.rated++
			c.traffic += priority * float64(f.terms.Target)
		}
	}
	return c
}

// Claims is what flows may ask for of a link that they share (NACC, equation 8):
// each its priority times what its application sends, where that is known of all,
// or else its priority alone. The priority is the setting of that name, or 1 for
// an algorithm that has none.
type Claims struct {
	flows, rated int     // how many there are, and of those with a Target
	priority     float64 // sum
	traffic      float64 // sum of priority times Target, of those that have one
}

func (c Claims) addClaims(d Claims) Claims {
	return Claims{c.flows + d.flows, c.rated + d.rated, c.priority + d.priority, c.traffic + d.traffic}
}

// withUnknown is c with others of which nothing is known, for so many flows in all.
func (c Claims) withUnknown(flows int) Claims {
	others := max(0, flows-c.flows)
	return c.addClaims(Claims{flows: others, priority: float64(others)})
}

// Of is c's part of all, which it is among; 0 where all is nothing.
func (c Claims) Of(all Claims) float64 {
	switch {
	case all.flows == 0:
		return 0
	case all.rated == all.flows:
		return c.traffic / all.traffic
	}
	return c.priority / all.priority
}
