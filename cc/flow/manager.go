package flow

import (
	"container/list"
	"fmt"
	"hash/maphash"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/penstock-net/penstock/cc"
)

// MaxWeight bounds Terms.Weight: a window times all weights fits an int64.
const MaxWeight = 1000

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

// Tick serves what time alone brings about in a shard: pacing credit, algorithms' own
// clocks, divisions of windows, groups that are idle. It returns when it wants to be
// called next; cc.Never: not before Arm says so.
func (m *Manager) Tick(shard int, now cc.Time) cc.Time { return m.shardTimers()[shard].runDue(now) }

// Shard is where the clock of the group that t leads to runs. A leg whose reports come
// from there waits for nobody else who ticks.
func (m *Manager) Shard(t Terms) int { return m.shardOf(t.Group) }

// shardOf is that of the groups with a name.
func (m *Manager) shardOf(name string) int {
	return int(maphash.String(hashSeed, name) % uint64(len(m.shardTimers())))
}

// resolved is what Terms say about the group they lead to.
type resolved struct {
	key, name string
	spec      cc.Spec
	params    cc.Params
	receives  bool
}

// resolveTerms checks t and finds out where it leads.
func (m *Manager) resolveTerms(t Terms) (resolved, error) {
	if m.Lookup != nil {
		return t.resolveWith(m.Lookup)
	}
	return t.resolveWith(cc.Lookup)
}

func (t Terms) resolveWith(lookup func(string) (cc.Spec, error)) (resolved, error) {
	spec, err := lookup(t.Algorithm)
	if err != nil {
		return resolved{}, err
	}
	params, err := spec.Resolve(t.Params)
	if err != nil {
		return resolved{}, err
	}
	if t.Weight < 0 || t.Weight > MaxWeight {
		return resolved{}, fmt.Errorf("weight %d is not between 0 and %d", t.Weight, MaxWeight)
	}
	if err := t.checkClass(); err != nil {
		return resolved{}, err
	}
	if err := spec.CheckReceives(); t.Receives && err != nil {
		return resolved{}, err
	}
	return resolved{groupKey(t.Group, spec.Name, params, t.Receives), t.Group, spec, params, t.Receives}, nil
}

// Check tells what Open would refuse of t.
func (t Terms) Check() error {
	_, err := t.resolveWith(cc.Lookup)
	return err
}

// hashSeed spreads groups over shards.
var hashSeed = maphash.MakeSeed()

// findOrMakeGroup returns the one that r leads to, a new one if need be. The caller holds m.mu.
func (m *Manager) findOrMakeGroup(now cc.Time, r resolved) (g *managedGroup, fresh bool) {
	if m.groups == nil {
		m.groups, m.hosts = map[string]*managedGroup{}, map[netip.Addr][]hostPath{}
		m.delivered = map[string]*atomic.Int64{}
	}
	g = m.groups[r.key]
	if fresh = g == nil; fresh {
		g = &managedGroup{group: &group{
			key: r.key, name: r.name, spec: r.spec, params: r.params, receives: r.receives, seed: m.Seed + m.nextID,
			timers: &m.shardTimers()[m.shardOf(r.name)], emit: m.Trace, idle: idleness{since: max(now, 1)},
			delivered: delivery{edge: m.deliveredCounter(r.spec.Name)},
		}}
		m.groups[r.key] = g
		g.mu.Lock()
		g.setDatagrams(m.datagrams[r.key])
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

// removeFromIdle has g wait in none of the lists: it has members, or is dropped. The caller holds m.mu.
func (m *Manager) removeFromIdle(g *managedGroup) {
	if g.waits != nil {
		m.idle.Remove(g.waits) // it is in one of them
		m.forgotten.Remove(g.waits)
		g.waits = nil
	}
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

// groupKey tells groups apart: flows share a window only when they would run it the
// same way.
func groupKey(name, algorithm string, p cc.Params, receives bool) string {
	var b strings.Builder
	if receives {
		b.WriteByte(0)
	}
	b.WriteString(name)
	b.WriteByte(0)
	b.WriteString(algorithm)
	for _, name := range slices.Sorted(maps.Keys(p)) {
		b.WriteByte(0)
		b.WriteString(strconv.FormatFloat(p[name], 'g', -1, 64))
	}
	return b.String()
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
	g.setDatagrams(nil)
	g.closeAlgorithm()
	for len(g.paths.all) > 0 {
		m.dropPath(g, len(g.paths.all)-1)
	}
	g.mu.Unlock()
	g.timers.cancelTimer(g.group)
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

// Flow is one sending direction of one connection. Its methods may be called
// from any goroutine.
type Flow struct {
	mgr  *Manager
	home atomic.Pointer[group]
	asks atomic.Bool // NeedsGrants, for those who do not hold the group's mutex
	due  timer
	member
	unpaced  cc.Bytes // over a leg that enforces the window: what it sends yet whatever the pacing rate is
	starting pacer    // spreads these by f's own rates

	closed bool // guarded by the group's mutex, as member is
	gone   bool // not in Snapshots any more; guarded by the manager's flowsMu
}
