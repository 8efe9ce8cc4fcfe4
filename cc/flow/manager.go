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

// maxIdlePaths bounds the paths without members that a group remembers.
const maxIdlePaths = 16

// Manager keeps the groups. Its zero value is ready to use. Set its fields before the first Open. Its methods may be
// called from any goroutine.
type Manager struct {
	// Shards is the number of clocks that groups are spread over, so that as many callers of Tick share the work; 0
	// counts as 1.
	Shards int
	// Arm, if set, is called when Tick of a shard must be called earlier than it last asked for. It runs with locks
	// held: it must neither block nor call back.
	Arm func(shard int, at cc.Time)
	// Trace, if set, sees every event of every algorithm. It runs without locks.
	Trace func(Event)
	// HintNews, if set, is called when delivery begins or ceases to contradict a group's hints. It runs without locks.
	HintNews func(HintNews)
	// SharedRate, if set, returns the part of a shared maximum rate that a new user of it may have. It runs with locks
	// held: it must neither block nor call back.
	SharedRate func(group string, most cc.Rate) cc.Rate
	// Seed feeds the algorithms' randomness.
	Seed uint64
	// Lookup finds algorithms by name; nil: cc.Lookup.
	Lookup func(name string) (cc.Spec, error)

	once   sync.Once
	shards []timers

	mu              sync.Mutex // taken before any group's; guards the fields below
	groups          map[string]*managedGroup
	hosts           map[netip.Addr][]hostPath // the paths of all groups by host, for hints
	hasHints        bool                      // there has been a hint
	idleGroups      list.List                 // of *managedGroup without members, the longest idle first
	forgottenGroups list.List                 // without an algorithm as well; idle for longer than all of idleGroups
	rateLimits      map[limitKey]*rateLimit
	unusedLimits    []*rateLimit // the part of rateLimits without users
	nextID          uint64
	deliveredBytes  map[string]*atomic.Int64 // by algorithm
}

// managedGroup is a group as the manager knows it. The manager's mutex guards it.
type managedGroup struct {
	*group
	idleElement *list.Element // in idleGroups or forgottenGroups; nil: it has members, or is dropped
}

// hostPath is a path with its group.
type hostPath struct {
	group *managedGroup
	path  *path
}

// Open adds a flow to the group that t leads to, over a leg. Errors are those of Terms.Check.
func (m *Manager) Open(now cc.Time, t Terms, leg Leg) (*Flow, error) {
	return m.Resume(now, t, leg, Dormant{})
}

// Resume is Open for a flow that has sent elsewhere until now, such as in another process. Its group starts from d,
// unless it knows its path already.
func (m *Manager) Resume(now cc.Time, t Terms, leg Leg, d Dormant) (*Flow, error) {
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
	p := m.findOrMakePath(g, t.Host)
	g.addMember(&f.member, p)
	g.resumeFrom(d, p, now)
	g.mu.Unlock()
	if fresh {
		m.shareHints(now, g)
	}
	m.removeFromIdle(g)
	return f, nil
}

// Receive adds a flow that receives to its group. apply is called with each new window, with locks held and on any
// goroutine: it must neither block nor call back.
func (m *Manager) Receive(now cc.Time, t Terms, apply func(window cc.Bytes)) (*Receiving, error) {
	t.Receives = true
	f, err := m.Open(now, t, Leg{Enforces: true, Apply: func(l Limit) { apply(l.Cwnd) }})
	if err != nil {
		return nil, err
	}
	return &Receiving{flow: f}, nil
}

// Tick does what time alone brings about in a shard: pacing, algorithms' ticks, divisions of windows, idleness. It
// returns when it must be called next; cc.Never: not before Arm says so.
func (m *Manager) Tick(shard int, now cc.Time) cc.Time { return m.shardTimers()[shard].runDue(now) }

