package proxy

import (
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/takeover"
)

// Mover hands the relayed connections of a Kernel to another process, in batches. One goroutine uses it.
//
//	this process: Park                          the other process: Adopt
//	loops detach the legs and write records ──▶ attaches the legs, opens flows
//	endParked: closes the descriptors, or   ◀── acknowledges, and only then moves bytes
//	restores what was not acknowledged
type Mover struct {
	kernel    *Kernel
	queue     []*connection // to be tried
	moved     int           // connections that the other process has
	logged    int           // moved at the last log line; -1: there was none
	longest   time.Duration // from Park to endParked
	walkBegan cc.Time       // the first walk over all connections since the last log line
}

// Mover returns a mover of the relayed connections.
func (k *Kernel) Mover() *Mover { return &Mover{kernel: k, logged: -1} }

// Park takes the next connections out of service. The caller must call end with whether the other process has each, and
// whether it takes no further batch. An empty batch ends a walk over all connections; the next call begins another one.
// What cannot move stays as it is: connections that are being made, legs in user space, exchanges with parsed content.
func (m *Mover) Park() (b takeover.Batch, end func(adopted []bool, last bool)) {
	if len(m.queue) == 0 {
		if m.moved == max(m.logged, 0) {
			m.walkBegan = m.kernel.env.Clock()
		}
		m.fillQueue()
	}
	var parked []*connection
	var records []connectionRecord
	began := m.kernel.env.Clock()
	for stored := 0; len(parked) < batchSize && stored < maxBatchStored && len(m.queue) > 0; {
		n := min(len(m.queue), batchSize-len(parked), parksAtOnce)
		conns, rs := parkAll(m.queue[:n])
		m.queue = m.queue[n:]
		parked, records = append(parked, conns...), append(records, rs...)
		for i := range rs {
			stored += len(rs[i].Down.Stored) + len(rs[i].Up.Stored)
		}
	}
	if len(records) == 0 {
		m.logMoved()
		return b, nil
	}
	text, err := encodeBatch(records)
	if err != nil { // only a bug can cause it
		m.kernel.env.Log.Error("connections stay here", "err", err)
	}
	b.Record = text
	for i := range records {
		b.FDs = append(b.FDs, records[i].Client.FD, records[i].Server.FD)
	}
	return b, func(adopted []bool, last bool) {
		m.longest = max(m.longest, m.kernel.env.Clock().Sub(began))
		m.endParked(parked, records, adopted)
		if last {
			m.logMoved()
		}
	}
}

// parksAtOnce is how many connections are parked before their stored bytes are counted.
const parksAtOnce = 30

// fillQueue lists the connections that might move. Those of one client follow one another, because they share windows
// and should move together.
func (m *Mover) fillQueue() {
	for _, c := range m.kernel.liveConnections() {
		if at := c.currentPhase(); (at == relaying || at == halfClosed) && !c.keptBack {
			m.queue = append(m.queue, c)
		}
	}
	slices.SortStableFunc(m.queue, func(a, b *connection) int {
		return a.clientAddress().Addr().Compare(b.clientAddress().Addr())
	})
}

// logMoved says how many connections have moved, if there are more than before, and what the rest is doing.
func (m *Mover) logMoved() {
	if m.moved == m.logged {
		return
	}
	m.logged = m.moved
	setup, userSpace, exchanges, other := 0, 0, 0, 0
	for _, c := range m.kernel.liveConnections() {
		_, ofKernel := c.clientLeg().(*kernel.Conn)
		switch at := c.currentPhase(); {
		case at < relaying:
			setup++
		case !ofKernel:
			userSpace++
		case c.chosen.Exchange != nil:
			exchanges++
		default:
			other++
		}
	}
	m.kernel.env.Log.Info("connections have moved to the process that has taken over", "moved", m.moved,
		"took", m.kernel.env.Clock().Sub(m.walkBegan), "longest_pause", m.longest,
		"stay_in_setup", setup, "stay_in_user_space", userSpace, "stay_as_exchanges", exchanges,
		"stay_for_another_try", other)
}

// parkAll parks connections on their loops, and returns those that could be.
func parkAll(conns []*connection) (parked []*connection, records []connectionRecord) {
	var mu sync.Mutex
	var all sync.WaitGroup
	for _, c := range conns {
		leg, ok := c.clientLeg().(*kernel.Conn)
		if !ok {
			continue
		}
		all.Add(1)
		leg.Do(func() {
			defer all.Done()
			if r, ok := c.parkForTakeover(); ok {
				mu.Lock()
				defer mu.Unlock()
				parked, records = append(parked, c), append(records, r)
			}
		})
	}
	all.Wait()
	return parked, records
}

