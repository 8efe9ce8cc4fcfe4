package proxy

import (
	"iter"
	"net/netip"
	"runtime"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// FlowInfo is one live connection at one moment. What is not known yet in its
// state is zero.
type FlowInfo struct {
	ID             uint64
	Listener, Rule string
	Source, Target netip.AddrPort // Target is where the server leg goes
	Host           string         // "name:port" when the client named it
	Peer           string         // of the tunnel that the client is inside; empty: none
	ServerName     string         // in the client's first bytes, where a rule asked for it
	State          State
	Age            time.Duration
	Setup          time.Duration // from accepted to relaying
	Idle           time.Duration // since a byte last moved
	Down, Up       DirectionInfo
	Client, Server datapath.Info
}

// DirectionInfo is one direction of a live connection.
type DirectionInfo struct {
	Algorithm string
	Read      cc.Bytes // from the leg it comes from
	Written   cc.Bytes // to the leg it goes to
	Spliced   cc.Bytes // of those, moved inside the kernel
	Finished  bool
	Managed   bool          // Flow is meaningful; false where the kernel alone decides, or still does
	Flow      flow.Snapshot // of the window that holds it; Group is known before it is Managed
	Receive   HoldingInfo   // of the window that who sends these bytes is let send in
	// Control is what happened under each algorithm it has had, and since the last
	// change under the present one.
	Control []AlgorithmCounters
}

// Relayed reports whether the directions and legs are in place.
func (f *FlowInfo) Relayed() bool { return f.State != StateGreeting && f.State != StateDialing }

// Flows returns how many connections live, and each of them, oldest first. What it yields
// is overwritten by the next.
func (s *Server) Flows() (n int, each iter.Seq[*FlowInfo]) {
	now, conns := s.clock(), s.liveConnections()
	return len(conns), func(yield func(*FlowInfo) bool) {
		f := new(FlowInfo)
		for i, c := range conns {
			giveWay(i)
			if c.fillInfo(f, now); !yield(f) {
				return
			}
		}
	}
}

// giveWay lets goroutines that wait for a processor go first, now and then in a walk over
// all connections of which the i-th is next: the runtime itself would interrupt the walk
// only after 10 ms.
func giveWay(i int) {
	const every = 64 // connections: a tenth of a millisecond
	if i%every == every-1 {
		runtime.Gosched()
	}
}

// fillInfo writes down what there is to say of the connection, in place of what out had.
func (c *connection) fillInfo(out *FlowInfo, now cc.Time) {
	down, up := out.Down.Control[:0], out.Up.Control[:0]
	c.mu.Lock()
	*out = FlowInfo{
		ID: c.id, Listener: c.listener.cfg.Name, State: c.state,
		Source: c.clientAddress(), Target: c.chosen.Target, Host: c.chosen.Host, Peer: c.chosen.Peer,
		Age: now.Sub(c.started), Idle: max(0, now.Sub(cc.Time(c.active.Load()))),
	}
	client, server := c.client.conn, c.server.conn
	if !out.Relayed() {
		c.mu.Unlock()
		return
	}
	out.Rule, out.ServerName = c.verdict.Rule, c.decidedOn.ServerName
	out.Down.Control, out.Up.Control = down, up
	c.down.fillInfo(&out.Down)
	c.up.fillInfo(&out.Up)
	c.mu.Unlock()
	out.Setup = c.opened.Sub(c.started)
	out.Target = addrPort(server.RemoteAddr())
	out.Client, out.Server = client.Info(), server.Info()
}

// fillMoved is the part of fill that costs nothing: the state, and the bytes of each direction.
func (c *connection) fillMoved(out *FlowInfo) {
	c.mu.Lock()
	defer c.mu.Unlock()
	*out = FlowInfo{ID: c.id, State: c.state}
	if out.Relayed() {
		c.down.fillMoved(&out.Down)
		c.up.fillMoved(&out.Up)
	}
}

func (d *direction) fillMoved(out *DirectionInfo) {
	out.Algorithm = d.terms.Algorithm
	out.Read, out.Written, out.Spliced = cc.Bytes(d.read.Load()), cc.Bytes(d.written.Load()), cc.Bytes(d.spliced.Load())
	out.Finished, out.Managed = d.finished.Load(), d.flow != nil
}

// fillInfo is for those who hold the connection's mu: what is counted under an
// algorithm does not change hands in between.
func (d *direction) fillInfo(out *DirectionInfo) {
	d.fillMoved(out)
	if d.flow != nil {
		out.Flow = d.flow.Snapshot()
	} else {
		out.Flow.Group = d.terms.Group
	}
	out.Receive = d.holdingInfo()
	out.Control = append(append(out.Control, d.earlier...), d.countersSince(out.Algorithm, &out.Flow))
}

// countersSince is what has happened up to s under the present algorithm.
func (d *direction) countersSince(algorithm string, s *flow.Snapshot) AlgorithmCounters {
	now := AlgorithmCounters{Algorithm: algorithm, LossEvents: uint64(s.LossEvents), Limited: s.Limited}
	for _, e := range d.earlier {
		now.LossEvents -= e.LossEvents
		for by, t := range e.Limited {
			now.Limited[by] -= t
		}
	}
	return now
}

// noteAlgorithmEnd notes what has happened up to s under the algorithm that is left now, once
// for all the times it was in force: there may be no end of reloads.
func (d *direction) noteAlgorithmEnd(algorithm string, s *flow.Snapshot) {
	now := d.countersSince(algorithm, s)
	i := slices.IndexFunc(d.earlier, func(e AlgorithmCounters) bool { return e.Algorithm == algorithm })
	if i < 0 {
		d.earlier = append(d.earlier, now)
		return
	}
	d.earlier[i].addCounters(now)
}
