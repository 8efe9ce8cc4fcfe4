package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

const countFlowsTime = 100 * time.Millisecond // between two counts of busy flows

// holdingEdge holds the packets of servers' own transports in front of the bottleneck until the window of their host
// has room. One member of the host's group stands for all of them.
type holdingEdge struct {
	w       *world
	host    int
	member  *flow.EchoFlow
	queue   *flow.FairQueue[uint32, heldPacket]
	waking  alarm                 // a release
	counted cc.Time               // when busy flows were counted last
	looks   alarm                 // at echo requests
	ask     func(sequence uint16) // sends an echo request to the host
}

// heldPacket is a packet at the edge.
type heldPacket struct {
	flow    uint32
	size    cc.Bytes
	ecn     Codepoint
	marked  bool                          // CE, by the edge
	settled func(left cc.Time, v Verdict) // called with when it left the edge, as soon as its fate is certain
}

// holdingEdge returns the edge that holds the packets of the i-th flow.
func (w *world) holdingEdge(i int) *holdingEdge {
	cfg := w.scenario.Flows[i]
	key := cfg.Group + "\x00" + cfg.Hold
	if e := w.edges[key]; e != nil {
		return e
	}
	e := &holdingEdge{w: w, host: cfg.Host - 1}
	e.ask = e.askHost
	if w.ask != nil {
		e.ask = w.ask(e)
	}
	e.waking, e.looks = w.alarm(e.proceed), w.alarm(e.look)
	terms := cfg.terms()
	terms.Algorithm, terms.Params = cfg.Hold, cfg.HoldParams
	source := flow.ByEcho
	if cfg.NoEcho {
		source = flow.ByTransport
	}
	member, err := w.manager.OpenEcho(w.now, terms, source, func() { e.waking.planBy(w.now) })
	if err != nil {
		w.err = err
		return nil
	}
	e.member = member
	e.queue = flow.NewFairQueue[uint32](flow.QueueConfig[heldPacket]{
		Window:  member,
		Dropped: func(p heldPacket, _ flow.Drop) { p.settled(w.now, Verdict{Dropped: DropQueue}) },
		ECN:     func(p heldPacket) flow.ECN { return flow.ECN(p.ecn) },
		Mark:    func(p *heldPacket) { p.marked = true },
	})
	w.edges[key] = e
	return e
}

// pass sends a packet, or makes it wait.
func (e *holdingEdge) pass(p heldPacket) {
	if e.queue.Pass(e.w.now, p.flow, p.size) {
		e.send(p)
	} else {
		e.queue.Push(e.w.now, p.flow, p.size, p)
		e.release()
		e.queue.Trim(flow.QueuedPackets, flow.QueuedBytes)
	}
	e.countFlows()
	e.planEcho()
}

// proceed sends what there is room for.
func (e *holdingEdge) proceed() {
	e.release()
	e.planEcho()
}

// release sends what waits, as far as there is room.
func (e *holdingEdge) release() {
	for p, ok := e.queue.Pop(e.w.now); ok; p, ok = e.queue.Pop(e.w.now) {
		e.send(p)
	}
	if packets, _ := e.queue.Len(); packets == 0 {
		e.member.StopWanting(e.w.now)
	}
}

func (e *holdingEdge) send(p heldPacket) {
	left := e.w.now
	e.w.carry(false, e.host, p.size, p.flow, p.ecn, func(v Verdict) {
		v.Marked = v.Marked || p.marked
		p.settled(left, v)
	})
	if e.member.NextEcho() <= left { // within a burst, too
		e.ask(e.member.SendEcho(e.w.now))
	}
}

// planEcho plans the next look at echo requests.
func (e *holdingEdge) planEcho() {
	e.looks.planBy(max(e.w.now, min(e.member.NextEcho(), e.member.NextTimeout())))
}

// look does what is due by the clock.
func (e *holdingEdge) look() {
	e.member.Expire(e.w.now)
	if e.member.NextEcho() <= e.w.now {
		e.ask(e.member.SendEcho(e.w.now))
	}
	e.countFlows()
	e.release()
	e.planEcho()
}

// countFlows gives the member as much weight as it stands for busy flows.
func (e *holdingEdge) countFlows() {
	if e.w.now.Sub(e.counted) < countFlowsTime {
		return
	}
	e.counted = e.w.now
	if err := e.member.SetFlows(e.w.now, e.queue.BusyFlows(e.w.now)); err != nil {
		e.w.err = err
	}
}

// echoFlow is the number of the flow that echo requests belong to, apart from all others' in a queue by flow.
const echoFlow = 1 << 31

// askHost sends an echo request to the host, which answers at once.
func (e *holdingEdge) askHost(sequence uint16) {
	e.carryEcho(false, func() {
		e.carryEcho(true, func() { e.receiveEcho(sequence) })
	})
}

// carryEcho has a request or an answer take its way, and calls arrived if it does.
func (e *holdingEdge) carryEcho(up bool, arrived func()) {
	e.w.carry(up, e.host, flow.EchoBytes, echoFlow, NotECT, func(v Verdict) {
		if v.Dropped == DropNone {
			e.w.at(v.Arrives, arrived)
		}
	})
}

// receiveEcho takes in an answer.
func (e *holdingEdge) receiveEcho(sequence uint16) {
	e.member.ReceiveEcho(e.w.now, sequence)
	e.proceed()
}
