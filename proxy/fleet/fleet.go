package fleet

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/fleet/division"
)

// Config describes a Fleet.
type Config struct {
	Settings
	Flows *flow.Manager // without flows yet
	Clock func() cc.Time
	Start time.Time // calendar time at which Clock was 0
	Log   *slog.Logger
}

// Fleet is this edge's part of a fleet. Its methods may be called from any goroutine.
//
//	lock   guards                 is held while
//	mu     edge, nodes, probed,   division computes; never while flows or memberlist are called
//	       warnedAt
type Fleet struct {
	cfg     Config
	list    *memberlist.Memberlist
	keyring *memberlist.Keyring
	join    atomic.Pointer[[]string] // Settings.Join
	rejoin  chan struct{}            // wakes keepJoining

	mu       sync.Mutex
	edge     *division.Edge
	nodes    map[string]memberlist.Node // the newest state of each member, also while it is silent
	probed   map[string]cc.Time         // when a silent member was probed last
	warnedAt cc.Time                    // when two edges of one name were logged last; 0: never

	sent, received, refused, remembered atomic.Uint64
}

const (
	joinEvery     = 30 * time.Second    // between two rounds through Settings.Join
	joinSoon      = 2 * time.Second     // while no other edge is known
	memoriesEvery = 5 * time.Second     // between two rounds of sendMemories while this edge drains
	leavePatience = time.Second         // limit for the message that this edge leaves
	dialPatience  = 2 * time.Second     // limit for a connection to another edge, and for its answer
	warnEvery     = 30 * time.Second    // between two warnings of edges that have one name
	probePatience = time.Second         // limit for a probe, and time between two
	probeAfter    = 2 * division.Period // of silence
	maxMemories   = 4096                // sent or accepted at once
	memoryBatch   = 256                 // in one message
	maxMessage    = 1 << 20             // bytes
)

// NewFleet returns a Fleet that does not listen yet.
func NewFleet(cfg Config) (*Fleet, error) {
	f := &Fleet{
		cfg: cfg, rejoin: make(chan struct{}, 1), edge: division.NewEdge(cfg.EdgeName()),
		nodes: map[string]memberlist.Node{}, probed: map[string]cc.Time{},
	}
	f.join.Store(&cfg.Join)
	var err error
	if f.keyring, err = memberlist.NewKeyring(keysOf(&cfg.Settings), cfg.Key.rawBytes()); err != nil {
		return nil, fmt.Errorf("fleet.key: %w", err)
	}
	cfg.Flows.SharedRate = f.sharedRate
	return f, nil
}

// Listen begins to listen, and does not wait for other edges. If it was not called or has failed, RunEdge repeats it.
func (f *Fleet) Listen() error {
	cfg := &f.cfg
	host, port, err := net.SplitHostPort(cfg.Listen)
	if err != nil {
		return fmt.Errorf("fleet.listen: %w", err)
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return fmt.Errorf("fleet.listen: port %q is no number", port)
	}
	m := memberlist.DefaultLANConfig()
	m.Name, m.BindAddr, m.BindPort, m.AdvertisePort = cfg.EdgeName(), host, n, n
	m.Keyring, m.EnableCompression, m.DeadNodeReclaimTime = f.keyring, false, time.Second
	m.Delegate, m.Events, m.Conflict, m.TCPTimeout = f, f, f, dialPatience
	m.Logger = slog.NewLogLogger(logFilter{cfg.Log.Handler()}, slog.LevelDebug)
	list, err := memberlist.Create(m)
	if err != nil {
		return fmt.Errorf("fleet.listen: %s: %w", cfg.Listen, err)
	}
	f.list = list
	cfg.Log.Info("fleet", "name", cfg.EdgeName(), "address", cfg.Listen, "join", cfg.Join)
	return nil
}

// logFilter logs memberlist's lines with a prefix.
type logFilter struct{ slog.Handler }

// Handle implements slog.Handler.
func (h logFilter) Handle(ctx context.Context, r slog.Record) error {
	out := slog.NewRecord(r.Time, r.Level, "fleet: "+strings.TrimSpace(r.Message), 0)
	return h.Handler.Handle(ctx, out)
}

// keysOf returns the keys that are accepted. The first one encrypts what this edge sends.
func keysOf(s *Settings) (keys [][]byte) {
	for _, k := range []Key{s.Key, s.OtherKey} {
		if raw := k.rawBytes(); len(raw) > 0 {
			keys = append(keys, raw)
		}
	}
	return keys
}

