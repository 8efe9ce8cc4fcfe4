package flow

import (
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
	onTimer(now cc.Time)
	timerState() *timer
}

// timer is a ticker's place in the heap. The mutex of the timers that it is in guards it.
type timer struct {
	place int // counted from 1; 0: it is not there
}

func (t *timer) timerState() *timer { return t }

// timers calls tickers in time. Its mutex is taken last.
type timers struct {
	arm func(at cc.Time) // told when the earliest timer changes; nil: nobody to tell
	mu  sync.Mutex
	due dueHeap
}

// scheduleAt has g called at t, unless it will be called before.
func (t *timers) scheduleAt(g ticker, at cc.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	due := g.timerState()
	switch {
	case due.place == 0:
		t.due = append(t.due, entry{})
		t.due.siftUp(len(t.due)-1, entry{at, g, due})
	case t.due[due.place-1].at <= at:
		return
	default:
		t.due.siftUp(due.place-1, entry{at, g, due})
	}
	if t.arm != nil && due.place == 1 {
		t.arm(at)
	}
}

// cancelTimer has g not called any more.
func (t *timers) cancelTimer(g ticker) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if place := g.timerState().place; place > 0 {
		t.due.removeAt(place - 1)
	}
}

// runDue calls the tickers that are due at now, and returns when the next one is;
// cc.Never: there is none.
func (t *timers) runDue(now cc.Time) cc.Time {
	for {
		t.mu.Lock()
		if len(t.due) == 0 || t.due[0].at > now {
			next := cc.Never
			if len(t.due) > 0 {
				next = t.due[0].at
			}
			t.mu.Unlock()
			return next
		}
		g := t.due[0].ticker
		t.due.removeAt(0)
		t.mu.Unlock()
		g.onTimer(now)
	}
}

// dueHeap orders tickers by when they want to be called. Each is in it at most once. To compare two
// it reads nothing but the heap itself: with thousands of flows each of theirs is a cache miss.
type dueHeap []entry

type entry struct {
	at     cc.Time
	ticker ticker
	timer  *timer // the ticker's
}

func (h dueHeap) putAt(i int, e entry) {
	h[i] = e
	e.timer.place = i + 1
}

// siftUp puts e in the place i, or above it.
func (h dueHeap) siftUp(i int, e entry) {
	for i > 0 {
		parent := (i - 1) / 2
		if e.at >= h[parent].at {
			break
		}
		h.putAt(i, h[parent])
		i = parent
	}
	h.putAt(i, e)
}

// siftDown puts e in the place i, or below it, and returns where.
func (h dueHeap) siftDown(i int, e entry) int {
	for {
		child := 2*i + 1
		if child+1 < len(h) && h[child+1].at < h[child].at {
			child++
		}
		if child >= len(h) || h[child].at >= e.at {
			break
		}
		h.putAt(i, h[child])
		i = child
	}
	h.putAt(i, e)
	return i
}

func (h *dueHeap) removeAt(i int) {
	(*h)[i].timer.place = 0
	last := len(*h) - 1
	e := (*h)[last]
	(*h)[last] = entry{}
	*h = (*h)[:last]
	if i < last && h.siftDown(i, e) == i {
		h.siftUp(i, e)
	}
}
