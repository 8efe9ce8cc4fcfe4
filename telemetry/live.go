package telemetry

import (
	"iter"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/telemetry/page"
)

// live sums up what the open flows have at the moment: windows, rates and queues. What does not add up, such as
// round-trip times, goes into the histograms of the sampler.
type live struct {
	control  map[controlKey]*control
	legs     map[string]*legs    // by leg: client, server
	buffered map[string]cc.Bytes // by direction: down, up
}

// controlKey is what our windows are summed by.
type controlKey struct{ algorithm, direction string }

// control sums up the windows of one key.
type control struct {
	flows            int
	window, inflight float64 // bytes
	pacing           float64 // bytes per second
}

// legs sums up what TCP itself holds on the legs of one side.
type legs struct{ cwnd, unsent cc.Bytes }

// newLive returns sums with both legs and both directions, so that their series are there while there is no flow.
func newLive() live {
	return live{
		control:  map[controlKey]*control{},
		legs:     map[string]*legs{"client": {}, "server": {}},
		buffered: map[string]cc.Bytes{"down": 0, "up": 0},
	}
}

// countFlow adds a connection. One that is not relayed yet has no legs to sum.
func (l live) countFlow(f *proxy.FlowInfo) {
	if !f.Relayed() {
		return
	}
	l.buffered["down"] += max(0, f.Down.Read-f.Down.Written)
	l.buffered["up"] += max(0, f.Up.Read-f.Up.Written)
	for k, s := range controlledWindows(f) {
		l.addSnapshot(k, s)
	}
	l.addLeg("client", &f.Client)
	l.addLeg("server", &f.Server)
}

// controlledWindows yields our windows of a connection. In the directions down and up the proxy sends, to the client
// and to the server. In from_client and from_server they send, within the receive window that the proxy advertises.
func controlledWindows(f *proxy.FlowInfo) iter.Seq2[controlKey, *flow.Snapshot] {
	return func(yield func(controlKey, *flow.Snapshot) bool) {
		yieldBoth := func(d *proxy.DirectionInfo, sent, received string) bool {
			return (!d.Managed || yield(controlKey{d.Algorithm, sent}, &d.Flow)) &&
				(!d.Receive.Held || yield(controlKey{d.Receive.Flow.Algorithm, received}, &d.Receive.Flow))
		}
		_ = yieldBoth(&f.Down, "down", "from_server") && yieldBoth(&f.Up, "up", "from_client")
	}
}

// addSnapshot adds one of our windows to those of its key.
func (l live) addSnapshot(k controlKey, s *flow.Snapshot) {
	c := l.control[k]
	if c == nil {
		c = &control{}
		l.control[k] = c
	}
	c.flows++
	c.inflight += float64(s.Inflight)
	// Members of a group share one window and one rate. Each adds an equal part, so that together they add all of it.
	members := float64(max(1, s.Members))
	if s.Cwnd < cc.MaxCwnd {
		c.window += float64(s.Cwnd) / members
	}
	c.pacing += float64(s.PacingRate) / 8 / members
}

// addLeg adds a leg to those of its side.
func (l live) addLeg(name string, i *datapath.Info) {
	l.legs[name].cwnd += i.Cwnd
	l.legs[name].unsent += i.Unsent
}

// writeMetrics writes all sums.
func (l live) writeMetrics(out sink) {
	for k, c := range l.control {
		out.putSample(ccFlows, float64(c.flows), k.algorithm, k.direction)
		out.putSample(ccWindow, c.window, k.algorithm, k.direction)
		out.putSample(ccInflight, c.inflight, k.algorithm, k.direction)
		out.putSample(ccPacing, c.pacing, k.algorithm, k.direction)
	}
	for name, g := range l.legs {
		out.putSample(tcpCwnd, float64(g.cwnd), name)
		out.putSample(tcpUnsent, float64(g.unsent), name)
	}
	for name, n := range l.buffered {
		out.putSample(buffered, float64(n), name)
	}
}

// groups sums up what groups of flows have at the moment, by algorithm.
type groups map[string]*groupSums

// groupSums sums up the groups of one algorithm.
type groupSums struct {
	used, lingering, hinted, capped int     // groups
	high, low                       int     // groups with hints that are doubted
	active, idle                    int     // members
	borrowed, unused                float64 // bytes
}

// sumGroups sums up all groups. It leaves windows without a bound out of the sums of bytes, which would show nothing
// else.
func sumGroups(all []flow.Group, now cc.Time) groups {
	sums := groups{}
	for _, g := range all {
		s := sums[g.Algorithm]
		if s == nil {
			s = &groupSums{}
			sums[g.Algorithm] = s
		}
		if g.Members > 0 {
			s.used++
		} else {
			s.lingering++
		}
		s.active += g.Active
		s.idle += g.Members - g.Active
		if g.Cwnd < cc.MaxCwnd {
			s.borrowed += float64(g.Lent)
			s.unused += float64(g.Unused)
		}
		if g.Hint.Age(now) <= page.HintedWithin {
			s.hinted++
		}
		if g.Capped {
			s.capped++
		}
		switch g.HintDoubt {
		case flow.HintTooHigh:
			s.high++
		case flow.HintTooLow:
			s.low++
		}
	}
	return sums
}

// writeMetrics writes all sums.
func (sums groups) writeMetrics(out sink) {
	for algorithm, s := range sums {
		out.putSample(groupsOpen, float64(s.used), algorithm, "used")
		out.putSample(groupsOpen, float64(s.lingering), algorithm, "lingering")
		out.putSample(groupMembers, float64(s.active), algorithm, "active")
		out.putSample(groupMembers, float64(s.idle), algorithm, "idle")
		out.putSample(groupBorrowed, s.borrowed, algorithm)
		out.putSample(groupUnused, s.unused, algorithm)
		out.putSample(groupsHinted, float64(s.hinted), algorithm)
		out.putSample(groupsDoubting, float64(s.high), algorithm, string(flow.HintTooHigh))
		out.putSample(groupsDoubting, float64(s.low), algorithm, string(flow.HintTooLow))
		out.putSample(groupsCapped, float64(s.capped), algorithm)
	}
}