// Reload replaces the keys and the addresses to join by those of s.
func (f *Fleet) Reload(s *Settings) error {
	keys := keysOf(s)
	for _, k := range keys {
		if err := f.keyring.AddKey(k); err != nil {
			return fmt.Errorf("fleet.key: %w", err)
		}
	}
	if err := f.keyring.UseKey(s.Key.rawBytes()); err != nil {
		return fmt.Errorf("fleet.key: %w", err)
	}
	for _, old := range f.keyring.GetKeys() {
		if !slices.ContainsFunc(keys, func(k []byte) bool { return bytes.Equal(k, old) }) {
			if err := f.keyring.RemoveKey(old); err != nil {
				return fmt.Errorf("fleet.key: %w", err)
			}
		}
	}
	f.join.Store(&s.Join)
	select {
	case f.rejoin <- struct{}{}:
	default:
	}
	return nil
}

// readClock returns a time that also grows over restarts, so that messages after a restart are newer than those
// before.
func (f *Fleet) readClock() cc.Time { return cc.Time(f.cfg.Start.UnixNano()) + f.cfg.Clock() }

// RunEdge exchanges messages until ctx is done. Then it announces that this edge leaves, and closes. draining is
// closed when connections are to go to other edges: from then on the others get this edge's memories of hosts.
func (f *Fleet) RunEdge(ctx context.Context, draining <-chan struct{}) {
	if !f.awaitListening(ctx) {
		return
	}
	go f.keepJoining(ctx) // not waited for at the end, because nothing can interrupt an attempt to connect
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		f.sendMemories(ctx, draining)
	}()
	tick := time.NewTicker(division.Period)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			f.exchangeMessages()
		case <-ctx.Done():
			select {
			case <-sent:
			case <-time.After(dialPatience):
			}
			f.Close()
			return
		}
	}
}

// awaitListening repeats Listen until it succeeds, and returns false if ctx is done before. The process that this one
// takes over from may still have the port.
func (f *Fleet) awaitListening(ctx context.Context) bool {
	for warned := false; f.list == nil; warned = true {
		if err := f.Listen(); err != nil && !warned {
			f.cfg.Log.Warn("fleet: its address cannot be had yet", "err", err)
		}
		select {
		case <-ctx.Done():
			return f.list != nil
		case <-time.After(division.Period):
		}
	}
	return true
}

// Close announces that this edge leaves, and stops listening.
func (f *Fleet) Close() {
	if err := errors.Join(f.list.Leave(leavePatience), f.list.Shutdown()); err != nil {
		f.cfg.Log.Debug("fleet: leave", "err", err)
	}
}

// keepJoining joins the edges of Settings.Join periodically, because their names may resolve to others later.
func (f *Fleet) keepJoining(ctx context.Context) {
	for failed := false; ; {
		if join := *f.join.Load(); len(join) > 0 {
			_, err := f.list.Join(join)
			if err != nil && !failed && f.list.NumMembers() < 2 {
				f.cfg.Log.Warn("fleet: no other edge is reached; this one goes on alone until one is", "err", err)
			}
			failed = err != nil
		}
		wait := joinEvery
		if f.list.NumMembers() < 2 {
			wait = joinSoon
		}
		select {
		case <-ctx.Done():
			return
		case <-f.rejoin:
		case <-time.After(wait):
		}
	}
}

// exchangeMessages runs each Period. It sends the other edges what flows use, and puts granted rates into force.
func (f *Fleet) exchangeMessages() {
	limits := f.cfg.Flows.SharedLimits(f.cfg.Clock())
	uses := make([]division.Use, len(limits))
	for i, l := range limits {
		uses[i] = division.Use{
			Key: division.Key{Group: l.Group, Max: l.MaxRate}, Passed: l.Passed, Weight: l.Weight, Held: l.Held,
		}
	}
	now := f.readClock()
	f.mu.Lock()
	messages := f.edge.Exchange(now, uses)
	rates := make([]cc.Rate, len(uses))
	for i, u := range uses {
		rates[i] = f.edge.Rate(now, u.Key)
	}
	maps.DeleteFunc(f.nodes, func(name string, n memberlist.Node) bool {
		return n.State == memberlist.StateDead && messages[name] == nil // the edge has forgotten it
	})
	nodes := maps.Clone(f.nodes)
	f.probeSilent(now)
	f.mu.Unlock()
	clock := f.cfg.Clock()
	for i, l := range limits {
		f.cfg.Flows.SetSharedRate(clock, l.Group, l.MaxRate, rates[i])
	}
	for name, m := range messages {
		node, ok := nodes[name]
		if !ok {
			continue
		}
		for _, packet := range m.AppendPackets(nil) {
			if f.list.SendBestEffort(&node, f.wrapMessage(kindDivision, packet)) == nil {
				f.sent.Add(1)
			}
		}
	}
}