// Shard returns the shard of the group that t leads to. A leg that reports from the goroutine of that shard's Tick
// contends with no other shard.
func (m *Manager) Shard(t Terms) int { return m.shardOf(t.Group) }

// Groups returns the state of every group at now, ordered by name. Groups without members are included.
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

// SharedLimits returns the maximum rates with Terms.Shared, in no order.
func (m *Manager) SharedLimits(now cc.Time) []SharedLimit {
	m.mu.Lock()
	limits := map[*rateLimit]*SharedLimit{}
	for key, l := range m.rateLimits {
		if key.shared {
			limits[l] = &SharedLimit{Group: key.group, MaxRate: key.rate, Rate: l.rate()}
		}
	}
	var groups []*managedGroup
	if len(limits) > 0 {
		groups = slices.Collect(maps.Values(m.groups))
	}
	m.mu.Unlock()
	for _, g := range groups {
		g.addWeights(limits)
	}
	out := make([]SharedLimit, 0, len(limits))
	for l, s := range limits {
		l.mu.Lock()
		s.Passed, s.Held = l.passed, s.Held || l.bucket.tat > now || len(l.queue) > 0
		l.mu.Unlock()
		out = append(out, *s)
	}
	return out
}

// SetSharedRate puts the part of a shared maximum rate into force that may be used here. Windows follow with their
// next acknowledgements.
func (m *Manager) SetSharedRate(now cc.Time, group string, most, rate cc.Rate) {
	m.mu.Lock()
	l := m.rateLimits[limitKey{group, most, true}]
	m.mu.Unlock()
	if l != nil {
		l.setRate(now, rate)
	}
}

// Memories returns what groups know of the hosts that they send to, or have sent to lately.
func (m *Manager) Memories(now cc.Time) (all []Memory) {
	m.mu.Lock()
	groups := slices.Collect(maps.Values(m.groups))
	m.mu.Unlock()
	for _, g := range groups {
		all = g.appendMemories(all, now)
	}
	return all
}

