package telemetry

import (
	"iter"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/telemetry/page"
)

// live is what the open flows hold at the moment. Windows, rates and queues
// add up over flows; what does not add up, such as round-trip times, is
// sampled into histograms instead.
type live struct {
	control  map[controlKey]*control
	legs     map[string]*legs    // by leg: client, server
	buffered map[string]cc.Bytes // by direction: down, up
}

// controlKey is what windows of ours are summed by.
type controlKey struct{ algorithm, direction string }

// control sums up the windows of one key.
type control struct {
	flows            int
	window, inflight float64 // bytes
	pacing           float64 // bytes per second
}

// legs sums up what TCP itself holds on the legs of one side.
type legs struct{ cwnd, unsent cc.Bytes }

// newLive has both legs and both directions from the start, so that their series are there while no flow is.
func newLive() live {
	return live{
		control:  map[controlKey]*control{},
		legs:     map[string]*legs{"client": {}, "server": {}},
		buffered: map[string]cc.Bytes{"down": 0, "up": 0},
	}
}

// countFlow counts a connection in. One that is not relayed yet has no legs to sum.
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

// controlledWindows yields the windows of ours that a connection has. A direction of down or up is
// towards the client or the server; one of from_client or from_server is what they are let
// send in.
func controlledWindows(f *proxy.FlowInfo) iter.Seq2[controlKey, *flow.Snapshot] {
	return func(yield func(controlKey, *flow.Snapshot) bool) {
		side := func(d *proxy.DirectionInfo, name, from string) bool {
			return (!d.Managed || yield(controlKey{d.Algorithm, name}, &d.Flow)) &&
				(!d.Receive.Held || yield(controlKey{d.Receive.Flow.Algorithm, from}, &d.Receive.Flow))
		}
		_ = side(&f.Down, "down", "from_server") && side(&f.Up, "up", "from_client")
	}
}

// addSnapshot adds a window of ours to those of its key.
func (l live) addSnapshot(k controlKey, s *flow.Snapshot) {
	c := l.control[k]
	if c == nil {
		c = &control{}
		l.control[k] = c
	}
	c.flows++
	c.inflight += float64(s.Inflight)
	// Members of a group share one window and one rate. Each adds an equal part, active or not: together they add all.
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

// groups are what groups of flows hold at the moment, by algorithm.
type groups map[string]*groupSums

// groupSums sums up the groups of one algorithm.
type groupSums struct {
	used, lingering, hinted, capped int     // groups
	high, low                       int     // groups with hints that are doubted
	active, idle                    int     // members
	borrowed, unused                float64 // bytes
}

// sumGroups sums up all groups. Windows without a bound are left out of the sums of bytes, which they would drown.
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