// probeSilent connects to silent members. A member that refuses the connection has ended: its machine still answers,
// and no process listens. The caller holds mu.
func (f *Fleet) probeSilent(now cc.Time) {
	members, _ := f.edge.Members(now)
	for _, m := range members {
		node, ok := f.nodes[m.Name]
		if m.Own || !ok || m.Silent < probeAfter || now.Sub(f.probed[m.Name]) < probePatience {
			continue
		}
		f.probed[m.Name] = now
		go func() {
			conn, err := net.DialTimeout("tcp", node.Address(), probePatience)
			if err == nil {
				_ = conn.Close()
				return
			}
			if errors.Is(err, syscall.ECONNREFUSED) {
				f.cfg.Log.Info("fleet: an edge has ended", "edge", m.Name)
				f.removeMember(m.Name)
			}
		}()
	}
}

// removeMember removes an edge that has ended. Its node stays until memberlist has noticed the end, too. If the
// process is started again before, memberlist calls no NotifyJoin, and only its messages make it a member again.
func (f *Fleet) removeMember(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.probed, name)
	f.edge.RemoveMember(f.readClock(), name)
}

// sharedRate implements flow.Manager.SharedRate.
func (f *Fleet) sharedRate(group string, most cc.Rate) cc.Rate {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.edge.Rate(f.readClock(), division.Key{Group: group, Max: most})
}

// A message has its version, its kind, the length of the sender's name, the name, and a body by its kind.
const (
	messageVersion = 1
	kindDivision   = 'd' // a packet of package division
	kindMemories   = 'm' // JSON of a list of flow.Memory
)

// wrapMessage returns a message of this edge.
func (f *Fleet) wrapMessage(kind byte, body []byte) []byte {
	name := f.cfg.EdgeName()
	return append(append([]byte{messageVersion, kind, byte(len(name))}, name...), body...)
}

// unwrapMessage returns the parts of a message.
func unwrapMessage(message []byte) (kind byte, from string, body []byte, err error) {
	switch {
	case len(message) < 3 || len(message) > maxMessage || len(message) < 3+int(message[2]) || message[2] == 0:
		return 0, "", nil, errors.New("fleet: a message is cut off or too long")
	case message[0] != messageVersion:
		return 0, "", nil, fmt.Errorf("fleet: a message of version %d; this edge has %d", message[0], messageVersion)
	}
	end := 3 + int(message[2])
	return message[1], string(message[3:end]), message[end:], nil
}

