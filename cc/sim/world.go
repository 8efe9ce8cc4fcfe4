package sim

import (
	"cmp"
	"container/heap"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// world is virtual time and all that happens in it, one event after the other.
type world struct {
	scenario Scenario
	origin   cc.Time
	end      cc.Time
	now      cc.Time
	events   eventHeap
	seq      uint64

	down      Hop
	up        *Link
	held      []Ring[holding] // that wait on the way down, by lane
	pulsing   bool            // a call of its Advance is planned
	hints     hints
	manager   flow.Manager
	ticks     alarm // of the manager
	endpoints []endpoint
	edges     map[string]*holdingEdge
	ask       func(*holdingEdge) func(sequence uint16) // how edges ask their hosts; nil: by askHost
	err       error
}

// endpoint is the sending end of a flow.
type endpoint interface {
	open()
	close()
	underWay() bool // it is open
	record()        // samples its state
	measured() *sending
	result() FlowResult
}

// holding is a packet on its way.
type holding struct {
	up      bool
	at      cc.Time // it was sent
	host    int
	size    cc.Bytes
	ecn     Codepoint
	settled func(Verdict)
}

// The links draw from streams of their own unless they have seeds.
const (
	downSeed = 0x646f776e
	upSeed   = 0x7570
)

func newWorld(s Scenario) *world {
	w := &world{scenario: s.complete(), origin: cc.Time(time.Second)}
	w.edges = map[string]*holdingEdge{}
	w.now = w.origin
	w.end = w.origin.Add(s.Duration)
	down, up, cell := s.Down, s.Up, s.Cell
	down.Seed, up.Seed = cmp.Or(down.Seed, s.Seed^downSeed), cmp.Or(up.Seed, s.Seed^upSeed)
	if cell != nil {
		seeded := *cell
		seeded.Seed = cmp.Or(cell.Seed, down.Seed)
		cell = &seeded
	}
	w.down, w.up = NewHop(down, cell, w.origin), NewLink(up, w.origin)
	lanes := MaxLanes
	for _, f := range w.scenario.Flows {
		lanes = max(lanes, f.Host)
	}
	w.held = make([]Ring[holding], lanes)
	w.hints.w = w
	w.manager.Seed, w.manager.Lookup = s.Seed, s.Lookup
	w.ticks = w.alarm(func() { w.ticks.planBy(w.manager.Tick(0, w.now)) })
	w.manager.Arm = func(_ int, at cc.Time) { w.ticks.planBy(at) }
	return w
}

// at plans an event. Those for one moment happen in the order they were planned.
func (w *world) at(at cc.Time, do func()) {
	w.seq++
	heap.Push(&w.events, event{at: max(at, w.now), seq: w.seq, do: do})
}

// run lets everything happen that is due before the end, or an error.
func (w *world) run() {
	for w.err == nil && len(w.events) > 0 && w.events[0].at < w.end {
		e := heap.Pop(&w.events).(event)
		w.now = e.at
		e.do()
	}
	w.now = w.end
}

// carry sends a packet of size bytes of a flow one way, to or from a host; settled hears what becomes of it, as soon
// as that is certain.
func (w *world) carry(up bool, host int, size cc.Bytes, flow uint32, ecn Codepoint, settled func(Verdict)) {
	p := holding{up, w.now, host, size, ecn, settled}
	if up {
		w.settle(p, w.up.Send(w.now, size))
		return
	}
	lane, v, waits := w.down.Enqueue(w.now, host, size, flow, ecn)
	w.hints.note(host, size, v)
	if !waits {
		w.settle(p, v)
		return
	}
	w.held[lane].Push(p)
	w.pulse()
}

// settle tells all who want to know what becomes of a packet.
func (w *world) settle(p holding, v Verdict) {
	v.Marked = v.Marked && p.ecn != NotECT
	if w.scenario.Watch != nil {
		seen := Packet{Up: p.up, Host: p.host, Size: p.size, At: p.at.Sub(w.origin), Dropped: v.Dropped}
		if v.Dropped == DropNone {
			seen.Departs, seen.Arrives = v.Departs.Sub(w.origin), v.Arrives.Sub(w.origin)
		}
		w.scenario.Watch(seen)
	}
	p.settled(v)
}

// pulse plans when to ask the way down next, if anything waits there.
func (w *world) pulse() {
	next := w.down.Next()
	if w.pulsing || next == cc.Never {
		return
	}
	w.pulsing = true
	w.at(next, func() {
		w.pulsing = false
		for _, d := range w.down.Advance(w.now) {
			p := w.held[d.Lane].Pop()
			if d.Dropped != DropNone {
				w.hints.gone(p.host, p.size)
			}
			w.settle(p, d.Verdict)
		}
		w.pulse()
	})
}

// offered is what one way's bottleneck could have carried; a cell: to that host alone.
func (w *world) offered(up bool, host int, from, to cc.Time) cc.Bytes {
	if up {
		return w.up.Offered(host, from, to)
	}
	return w.down.Offered(host, from, to)
}

// sample records the state of every flow, now and then.
func (w *world) sample(every time.Duration) {
	for _, e := range w.endpoints {
		e.record()
	}
	w.at(w.now.Add(every), func() { w.sample(every) })
}

type event struct {
	at  cc.Time
	seq uint64
	do  func()
}

type eventHeap []event

func (h eventHeap) Len() int { return len(h) }

func (h eventHeap) Less(i, j int) bool {
	if h[i].at != h[j].at {
		return h[i].at < h[j].at
	}
	return h[i].seq < h[j].seq
}

func (h eventHeap) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *eventHeap) Push(x any)   { *h = append(*h, x.(event)) }

func (h *eventHeap) Pop() any {
	last := len(*h) - 1
	e := (*h)[last]
	(*h)[last] = event{}
	*h = (*h)[:last]
	return e
}
