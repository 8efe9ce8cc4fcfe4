package flow

import (
	"cmp"
	"container/heap"
	"container/list"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// A macroflow outlives its last member, so that the next connection of a host
// need not find the path's window again. It stays as it is for linger, or three
// retransmission timeouts if those are longer; from then on its window halves with
// every timeout, and after memoryLasts nothing is known of it any more.
const (
	linger      = 10 * time.Second
	memoryLasts = 5 * time.Minute
)

// MaxWeight bounds Terms.Weight: a window times all weights fits an int64.
const MaxWeight = 1000

// maxLingering bounds the macroflows that are kept without members.
const maxLingering = 4096

// Manager keeps the macroflows. Its zero value is ready.
type Manager struct {
	// Arm, if set, is told when Tick wants to be called earlier than it last
	// asked for. It must neither block nor call back.
	Arm func(at cc.Time)
	// Trace, if set, sees every event an algorithm saw, outside all locks.
	Trace func(Event)
	// Seed feeds the algorithms' randomness.
	Seed uint64

	mu        sync.Mutex // taken before any macroflow's
	groups    map[string]*macroflow
	hosts     map[netip.Addr][]*route // of all macroflows, which hints are about
	flows     map[uint64]*Flow
	datagrams map[string][]*Datagrams // by the keys of their macroflows, whether there are such or not
	idle      list.List               // of *macroflow without members, the longest idle first
	faded     list.List               // likewise, of those whose algorithms are forgotten; they were idle before all others
	limits    map[limitKey]*rateLimit
	unused    []*rateLimit // of limits, those without users
	nextID    uint64

	dueMu sync.Mutex // taken last
	due   dueHeap
}

// Open adds a flow to its macroflow. wake is called, from any goroutine and
// outside all locks, when a Take that was refused may now succeed; it must
// neither block nor call back.
func (m *Manager) Open(now cc.Time, t Terms, wake func()) (*Flow, error) {
	r, err := t.resolve()
	if err != nil {
		return nil, fmt.Errorf("flow: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.forget(now)
	m.nextID++
	g, fresh := m.macroflow(r)
	f := &Flow{
		id: m.nextID, terms: t, standing: t.standing(), wake: wake, limits: limits{since: now},
	}
	f.limitTo(m.rateLimit(now, t))
	g.mu.Lock()
	along := m.route(g, t.Host)
	g.revive(now, along)
	g.join(f, along)
	g.mu.Unlock()
	if fresh {
		m.meet(now, g)
	}
	m.occupied(g)
	m.flows[f.id] = f
	return f, nil
}

// resolved is what Terms say about the macroflow they lead to.
type resolved struct {
	key, group string
	spec       cc.Spec
	params     cc.Params
}

// resolve checks t and finds out where it leads.
func (t Terms) resolve() (resolved, error) {
	spec, err := cc.Lookup(t.Algorithm)
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
	return resolved{groupKey(t.Group, spec.Name, params), t.Group, spec, params}, nil
}

// Check tells what Open would refuse of t.
func (t Terms) Check() error {
	_, err := t.resolve()
	return err
}

// macroflow returns the one that r leads to, a new one if need be. The caller
// holds m.mu.
func (m *Manager) macroflow(r resolved) (g *macroflow, fresh bool) {
	if m.groups == nil {
		m.groups, m.flows, m.hosts = map[string]*macroflow{}, map[uint64]*Flow{}, map[netip.Addr][]*route{}
	}
	g = m.groups[r.key]
	if fresh = g == nil; fresh {
		g = &macroflow{mgr: m, key: r.key, group: r.group, spec: r.spec, prm: r.params, seed: m.Seed + m.nextID}
		m.groups[r.key] = g
		g.mu.Lock()
		g.accompany(m.datagrams[r.key])
		g.mu.Unlock()
	}
	return g, fresh
}

// occupied notes that g has members. The caller holds m.mu.
func (m *Manager) occupied(g *macroflow) {
	if g.idle != nil {
		m.idle.Remove(g.idle) // it is in one of them
		m.faded.Remove(g.idle)
		g.idle = nil
	}
}

// vacated notes that g has fewer members, or none. The caller holds m.mu, but not g's.
func (m *Manager) vacated(g *macroflow) {
	g.mu.Lock()
	m.trimRoutes(g)
	empty := len(g.members) == 0
	g.mu.Unlock()
	if empty && g.idle == nil {
		g.idle = m.idle.PushBack(g)
	}
}

// groupKey tells macroflows apart: flows share a window only when they would
// run it the same way.
func groupKey(group, algorithm string, p cc.Params) string {
	var b strings.Builder
	b.WriteString(group)
	b.WriteByte(0)
	b.WriteString(algorithm)
	for _, name := range slices.Sorted(maps.Keys(p)) {
		b.WriteByte(0)
		b.WriteString(strconv.FormatFloat(p[name], 'g', -1, 64))
	}
	return b.String()
}

// left takes note that f has gone.
func (m *Manager) left(f *Flow, now cc.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.flows, f.id)
	m.release(now, f.maxRate)
	m.vacated(f.home.Load())
	m.forget(now)
}

// forget drops what is known of macroflows that have been without members for
// long enough: first their algorithms, then all of it.
func (m *Manager) forget(now cc.Time) {
	for e := m.idle.Front(); e != nil; e = m.idle.Front() {
		g := e.Value.(*macroflow)
		g.mu.Lock()
		faded := g.fade(now)
		g.mu.Unlock()
		if !faded && m.idle.Len() <= maxLingering {
			break
		}
		m.idle.Remove(e)
		g.idle = m.faded.PushBack(g)
	}
	for e := m.faded.Front(); e != nil; e = m.faded.Front() {
		g := e.Value.(*macroflow)
		if now.Sub(g.idleSince) <= memoryLasts && m.idle.Len()+m.faded.Len() <= maxLingering {
			return
		}
		m.faded.Remove(e)
		g.idle = nil
		delete(m.groups, g.key)
		g.mu.Lock()
		g.accompany(nil)
		for len(g.routes) > 0 {
			m.dropRoute(g, len(g.routes)-1)
		}
		g.mu.Unlock()
	}
}

// Snapshots returns the state of every open flow, ordered by ID.
func (m *Manager) Snapshots() []Snapshot {
	m.mu.Lock()
	flows := slices.SortedFunc(maps.Values(m.flows), func(a, b *Flow) int { return cmp.Compare(a.id, b.id) })
	m.mu.Unlock()
	all := make([]Snapshot, len(flows))
	for i, f := range flows {
		all[i] = f.Snapshot()
	}
	return all
}

// ticker is what wants to be called at times.
type ticker interface {
	tick(now cc.Time)
	when() *timer
}

// timer says when a ticker will be called; guarded by the manager's dueMu.
type timer struct {
	at    cc.Time
	place int // in the manager's heap, counted from 1; 0: it is not there
}

func (t *timer) when() *timer { return t }

// schedule notes that g wants a tick at t, unless it has an earlier one due.
// The caller holds g.mu.
func (m *Manager) schedule(g ticker, t cc.Time) {
	m.dueMu.Lock()
	defer m.dueMu.Unlock()
	due := g.when()
	if due.place > 0 && due.at <= t {
		return
	}
	due.at = t
	if due.place == 0 {
		heap.Push(&m.due, g)
	} else {
		heap.Fix(&m.due, due.place-1)
	}
	if m.Arm != nil && due.place == 1 {
		m.Arm(t)
	}
}

// Tick serves what time alone brings about: pacing credit and algorithms' own
// clocks. It returns when it wants to be called next; cc.Never: not before Arm
// says so.
func (m *Manager) Tick(now cc.Time) cc.Time {
	for {
		m.dueMu.Lock()
		if len(m.due) == 0 || m.due[0].when().at > now {
			next := cc.Never
			if len(m.due) > 0 {
				next = m.due[0].when().at
			}
			m.dueMu.Unlock()
			return next
		}
		g := heap.Pop(&m.due).(ticker)
		m.dueMu.Unlock()
		g.tick(now)
	}
}

// tick serves what has become due.
func (m *macroflow) tick(now cc.Time) {
	m.mu.Lock()
	var events [1]Event
	n := 0
	m.recap(now)
	if len(m.members) > 0 && m.ctl.NextTick != 0 {
		if m.ctl.NextTick <= now {
			state := m.state(now)
			m.alg.OnTick(state)
			m.adopt(now)
			events[0] = m.event(nil, KindTick, state, 0, 0)
			n = 1
		} else {
			m.mgr.schedule(m, m.ctl.NextTick)
		}
	}
	for _, f := range m.members {
		if f.parked && f.ready > now {
			m.mgr.schedule(m, f.ready)
		}
	}
	m.unlockAndWake(now)
	m.mgr.trace(events[:n])
}

// dueHeap orders tickers by when they want to be called; each is in it at most once.
type dueHeap []ticker

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].when().at < h[j].when().at }
func (h dueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].when().place, h[j].when().place = i+1, j+1
}

func (h *dueHeap) Push(x any) {
	g := x.(ticker)
	*h = append(*h, g)
	g.when().place = len(*h)
}

func (h *dueHeap) Pop() any {
	last := len(*h) - 1
	g := (*h)[last]
	g.when().place = 0
	(*h)[last] = nil
	*h = (*h)[:last]
	return g
}