// receiveMessage handles a message of another edge.
func (f *Fleet) receiveMessage(message []byte) error {
	kind, from, body, err := unwrapMessage(message)
	if err != nil {
		return err
	}
	switch kind {
	case kindDivision:
		m, err := division.ParsePacket(body)
		if err != nil {
			return err
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		f.edge.Receive(f.readClock(), from, m)
		return nil
	case kindMemories:
		return f.addMemories(body)
	}
	return fmt.Errorf("fleet: a message of kind %q", kind)
}

// addMemories adds another edge's memories of hosts.
func (f *Fleet) addMemories(body []byte) error {
	var all []flow.Memory
	if err := json.Unmarshal(body, &all); err != nil {
		return fmt.Errorf("fleet: what an edge knows of hosts: %w", err)
	}
	var failed error // the last one; others are added, since another version may have algorithms that this one lacks
	for _, m := range all[:min(len(all), maxMemories)] {
		if err := f.addMemory(m); err != nil {
			failed = fmt.Errorf("fleet: what an edge knows of a host: %w", err)
			continue
		}
		f.remembered.Add(1)
	}
	return failed
}

// addMemory checks and adds another edge's memory of one host.
func (f *Fleet) addMemory(m flow.Memory) error {
	w, t := &m.Window, &m.Terms
	if !t.Host.IsValid() || w.Cwnd <= 0 || w.Cwnd > cc.MaxCwnd || w.BaseRTT <= 0 || w.BaseRTT > time.Minute ||
		w.Rate < 0 || w.MSS <= 0 || w.MSS > 1<<16 {
		return errors.New("out of bounds")
	}
	return f.cfg.Flows.Remember(f.cfg.Clock(), flow.Memory{
		Terms:  flow.Terms{Group: t.Group, Host: t.Host, Algorithm: t.Algorithm, Params: t.Params},
		Window: *w,
	})
}

// sendMemories sends this edge's memories of hosts to all members, since it does not know which of them gets a host's
// connections. It does so periodically from draining until ctx is done, and once at least.
func (f *Fleet) sendMemories(ctx context.Context, draining <-chan struct{}) {
	select {
	case <-draining:
	case <-ctx.Done():
		select {
		case <-draining:
		default:
			return
		}
	}
	for {
		all := f.cfg.Flows.Memories(f.cfg.Clock())
		all = all[:min(len(all), maxMemories)]
		var bodies [][]byte
		for batch := range slices.Chunk(all, memoryBatch) {
			body, err := json.Marshal(batch)
			if err != nil { // only a bug can cause it
				f.cfg.Log.Error("fleet: what is known of hosts stays here", "err", err)
				return
			}
			bodies = append(bodies, f.wrapMessage(kindMemories, body))
		}
		f.mu.Lock()
		nodes := slices.Collect(maps.Values(f.nodes))
		f.mu.Unlock()
		var reached atomic.Int64
		var sends sync.WaitGroup
		for _, node := range nodes { // at the same time, so that one that does not answer delays no other
			sends.Go(func() {
				for _, body := range bodies {
					if err := f.list.SendReliable(&node, body); err != nil {
						f.cfg.Log.Debug("fleet: tell what is known of hosts", "edge", node.Name, "err", err)
						return
					}
				}
				reached.Add(1)
			})
		}
		sends.Wait()
		f.cfg.Log.Info("fleet: the other edges know what this one knew of its hosts", "hosts", len(all),
			"edges", reached.Load())
		select {
		case <-ctx.Done():
			return
		case <-time.After(memoriesEvery):
		}
	}
}

// NodeMeta implements memberlist.Delegate: there is none.
func (f *Fleet) NodeMeta(int) []byte { return nil }

// NotifyMsg implements memberlist.Delegate.
func (f *Fleet) NotifyMsg(message []byte) {
	f.received.Add(1)
	if err := f.receiveMessage(message); err != nil {
		f.refused.Add(1)
		f.cfg.Log.Debug("fleet: a message is ignored", "err", err)
	}
}

// GetBroadcasts implements memberlist.Delegate: there are none.
func (f *Fleet) GetBroadcasts(int, int) [][]byte { return nil }

// LocalState implements memberlist.Delegate: there is none.
func (f *Fleet) LocalState(bool) []byte { return nil }

// MergeRemoteState implements memberlist.Delegate.
func (f *Fleet) MergeRemoteState([]byte, bool) {}

// NotifyJoin implements memberlist.EventDelegate.
func (f *Fleet) NotifyJoin(n *memberlist.Node) {
	if n.Name == f.cfg.EdgeName() {
		return
	}
	f.cfg.Log.Info("fleet: an edge is there", "edge", n.Name, "address", n.Address())
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.edge.AddMember(f.readClock(), n.Name) {
		f.cfg.Log.Warn("fleet: an edge is left out", "edge", n.Name, "most", division.MaxMembers)
		return
	}
	f.nodes[n.Name] = *n
}

// NotifyUpdate implements memberlist.EventDelegate.
func (f *Fleet) NotifyUpdate(n *memberlist.Node) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.nodes[n.Name]; ok {
		f.nodes[n.Name] = *n
	}
}

// NotifyLeave implements memberlist.EventDelegate. An edge has left only if it has announced that. A silent one may be
// behind a partition.
func (f *Fleet) NotifyLeave(n *memberlist.Node) {
	if n.State == memberlist.StateLeft {
		f.cfg.Log.Info("fleet: an edge has left", "edge", n.Name)
		f.removeMember(n.Name)
	} else {
		f.cfg.Log.Warn("fleet: an edge is silent", "edge", n.Name)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if node, ok := f.nodes[n.Name]; ok {
		node.State = memberlist.StateDead
		f.nodes[n.Name] = node
	}
}

// NotifyConflict implements memberlist.ConflictDelegate. memberlist calls it with each message about either edge.
func (f *Fleet) NotifyConflict(have, other *memberlist.Node) {
	now := f.readClock()
	f.mu.Lock()
	if f.warnedAt > 0 && now.Sub(f.warnedAt) < warnEvery {
		f.mu.Unlock()
		return
	}
	f.warnedAt = now
	f.mu.Unlock()
	f.cfg.Log.Warn("fleet: two edges have one name; give one another fleet.name", "edge", have.Name,
		"address", have.Address(), "other", other.Address())
}
