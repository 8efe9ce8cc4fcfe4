package hold

import (
	"fmt"
	"net/netip"
	"reflect"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

const (
	maxLanes       = 16                     // of one client: unlike terms
	probeEvery     = time.Second            // a client that is not known to answer is asked again
	probeLater     = 30 * time.Second       // one that has not answered maxProbes is
	maxProbes      = 3                      // requests without an answer, and the client does not answer
	countFlowsTime = 100 * time.Millisecond // between two counts of busy flows
)

// client is an address with held packets.
type client struct {
	holder  *Holder
	address netip.Addr
	echoTo  netip.Addr // answers echo requests; not valid: no host does
	lanes   []*lane
	used    cc.Time // when a packet came last
	closed  bool
	flows   int // that are known and wait in lanes
	// isCrowded reports whether there were too many flows: further ones share a queue.
	isCrowded bool
	// isListed reports whether the client stands in Holder.active.
	isListed bool
}

// newClient returns a client without lanes.
func (h *Holder) newClient(now cc.Time, address netip.Addr) *client {
	c := &client{holder: h, address: address, echoTo: address, used: now}
	if h.cfg.EchoTo != nil {
		c.echoTo = h.cfg.EchoTo(address)
	}
	return c
}

// laneFor returns the lane of flows with the same decision.
func (c *client) laneFor(now cc.Time, d Decision) (*lane, error) {
	for _, l := range c.lanes {
		if l.acknowledged == d.Acknowledged && reflect.DeepEqual(l.terms, d.Terms) {
			return l, nil
		}
	}
	if len(c.lanes) == maxLanes {
		return nil, fmt.Errorf("hold: rules give the flows of one client more than %d unlike terms", maxLanes)
	}
	if len(c.holder.lanes) >= maxLanesOfAll {
		return nil, fmt.Errorf("hold: rules give the flows of all clients more than %d unlike terms", maxLanesOfAll)
	}
	l := &lane{holder: c.holder, client: c, terms: d.Terms, acknowledged: d.Acknowledged}
	window, err := c.holder.cfg.Flows.OpenEcho(now, d.Terms, flow.ByTransport, l.noteRoom)
	if err != nil {
		return nil, fmt.Errorf("hold: window of a client: %w", err)
	}
	l.window = window
	l.fair = flow.NewFairQueue[FlowKey](flow.QueueConfig[heldPacket]{
		Window: window, Dropped: l.discard,
		ECN:  func(p heldPacket) flow.ECN { return p.ecn },
		Mark: func(p *heldPacket) { p.marked = true },
	})
	l.id = c.holder.assignID(l)
	c.lanes = append(c.lanes, l)
	return l, nil
}

// isActive reports whether the client has packets, or had some a moment ago.
func (c *client) isActive(now cc.Time) bool { return now.Sub(c.used) < activeTime || !c.isEmpty() }

// isEmpty reports whether no packet waits.
func (c *client) isEmpty() bool {
	for _, l := range c.lanes {
		if packets, _ := l.fair.Len(); packets > 0 {
			return false
		}
	}
	return true
}

// close gives the client's part of windows back. No packet may wait.
func (c *client) close(now cc.Time) {
	c.closed = true
	for _, l := range c.lanes {
		l.window.Close(now)
		delete(c.holder.lanes, l.id)
	}
}

// floodTime is for how long packets count as a flood once their queue was full: their senders heed no signals.
const floodTime = 2 * time.Second

// heldPacket is a packet that waits in the kernel.
type heldPacket struct {
	id     uint32
	size   cc.Bytes
	ecn    flow.ECN
	marked bool   // it goes with CE
	mark   uint32 // the kernel's
}

// lane holds the packets of one client that have the same terms, in a fair queue in front of a window.
//
// At first the client's TCP acknowledges the packets, and they pass where no TCP wants the window. Once the client has
// answered an echo request, its answers do.
type lane struct {
	holder *Holder
	client *client
	terms  flow.Terms
	// acknowledged is Decision.Acknowledged.
	acknowledged bool
	fair         *flow.FairQueue[FlowKey, heldPacket]
	window       *flow.EchoFlow
	id           uint16 // of its echo requests

	probes    int     // requests without an answer, while the client is not known to answer
	nextProbe cc.Time // when to ask again
	busy      int     // flows, as counted last

	overflowed cc.Time // when the queue was full last; 0: never

	isWoken   bool // it stands in Holder.woken; guarded by Holder.mu
	releasing bool // discarded packets go instead of being dropped
}

// handlePacket lets a packet go if its window has room, and makes it wait otherwise.
func (l *lane) handlePacket(now cc.Time, key FlowKey, p heldPacket) {
	if l.fair.Pass(now, key, p.size) {
		l.accept(now, p)
		return
	}
	l.holder.stats.held.Add(1)
	packets, bytes := l.fair.Len()
	defer l.countWaiting(packets, bytes)
	l.fair.Push(now, key, p.size, p)
	l.releaseFitting(now)
	others := l.holder.waitingBytes - bytes
	l.fair.Trim(maxLanePackets, min(maxLaneBytes, maxWaitingBytes-others))
}

// release lets the packets go that have room by now.
func (l *lane) release(now cc.Time) {
	packets, bytes := l.fair.Len()
	defer l.countWaiting(packets, bytes)
	l.releaseFitting(now)
}

func (l *lane) releaseFitting(now cc.Time) {
	for p, ok := l.fair.Pop(now); ok; p, ok = l.fair.Pop(now) {
		l.accept(now, p)
	}
	if packets, _ := l.fair.Len(); packets == 0 {
		l.window.StopWanting(now)
	}
}

// empty lets all waiting packets go, or drops them. Each flow's keep their order.
func (l *lane) empty(release bool) {
	packets, bytes := l.fair.Len()
	defer l.countWaiting(packets, bytes)
	l.releasing = release
	l.fair.Trim(0, 0)
	l.releasing = false
}

// accept lets a packet go, and sends an echo request behind it when one is due.
func (l *lane) accept(now cc.Time, p heldPacket) {
	l.holder.accept(p)
	if l.window.NextEcho() <= now {
		l.sendEcho(now)
	}
}

// sendEcho sends an echo request behind what has left.
func (l *lane) sendEcho(now cc.Time) {
	l.holder.sendEcho(l.client.echoTo, l.id, l.window.SendEcho(now))
}

// discard drops a packet that the fair queue gives up.
func (l *lane) discard(p heldPacket, why flow.Drop) {
	switch {
	case l.releasing:
		l.holder.accept(p)
		return
	case why == flow.DroppedOverflow:
		l.overflowed = l.holder.lastPacket
		l.holder.stats.overflow.Add(1)
	default:
		l.holder.stats.late.Add(1)
	}
	l.holder.queue.Drop(p.id)
}

// receiveEcho takes in the answer to an echo request.
func (l *lane) receiveEcho(now cc.Time, sequence uint16) {
	if l.isAnswered() {
		l.window.ReceiveEcho(now, sequence)
	} else {
		l.window.AcknowledgeBy(now, flow.ByEcho)
		l.probes = 0
	}
	l.release(now)
}

// isAnswered reports whether the client answers echo requests, as far as is known.
func (l *lane) isAnswered() bool { return l.window.Source() == flow.ByEcho }

// tend does what time brings: echo requests behind the last packets, and answers that do not come. It is
// called every few milliseconds while the client has packets.
func (l *lane) tend(now cc.Time) {
	if !l.isAnswered() {
		l.probe(now)
		return
	}
	if l.window.NextTimeout() <= now {
		l.window.Expire(now)
		l.release(now)
	}
	if l.window.Trouble() != flow.NoTrouble {
		l.fallBack(now)
		return
	}
	if l.window.NextEcho() <= now {
		l.sendEcho(now)
	}
}

// countFlows gives the lane as much weight as it has busy flows. A flood weighs as one flow, from however many ports it
// comes.
func (l *lane) countFlows(now cc.Time) {
	busy := l.fair.BusyFlows(now)
	if l.overflowed != 0 && now.Sub(l.overflowed) < floodTime {
		busy = min(busy, 1)
	}
	if busy == l.busy {
		return
	}
	l.busy = busy
	if err := l.window.SetFlows(now, busy); err != nil {
		l.holder.cfg.Log.Error("hold: weight of a client's packets", "client", l.client.address, "err", err)
	}
}

// rate returns what the window usually lets go; 0: not known.
func (l *lane) rate() cc.Rate {
	if l.terms.MaxRate > 0 {
		return min(l.window.Usual(), l.terms.MaxRate)
	}
	return l.window.Usual()
}

// probe asks a client that is not known to answer.
func (l *lane) probe(now cc.Time) {
	if !l.acknowledged || !l.client.echoTo.IsValid() || now < l.nextProbe {
		return
	}
	l.probes++
	l.nextProbe = now.Add(probeEvery)
	if l.probes >= maxProbes {
		l.nextProbe = now.Add(probeLater)
	}
	l.holder.sendEcho(l.client.echoTo, l.id, 0)
}

// fallBack makes the client's TCP acknowledge the packets: the client answers no more.
func (l *lane) fallBack(now cc.Time) {
	l.window.AcknowledgeBy(now, flow.ByTransport)
	l.probes, l.nextProbe = maxProbes, now.Add(probeLater)
	l.release(now)
}

// state returns what can be told of the lane.
func (l *lane) state() ClientState {
	snapshot := l.window.Snapshot()
	s := ClientState{
		Address: l.client.address, Group: l.terms.Group, BusyFlows: l.busy, AcknowledgedBy: "share", Flow: &snapshot,
	}
	s.Waiting, s.WaitingBytes = l.fair.Len()
	if l.isAnswered() {
		s.AcknowledgedBy = "echo"
	}
	return s
}

// noteRoom makes ServeQueue look at the lane. The window calls it, under its locks, when there may be room.
func (l *lane) noteRoom() {
	h := l.holder
	h.mu.Lock()
	defer h.mu.Unlock()
	if l.isWoken {
		return
	}
	l.isWoken = true
	h.woken = append(h.woken, l)
	if h.wake != nil {
		h.wake()
	}
}

// countWaiting adds to the Holder's sums what has changed since the lane had these packets and bytes.
func (l *lane) countWaiting(packets int, bytes cc.Bytes) {
	nowPackets, nowBytes := l.fair.Len()
	l.holder.waitingBytes += nowBytes - bytes
	l.holder.stats.waiting.Add(int64(nowPackets - packets))
	l.holder.stats.waitingBytes.Add(int64(nowBytes - bytes))
}
