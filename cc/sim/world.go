package sim

import (
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

	down, up *Link
	hints    hints
	manager  flow.Manager
	armed    cc.Time // when the manager's next tick is planned
	senders  []*sender
	blasters []*blaster
	err      error
}

// The links draw from streams of their own unless they have seeds.
const (
	downSeed = 0x646f776e
	upSeed   = 0x7570
)

func newWorld(s Scenario) *world {
	w := &world{scenario: s, origin: cc.Time(time.Second), armed: cc.Never}
	w.now = w.origin
	w.end = w.origin.Add(s.Duration)
	down, up := s.Down, s.Up
	if down.Seed == 0 {
		down.Seed = s.Seed ^ downSeed
	}
	if up.Seed == 0 {
		up.Seed = s.Seed ^ upSeed
	}
	w.down, w.up = NewLink(down, w.origin), NewLink(up, w.origin)
	w.hints.w = w
	w.manager.Seed = s.Seed
	w.manager.Arm = w.arm
	return w
}

// at plans an event. Those for one moment happen in the order they were planned.
func (w *world) at(at cc.Time, do func()) {
	w.seq++
	heap.Push(&w.events, event{at: max(at, w.now), seq: w.seq, do: do})
}

// run lets everything happen that is due before the end.
func (w *world) run() {
	for len(w.events) > 0 && w.events[0].at < w.end {
		e := heap.Pop(&w.events).(event)
		w.now = e.at
		e.do()
	}
	w.now = w.end
}

// arm plans the manager's tick. It may be called from within the manager.
func (w *world) arm(at cc.Time) {
	if at >= w.armed {
		return
	}
	w.armed = at
	w.at(at, func() {
		if w.armed != at {
			return // an earlier one took its place
		}
		w.armed = cc.Never
		if next := w.manager.Tick(w.now); next != cc.Never {
			w.arm(next)
		}
	})
}

// show tells whoever watches of a packet that is sent now.
func (w *world) show(up bool, size cc.Bytes, v Verdict) {
	if w.scenario.Watch == nil {
		return
	}
	p := Packet{Up: up, Size: size, At: w.now.Sub(w.origin), Dropped: v.Dropped}
	if v.Dropped == DropNone {
		p.Departs, p.Arrives = v.Departs.Sub(w.origin), v.Arrives.Sub(w.origin)
	}
	w.scenario.Watch(p)
}

// sample records the state of every flow, now and then.
func (w *world) sample(every time.Duration) {
	for _, s := range w.senders {
		s.record()
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
