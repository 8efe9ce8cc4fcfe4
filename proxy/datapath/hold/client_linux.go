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
	probeMuchLater = 10 * time.Minute       // until answers that do not acknowledge are tried again
	countFlowsTime = 100 * time.Millisecond // between two counts of busy flows
)

// client is an address with held packets.
type client struct {
	holder    *Holder
	address   netip.Addr
	echoTo    netip.Addr // answers echo requests; not valid: no host does
	lanes     []*lane
	used      cc.Time // when a packet came last
	closed    bool
	neighbour Neighbour // as found last; its address is not valid: none was
	numbering flow.Numbering[neighbourRequest]
	flows     int // that are known and wait in lanes
	// isCrowded reports whether there were too many flows: further ones share a queue.
	isCrowded bool
	// isPublished reports whether lanes have published their states since the client became idle.
	isPublished bool
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

// neighbourRequest is a request that a client may answer as a neighbour.
type neighbourRequest struct {
	lane     *lane
	sequence uint16 // as in an echo request
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
	window, err := c.holder.cfg.Flows.OpenEcho(now, d.Terms, flow.ByTransport, l.wakeForRoom)
	if err != nil {
		return nil, fmt.Errorf("hold: window of a client: %w", err)
	}
	l.window = window
	l.fair = flow.NewFairQueue[FlowKey](flow.QueueConfig[heldPacket]{
		Window: window, Dropped: l.dropPacket,
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

// closeLanes gives the client's part of windows back. No packet may wait.
func (c *client) closeLanes(now cc.Time) {
	c.closed = true
	for _, l := range c.lanes {
		l.window.Close(now)
		delete(c.holder.lanes, l.id)
	}
}

// floodTime is for how long packets count as a flood after their queue was full, because their senders heed no signals.
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
// At first the client's TCP connections acknowledge the packets, which pass freely while none of these wants the
// window. Once the client has answered a request, its answers acknowledge the packets.
type lane struct {
	holder *Holder
	client *client
	terms  flow.Terms
	// acknowledged is Decision.Acknowledged.
	acknowledged bool
	fair         *flow.FairQueue[FlowKey, heldPacket]
	window       *flow.EchoFlow
	id           uint16 // of its echo requests

	byEcho, byNeighbour requestKind
	answering           *requestKind // the kind that the client answers; nil: it is not known to answer any

	probing flow.Probing // while the client is not known to answer
	busy    int          // flows, as counted last

	overflowed cc.Time // when the queue was last full; 0: never

	published ClientState // as of Holder.publishStates

	isWoken   bool // it stands in Holder.woken; guarded by Holder.mu
	releasing bool // dropPacket lets packets go
}

// requestKind is one of the two kinds of requests that a client may answer: echo requests, and those to a neighbour.
type requestKind struct {
	trouble     flow.Trouble // why it was given up last
	barredUntil cc.Time      // until then its answers do not count
}

// handlePacket lets a packet go if its window has room, and makes it wait otherwise.
func (l *lane) handlePacket(now cc.Time, key FlowKey, p heldPacket) {
	if l.fair.Pass(now, key, p.size) {
		l.acceptPacket(now, p)
		return
	}
	l.holder.stats.held.Add(1)
	packets, bytes := l.fair.Len()
	defer l.countWaiting(packets, bytes)
	l.fair.Push(now, key, p.size, p)
	l.popFitting(now)
	others := l.holder.waitingBytes - bytes
	l.fair.Trim(maxLanePackets, min(maxLaneBytes, maxWaitingBytes-others))
}

// releaseFitting lets the packets go that have room by now.
func (l *lane) releaseFitting(now cc.Time) {
	packets, bytes := l.fair.Len()
	defer l.countWaiting(packets, bytes)
	l.popFitting(now)
}

// popFitting lets the packets go that have room by now. The caller calls countWaiting.
func (l *lane) popFitting(now cc.Time) {
	for p, ok := l.fair.Pop(now); ok; p, ok = l.fair.Pop(now) {
		l.acceptPacket(now, p)
	}
	if packets, _ := l.fair.Len(); packets == 0 {
		l.window.StopWanting(now)
	}
}

// clearQueue lets all waiting packets go, or drops them. Packets of one flow keep their order.
func (l *lane) clearQueue(release bool) {
	packets, bytes := l.fair.Len()
	defer l.countWaiting(packets, bytes)
	l.releasing = release
	l.fair.Trim(0, 0)
	l.releasing = false
}

// acceptPacket lets a packet go, and sends an echo request behind it when one is due.
func (l *lane) acceptPacket(now cc.Time, p heldPacket) {
	l.holder.acceptPacket(p)
	if l.window.NextEcho() <= now {
		l.sendEcho(now)
	}
}

// sendEcho sends a request behind what has left.
func (l *lane) sendEcho(now cc.Time) { l.askClient(now, l.answering, l.window.SendEcho(now)) }

// askClient sends a request of a kind with a sequence number.
func (l *lane) askClient(now cc.Time, by *requestKind, sequence uint16) {
	c, echoes := l.client, l.holder.echoes
	l.holder.sendRequest(func() {
		if by == &l.byEcho {
			echoes.Send(c.echoTo, l.id, sequence)
			return
		}
		echoes.AskNeighbour(&c.neighbour, c.numbering.Ask(now, neighbourRequest{l, sequence}))
	})
}

// dropPacket drops a packet that the fair queue has given up.
func (l *lane) dropPacket(p heldPacket, why flow.Drop) {
	switch {
	case l.releasing:
		l.holder.acceptPacket(p)
		return
	case why == flow.DroppedOverflow:
		l.overflowed = l.holder.lastPacket
		l.holder.stats.overflow.Add(1)
	default:
		l.holder.stats.late.Add(1)
	}
	l.holder.queue.Drop(p.id)
}

// receiveAnswer takes in the answer to a request. Answers to echo requests take the place of a neighbour's.
func (l *lane) receiveAnswer(now cc.Time, by *requestKind, sequence uint16) {
	switch {
	case l.client.closed:
		return
	case l.answering == by:
		l.window.ReceiveEcho(now, sequence)
	case l.answering == nil || by == &l.byEcho:
		l.window.AcknowledgeBy(now, flow.ByEcho)
		l.answering, l.probing.Asked = by, 0
	}
	l.releaseFitting(now)
}

// checkTimers sends requests that are due, and gives up those that were not answered in time. It is called every
// checkEvery while the client has packets.
func (l *lane) checkTimers(now cc.Time) {
	if l.answering == nil {
		l.probeClient(now)
		return
	}
	if l.window.NextTimeout() <= now {
		l.window.Expire(now)
		l.releaseFitting(now)
	}
	if l.window.Trouble() != flow.NoTrouble {
		l.fallBackToTransport(now)
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

// usualRate returns the rate that the window usually allows; 0: not known.
func (l *lane) usualRate() cc.Rate {
	if l.terms.MaxRate > 0 {
		return min(l.window.UsualRate(), l.terms.MaxRate)
	}
	return l.window.UsualRate()
}

// probeClient asks a client that is not known to answer: by an echo request, and from the second time on also as a
// neighbour.
func (l *lane) probeClient(now cc.Time) {
	c := l.client
	if !l.acknowledged || !c.echoTo.IsValid() || !l.probing.Ask(now) {
		return
	}
	if now >= l.byEcho.barredUntil {
		l.askClient(now, &l.byEcho, 0)
	}
	if l.probing.Asked < 2 || c.echoTo != c.address || now < l.byNeighbour.barredUntil {
		return
	}
	if n, ok := l.holder.echoes.FindNeighbour(c.address); ok {
		c.neighbour = n
		l.askClient(now, &l.byNeighbour, 0)
	}
}

// fallBackToTransport gives up the kind of requests that the client answers. Its TCP acknowledges the packets until it
// answers another kind.
func (l *lane) fallBackToTransport(now cc.Time) {
	trouble, later := l.window.Trouble(), probeMuchLater
	if trouble == flow.Silent {
		later = flow.ProbeLater
	} else if l.answering.trouble != trouble {
		l.holder.cfg.Log.Info("hold: a client's answers do not acknowledge its packets",
			"client", l.client.address, "answers", l.answeringName(), "reason", trouble)
	}
	*l.answering = requestKind{trouble, now.Add(later)}
	l.answering = nil
	l.window.AcknowledgeBy(now, flow.ByTransport)
	l.probing = flow.Probing{Asked: 1, Next: now} // both kinds are tried at once; one of them is barred
	l.releaseFitting(now)
}

// answeringName names what acknowledges the packets.
func (l *lane) answeringName() string {
	switch l.answering {
	case &l.byEcho:
		return "echo"
	case &l.byNeighbour:
		return "neighbour"
	}
	if l.window.Snapshot().Members > 1 {
		return "share"
	}
	return "none"
}

// describeLane returns the lane's state.
func (l *lane) describeLane() ClientState {
	snapshot := l.window.Snapshot()
	s := ClientState{
		Address: l.client.address, Group: l.terms.Group, BusyFlows: l.busy, AcknowledgedBy: l.answeringName(),
		Flow: &snapshot,
	}
	if l.byEcho.trouble != flow.NoTrouble && l.answering != &l.byEcho {
		s.EchoTrouble = l.byEcho.trouble.String()
	}
	s.Waiting, s.WaitingBytes = l.fair.Len()
	return s
}

// wakeForRoom makes ServeQueue release the lane's packets. The window calls it, under its locks, when there may be
// room.
func (l *lane) wakeForRoom() {
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