// endParked ends the parked connections. Those that the other process has not adopted go on here, as new ones.
func (m *Mover) endParked(parked []*connection, records []connectionRecord, adopted []bool) {
	for i, c := range parked {
		r := &records[i]
		if i < len(adopted) && adopted[i] {
			closeDetached(r.Client, r.Server)
			m.moved++
		} else if back, err := m.kernel.restoreConnection(r); err != nil {
			m.kernel.env.Log.Warn("a connection is lost in a takeover", "id", c.id, "err", err)
		} else {
			back.keptBack = true
			m.kernel.startMoved(back)
		}
		c.funcs.onEnd(nil)
	}
}

// Adopt restores the connections that another process has parked, and returns which it could restore. The descriptors
// of all others are closed. Call start once the other process has been told: with kept they run here, otherwise they
// stay with the other process.
func (k *Kernel) Adopt(b takeover.Batch) (adopted []bool, start func(kept bool)) {
	records, err := decodeBatch(b.Record, b.FDs)
	if err != nil {
		k.env.Log.Warn("connections stay with the process before this one", "err", err)
		takeover.CloseDescriptors(b.FDs)
		return nil, func(bool) {}
	}
	var all []*connection
	for i := range records {
		c, err := k.restoreIfServing(&records[i])
		if err != nil {
			k.env.Log.Warn("a connection stays with the process before this one", "err", err)
		} else {
			all = append(all, c)
		}
		adopted = append(adopted, err == nil)
	}
	return adopted, func(kept bool) {
		for _, c := range all {
			if kept {
				k.startMoved(c)
				k.adopted.Add(1)
			} else {
				c.abandonRestored()
			}
			c.listener.handlers.Done()
			k.handlers.Done()
		}
	}
}

// Adopted returns how many connections came from the process before this one.
func (k *Kernel) Adopted() int { return int(k.adopted.Load()) }

// restoreIfServing calls restoreConnection unless the Server drains. Serve then waits for the connection's end.
func (k *Kernel) restoreIfServing(r *connectionRecord) (*connection, error) {
	k.reloading.Lock()
	defer k.reloading.Unlock()
	if k.draining.Load() {
		return nil, errEnding
	}
	c, err := k.restoreConnection(r)
	if err == nil {
		c.listener.handlers.Add(1)
		k.handlers.Add(1)
	}
	return c, err
}

// errNoListener refuses connections of a listener that this process does not have.
var errNoListener = errors.New("proxy: its listener is not in the configuration of this process")

// restoreConnection restores a parked connection. It takes its descriptors over, and closes them after an error.
func (k *Kernel) restoreConnection(r *connectionRecord) (*connection, error) {
	in := k.env.currentSettings()
	i := slices.IndexFunc(in.listeners, func(l *listenerState) bool { return l.cfg.Name == r.Listener })
	if i < 0 {
		closeDetached(r.Client, r.Server)
		return nil, errNoListener
	}
	client, err := k.Datapath.Attach(r.Client, nil)
	if err != nil {
		closeDetached(r.Client, r.Server)
		return nil, err
	}
	server, err := k.Datapath.Attach(r.Server, client)
	if err != nil {
		closeDetached(r.Server)
		_ = client.Abandon()
		return nil, err
	}
	c := k.newConnection()
	c.env, c.listener = &k.env, in.listeners[i]
	if err := c.restoreFrom(r, client, server); err != nil {
		c.abandonRestored()
		return nil, err
	}
	return c, nil
}

// startMoved counts a restored connection in the limits, and runs it.
func (k *Kernel) startMoved(c *connection) {
	c.counted = k.env.limits.admitMoved(&c.listener.share, source{host: datapath.Host(c.chosen.Source.Addr())})
	c.captured = c.listener.cfg.Mode.Captures() && k.env.loops.addCaptured(c.clientWire()) == nil
	c.dialled = !c.listener.cfg.KeepClient && k.env.loops.addDialled(wireOfLeg(c.server.conn)) == nil
	k.mu.Lock()
	k.nextID++
	c.id = k.nextID
	k.conns.addConnection(c)
	c.seen = true // the Mover refers to it
	k.mu.Unlock()
	c.listener.handlers.Add(1)
	k.handlers.Add(1)
	c.driver.Do(c.runRestored)
	if datapath.IsClosed(k.aborted) { // and perhaps before c was among the connections
		c.tearDown(Cause{ProxySide, ClosedShutdown}, nil)
	}
}
