package flow

import (
	"container/heap"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// tickInterval is how often at most a group divides its window, and how long a timer
// that came late may be late again: datapaths tick about as often.
const tickInterval = time.Millisecond

// leastTick keeps an algorithm that asks for ticks in the past from having
// nothing else happen.
const leastTick = 100 * time.Microsecond

// ticker is called when its timer has come.
type ticker interface {
	tick(now cc.Time)
	when() *timer
}

// timer says when a ticker will be called. The mutex of the timers that it is in guards it.
type timer struct {
	at    cc.Time
	place int // in the heap, counted from 1; 0: it is not there
}

func (t *timer) when() *timer { return t }

// timers calls tickers in time. Its mutex is taken last.
type timers struct {
	arm func(at cc.Time) // told when the earliest timer changes; nil: nobody to tell
	mu  sync.Mutex
	due dueHeap
}

// schedule has g called at t, unless it will be called before.
func (t *timers) schedule(g ticker, at cc.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	due := g.when()
	if due.place > 0 && due.at <= at {
		return
	}
	due.at = at
	if due.place == 0 {
		heap.Push(&t.due, g)
	} else {
		heap.Fix(&t.due, due.place-1)
	}
	if t.arm != nil && due.place == 1 {
		t.arm(at)
	}
}

// cancel has g not called any more.
func (t *timers) cancel(g ticker) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if place := g.when().place; place > 0 {
		heap.Remove(&t.due, place-1)
	}
}

// run calls the tickers that are due at now, and returns when the next one is;
// cc.Never: there is none.
func (t *timers) run(now cc.Time) cc.Time {
	for {
		t.mu.Lock()
		if len(t.due) == 0 || t.due[0].when().at > now {
			next := cc.Never
			if len(t.due) > 0 {
				next = t.due[0].when().at
			}
			t.mu.Unlock()
			return next
		}
		g := heap.Pop(&t.due).(ticker)
		t.mu.Unlock()
		g.tick(now)
	}
}

// dueHeap orders tickers by when they want to be called. Each is in it at most once.
type dueHeap []ticker

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].when().at < h[j].when().at }
func (h dueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].when().place, h[j].when().place = i+1, j+1
}

func (h *dueHeap) Push(x any) {
	g := x.(ticker)
	*h = append(*h, g)
	g.when().place = len(*h)
}

func (h *dueHeap) Pop() any {
	last := len(*h) - 1
	g := (*h)[last]
	g.when().place = 0
	(*h)[last] = nil
	*h = (*h)[:last]
	return g
}
