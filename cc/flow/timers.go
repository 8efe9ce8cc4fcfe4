package flow

import (
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// tickInterval is the least time between two divisions of a window among many members.
// Datapaths call Manager.Tick about as often.
const tickInterval = time.Millisecond

// leastTick is the least delay until the next tick. It bounds the load of an algorithm that asks for
// ticks in the past.
const leastTick = 100 * time.Microsecond

// timer calls its owner once, at the time for which it was last scheduled.
type timer struct {
	owner timerOwner
	index int // in timers.due, counted from 1; 0: not scheduled. The mutex of timers guards it.
}

// timerOwner is a group, a flow that waits for its pacer, or a maximum rate.
type timerOwner interface {
	onTimer(now cc.Time) // runs without the mutex of timers
}

// timers calls the owners of one shard's timers when they are due. Its mutex is taken last.
type timers struct {
	arm func(at cc.Time) // called when the earliest timer changes, with mu held; nil: not called
	mu  sync.Mutex
	due dueHeap
}

// scheduleAt schedules t for at, unless it is due earlier.
func (s *timers) scheduleAt(t *timer, at cc.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case t.index == 0:
		s.due = append(s.due, entry{})
		s.due.siftUp(len(s.due)-1, entry{at, t})
	case s.due[t.index-1].at <= at:
		return
	default:
		s.due.siftUp(t.index-1, entry{at, t})
	}
	if s.arm != nil && t.index == 1 {
		s.arm(at)
	}
}

// cancelTimer unschedules t.
func (s *timers) cancelTimer(t *timer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.index > 0 {
		s.due.removeAt(t.index - 1)
	}
}

// runDue calls the owners of the timers that are due at now. It returns when the next timer is due;
// cc.Never: none is scheduled.
func (s *timers) runDue(now cc.Time) cc.Time {
	for {
		s.mu.Lock()
		if len(s.due) == 0 || s.due[0].at > now {
			next := cc.Never
			if len(s.due) > 0 {
				next = s.due[0].at
			}
			s.mu.Unlock()
			return next
		}
		t := s.due[0].timer
		s.due.removeAt(0)
		s.mu.Unlock()
		t.owner.onTimer(now)
	}
}

// dueHeap is a binary heap with the earliest timer first. Each timer is in it at most once.
// Comparing two entries reads only the heap, because with thousands of flows each timer is a cache miss.
type dueHeap []entry

// entry is a timer with the time for which it is scheduled.
type entry struct {
	at    cc.Time
	timer *timer
}

// putAt writes e at index i and records the index in its timer.
func (h dueHeap) putAt(i int, e entry) {
	h[i] = e
	e.timer.index = i + 1
}

// siftUp writes e at index i or at an ancestor of it.
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

// siftDown writes e at index i or at a descendant of it, and returns the index.
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

// removeAt removes the entry at index i.
func (h *dueHeap) removeAt(i int) {
	(*h)[i].timer.index = 0
	last := len(*h) - 1
	e := (*h)[last]
	(*h)[last] = entry{}
	*h = (*h)[:last]
	if i < last && h.siftDown(i, e) == i {
		h.siftUp(i, e)
	}
}