// Remember takes in what another edge knew about a host. A group without members starts from that. A group with
// members or an algorithm knows more, and ignores it. Errors are those of Terms.Check.
func (m *Manager) Remember(now cc.Time, from Memory) error {
	r, err := m.resolveTerms(from.Terms)
	if err != nil {
		return fmt.Errorf("flow: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	g, _ := m.findOrMakeGroup(now, r)
	g.mu.Lock()
	if p := m.findOrMakePath(g, from.Terms.Host); len(g.members) == 0 {
		g.idle.saved = Dormant{} // it is older
		g.resumeFrom(from.Window, p, now)
	}
	g.mu.Unlock()
	m.removeFromIdle(g) // its idle time begins anew, so its place is behind the others
	m.retireIfEmpty(r.key, false)
	m.forgetIdleGroups(now)
	return nil
}

// Hint takes in what the network says of the path to the hosts in p. Each group that sends only to hosts in p gets it,
// and its algorithm sees it with the next event. A hint older than the last one is ignored. If h assigns no share,
// groups share by Claims. It returns the number of groups. Nothing is kept for later groups, because hints repeat
// soon.
func (m *Manager) Hint(p netip.Prefix, h cc.Hint) (groups int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hasHints = true
	p = plainPrefix(p)
	all, assigns := Claims{}, h.Share == 0
	if assigns {
		all = m.claimsIn(p).withUnknown(h.Flows)
	}
	host := cc.Rate(0) // delivered to p by all groups, if p is a single host
	if p.IsSingleIP() {
		m.visitGroupsIn(p, func(g *group) { host += g.hints.check.recentRate(h.At) })
	}
	m.visitGroupsIn(p, func(g *group) {
		groups++
		if assigns {
			h.Share = memberClaims(g).Of(all)
		}
		g.addHint(h, max(0, host-g.hints.check.recentRate(h.At)))
	})
	return groups
}

// CountPassing takes in a cumulative count of the bytes that go to a host beside all groups. Each group that sends only
// to this host shows its algorithm their rate. Call it about every 100 ms, so that the rate is recent.
func (m *Manager) CountPassing(now cc.Time, host netip.Addr, total cc.Bytes) {
	host = plainAddr(host)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.visitGroupsIn(netip.PrefixFrom(host, host.BitLen()), func(g *group) { g.passing.addCount(now, total) })
}

// BusyHosts returns the hosts that members with bytes in flight, or waiting, send to.
func (m *Manager) BusyHosts() (hosts []netip.Addr) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for host, all := range m.hosts {
		isBusy := func(l hostPath) bool { return l.group.isBusyTowards(l.path) }
		if host.IsValid() && slices.ContainsFunc(all, isBusy) {
			hosts = append(hosts, host)
		}
	}
	return hosts
}

// Claims adds up the claims of all flows in groups that send only to hosts in p. A source of hints that speaks of a
// link host by host needs them to divide the link itself.
func (m *Manager) Claims(p netip.Prefix) Claims {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.claimsIn(plainPrefix(p))
}

// moveFlow implements Flow.Move. It holds m.mu throughout, so no other call moves f.
func (m *Manager) moveFlow(f *Flow, now cc.Time, t Terms) error {
	r, err := m.resolveTerms(t)
	if err != nil {
		return fmt.Errorf("flow: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.forgetIdleGroups(now)
	from := m.groups[f.home.Load().key]
	if from == nil { // f is closed, and its group dropped
		return nil
	}
	if from.key == r.key {
		from.mu.Lock()
		defer from.divideAndUnlock(now)
		if !f.closed {
			from.changePath(&f.member, now, m.findOrMakePath(from, t.Host))
			m.applyTerms(from.group, f, now, t)
			m.trimPaths(from)
		}
		return nil
	}
	m.nextID++ // each algorithm has a seed of its own
	to, fresh := m.findOrMakeGroup(now, r)
	from.mu.Lock()
	if f.closed {
		from.mu.Unlock()
		m.retireIfEmpty(to.key, t.Alone) // it may be new and without members
		return nil
	}
	wasAlone := f.terms.Alone
	to.mu.Lock()
	to.moveMember(&f.member, from.group, now, m.findOrMakePath(to, t.Host))
	f.home.Store(to.group)
	m.applyTerms(to.group, f, now, t)
	to.divideAndUnlock(now)
	from.divideAndUnlock(now)
	if fresh {
		m.shareHints(now, to)
	}
	m.removeFromIdle(to)
	m.retireIfEmpty(from.key, wasAlone)
	return nil
}

// applyTerms puts terms into force for f within its group. The caller holds m.mu and the group's mutex.
func (m *Manager) applyTerms(g *group, f *Flow, now cc.Time, t Terms) {
	limit := m.acquireRateLimit(now, t)
	before := g.changeTerms(&f.member, now, t, limit)
	m.releaseRateLimit(now, before)
}

// removeFlow releases what the manager keeps of f, which is closed.
func (m *Manager) removeFlow(f *Flow, now cc.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.releaseRateLimit(now, f.maxRate)
	m.retireIfEmpty(f.home.Load().key, f.terms.Alone)
	m.forgetIdleGroups(now)
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

// shardOf returns the shard of the groups with a name.
func (m *Manager) shardOf(name string) int {
	return int(maphash.String(hashSeed, name) % uint64(len(m.shardTimers())))
}

// hashSeed spreads groups over shards.
var hashSeed = maphash.MakeSeed()

// resolveTerms checks t and returns the group that it leads to.
func (m *Manager) resolveTerms(t Terms) (groupTerms, error) {
	if m.Lookup != nil {
		return t.resolveWith(m.Lookup)
	}
	return t.resolveWith(cc.Lookup)
}

// findOrMakeGroup returns the group that r describes, and whether it is a new one. The caller holds m.mu.
func (m *Manager) findOrMakeGroup(now cc.Time, r groupTerms) (g *managedGroup, fresh bool) {
	if m.groups == nil {
		m.groups, m.hosts = map[string]*managedGroup{}, map[netip.Addr][]hostPath{}
		m.deliveredBytes = map[string]*atomic.Int64{}
	}
	g = m.groups[r.key]
	if fresh = g == nil; fresh {
		timers := &m.shardTimers()[m.shardOf(r.name)]
		g = &managedGroup{group: newGroup(r, timers, m.Seed+m.nextID, now, m.deliveredCounter(r.spec.Name))}
		g.emit, g.hintNews = m.Trace, m.HintNews
		m.groups[r.key] = g
	}
	return g, fresh
}

// deliveredCounter returns the counter of the bytes that all groups with an algorithm deliver. The caller holds m.mu.
func (m *Manager) deliveredCounter(algorithm string) *atomic.Int64 {
	n := m.deliveredBytes[algorithm]
	if n == nil {
		n = new(atomic.Int64)
		m.deliveredBytes[algorithm] = n
	}
	return n
}

// retireIfEmpty puts the group with a key into the list of idle groups if it has no members. The group of an Alone flow
// is dropped at once. The caller holds m.mu, but not the group's mutex.
func (m *Manager) retireIfEmpty(key string, alone bool) {
	g := m.groups[key]
	if g == nil {
		return
	}
	g.mu.Lock()
	m.trimPaths(g)
	empty := len(g.members) == 0
	g.mu.Unlock()
	switch {
	case !empty:
	case alone:
		m.dropGroup(g)
	case g.idleElement == nil:
		g.idleElement = m.idleGroups.PushBack(g)
	}
}

// removeFromIdle takes g out of the lists of idle groups. The caller holds m.mu.
func (m *Manager) removeFromIdle(g *managedGroup) {
	if g.idleElement != nil {
		m.idleGroups.Remove(g.idleElement) // it is in one of both lists; the other ignores it
		m.forgottenGroups.Remove(g.idleElement)
		g.idleElement = nil
	}
}

// forgetIdleGroups releases what is kept of groups that have been without members for long enough: first their
// algorithms, then everything. The caller holds m.mu.
func (m *Manager) forgetIdleGroups(now cc.Time) {
	for e := m.idleGroups.Front(); e != nil; e = m.idleGroups.Front() {
		g := e.Value.(*managedGroup)
		g.mu.Lock()
		forgotten := g.forgetAfterIdle(now)
		g.mu.Unlock()
		if !forgotten && m.idleGroups.Len() <= maxIdleGroups {
			break
		}
		m.idleGroups.Remove(e)
		g.idleElement = m.forgottenGroups.PushBack(g)
	}
	for e := m.forgottenGroups.Front(); e != nil; e = m.forgottenGroups.Front() {
		g := e.Value.(*managedGroup)
		g.mu.Lock()
		recent := now.Sub(g.idle.since) <= memoryLasts
		g.mu.Unlock()
		if recent && m.idleGroups.Len()+m.forgottenGroups.Len() <= maxIdleGroups {
			return
		}
		m.dropGroup(g)
	}
}

// dropGroup removes a group without members. The caller holds m.mu.
func (m *Manager) dropGroup(g *managedGroup) {
	m.removeFromIdle(g)
	delete(m.groups, g.key)
	g.mu.Lock()
	g.closeAlgorithm()
	for len(g.paths.all) > 0 {
		m.dropPath(g, len(g.paths.all)-1)
	}
	g.mu.Unlock()
	g.timers.cancelTimer(&g.timer)
}

// findOrMakePath returns g's path to host, a new one if there is none. The caller holds m.mu and g.mu.
func (m *Manager) findOrMakePath(g *managedGroup, host netip.Addr) *path {
	host = plainAddr(host)
	known := m.hosts[host]
	if len(g.paths.all) < len(known) { // the shorter list is searched
		if p := g.paths.pathTo(host); p != nil {
			return p
		}
	} else if i := slices.IndexFunc(known, func(l hostPath) bool { return l.group == g }); i >= 0 {
		return known[i].path
	}
	p := &path{host: host, hostIndex: len(known)}
	if len(known) > 0 { // all paths to a host share its queue
		p.queue.Store(known[0].path.queue.Load())
	}
	g.paths.all = append(g.paths.all, p)
	m.hosts[host] = append(known, hostPath{g, p})
	if g.receives && host.IsValid() && p.queue.Load() == nil { // only groups that receive need it
		shared := new(hostQueue)
		for _, l := range m.hosts[host] {
			l.path.queue.Store(shared)
		}
	}
	return p
}

// dropPath removes the i-th path of g. The caller holds m.mu and g.mu.
func (m *Manager) dropPath(g *managedGroup, i int) {
	p := g.paths.all[i]
	g.paths.all = slices.Delete(g.paths.all, i, i+1)
	all := m.hosts[p.host]
	last := len(all) - 1
	all[p.hostIndex], all[last].path.hostIndex = all[last], p.hostIndex
	all[last] = hostPath{}
	if last == 0 {
		delete(m.hosts, p.host)
		return
	}
	m.hosts[p.host] = all[:last]
}

// trimPaths removes the path that has been without members for longest, if there are too many. The caller holds m.mu
// and g.mu.
func (m *Manager) trimPaths(g *managedGroup) {
	idle, oldest := 0, -1
	for i, p := range g.paths.all {
		if len(p.members) > 0 {
			continue
		}
		if idle++; oldest < 0 || p.emptySince < g.paths.all[oldest].emptySince {
			oldest = i
		}
	}
	if idle > maxIdlePaths {
		m.dropPath(g, oldest)
	}
}

// plainPrefix returns p in the form of plainAddr.
func plainPrefix(p netip.Prefix) netip.Prefix {
	bits := p.Bits()
	if p.Addr().Is4In6() && bits >= 96 {
		bits -= 96
		return netip.PrefixFrom(p.Addr().Unmap(), bits)
	}
	return netip.PrefixFrom(p.Addr().WithZone(""), bits)
}

// visitGroupsIn calls do with each group that uses paths, if all of them lead into p. It holds the group's mutex
// during the call. The caller holds m.mu.
func (m *Manager) visitGroupsIn(p netip.Prefix, do func(*group)) {
	if p.IsSingleIP() {
		for _, l := range m.hosts[p.Addr()] {
			l.visitIfWithin(p, do)
		}
		return
	}
	for host, all := range m.hosts {
		if p.Contains(host) {
			for _, l := range all {
				l.visitIfWithin(p, do)
			}
		}
	}
}

// visitIfWithin calls do if all paths in use of l's group lead into p, and l.path is the first of them. The group
// stands in Manager.hosts once for each path, and must be visited once.
func (l hostPath) visitIfWithin(p netip.Prefix, do func(*group)) {
	g := l.group.group
	if g.receives { // hints are about the way to a host, not from it
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

// shareHints gives g, which is new, the newest fresh hint of the groups that use its path and no other. The caller
// holds m.mu, and no group's mutex.
func (m *Manager) shareHints(now cc.Time, g *managedGroup) {
	if !m.hasHints || g.receives || len(g.paths.all) != 1 || !g.paths.all[0].host.IsValid() {
		return
	}
	host := g.paths.all[0].host
	var newest cc.Hint
	m.visitGroupsIn(netip.PrefixFrom(host, host.BitLen()), func(other *group) {
		if other.hints.isFresh(now, other.rtt.srtt) && other.hints.newest.At > newest.At {
			newest = other.hints.newest
		}
	})
	if newest.At > 0 {
		g.mu.Lock()
		g.addHint(newest, 0)
		g.mu.Unlock()
	}
}

// acquireRateLimit returns the maximum rate that t leads to, with one more user; nil: t has none. The caller holds
// m.mu.
func (m *Manager) acquireRateLimit(now cc.Time, t Terms) *rateLimit {
	m.dropUnusedLimits(now)
	if t.MaxRate == 0 {
		return nil
	}
	key := limitKey{t.Group, t.MaxRate, t.Shared}
	l := m.rateLimits[key]
	if l == nil {
		if m.rateLimits == nil {
			m.rateLimits = map[limitKey]*rateLimit{}
		}
		l = newRateLimit(&m.shardTimers()[0], key)
		if t.Shared && m.SharedRate != nil {
			l.setRate(now, m.SharedRate(t.Group, t.MaxRate))
		}
		m.rateLimits[key] = l
	}
	l.users.Add(1)
	return l
}

// releaseRateLimit undoes one acquireRateLimit. A rateLimit without users is kept until its bucket is full, so that a
// client that opens a connection for each object gains nothing. The caller holds m.mu.
func (m *Manager) releaseRateLimit(now cc.Time, l *rateLimit) {
	if l != nil && l.users.Add(-1) == 0 && !l.parked {
		l.parked = true
		m.unusedLimits = append(m.unusedLimits, l)
	}
	m.dropUnusedLimits(now)
}

// dropUnusedLimits removes the rate limits that have no users and a full bucket. The caller holds m.mu.
func (m *Manager) dropUnusedLimits(now cc.Time) {
	kept := m.unusedLimits[:0]
	for _, l := range m.unusedLimits {
		used := l.users.Load() > 0
		if !used && !l.isFull(now) {
			kept = append(kept, l)
			continue
		}
		l.parked = false
		if !used {
			delete(m.rateLimits, l.key)
		}
	}
	clear(m.unusedLimits[len(kept):])
	m.unusedLimits = kept
}

// claimsIn returns Claims(p). The caller holds m.mu.
func (m *Manager) claimsIn(p netip.Prefix) (c Claims) {
	m.visitGroupsIn(p, func(g *group) { c = c.addClaims(memberClaims(g)) })
	return c
}

// memberClaims adds up the claims of g's members. The caller holds m.mu.
func memberClaims(g *group) (c Claims) {
	priority := g.params["priority"]
	if priority == 0 {
		priority = 1
	}
	c.flows, c.prioritySum = len(g.members), priority*float64(len(g.members))
	for _, f := range g.members {
		if f.terms.Target > 0 {
			c.withTarget++
			c.trafficSum += priority * float64(f.terms.Target)
		}
	}
	return c
}

// Claims is what flows may ask for of a link that they share (NACC, equation 8). Each flow claims its priority times
// what its application sends, if that is known of all flows; otherwise its priority. The priority is the algorithm's
// parameter of that name, or 1 if it has none.
type Claims struct {
	flows, withTarget int     // how many there are, and how many have a Target
	prioritySum       float64 // of all
	trafficSum        float64 // sum of priority times Target over withTarget flows
}

// addClaims returns the sum of c and d.
func (c Claims) addClaims(d Claims) Claims {
	return Claims{
		c.flows + d.flows, c.withTarget + d.withTarget, c.prioritySum + d.prioritySum, c.trafficSum + d.trafficSum,
	}
}

// withUnknown returns c with unknown flows added until there are flows in all. Each claims 1.
func (c Claims) withUnknown(flows int) Claims {
	others := max(0, flows-c.flows)
	return c.addClaims(Claims{flows: others, prioritySum: float64(others)})
}

// Of returns c's part of all, which includes c; 0 if all is nothing.
func (c Claims) Of(all Claims) float64 {
	switch {
	case all.flows == 0:
		return 0
	case all.withTarget == all.flows:
		return c.trafficSum / all.trafficSum
	}
	return c.prioritySum / all.prioritySum
}
