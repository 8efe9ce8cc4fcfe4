package eventloop

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// maxEvents is how many events a loop takes from the kernel at a time: a batch.
const maxEvents = 128

// Loops are the loops of a process. All methods may be called from any goroutine.
type Loops struct {
	all   []*Loop
	next  atomic.Uint32  // where Least begins to look, so that loops with equal loads take turns
	done  sync.WaitGroup // the loops' goroutines
	close sync.Once
}

// New starts n loops; 0: one for each of Processors. Close ends them.
func New(n int) (*Loops, error) {
	if n <= 0 {
		n = Processors()
	}
	ls := &Loops{}
	for range n {
		l, err := newLoop()
		if err != nil {
			for _, l := range ls.all {
				l.closeDescriptors()
			}
			return nil, fmt.Errorf("eventloop: %w", err)
		}
		ls.all = append(ls.all, l)
	}
	ReserveProcessors(n)
	for _, l := range ls.all {
		ls.done.Go(l.runLoop)
	}
	return ls, nil
}

// Close ends the loops and waits for them. Sockets stay open but are not served any more.
func (ls *Loops) Close() {
	ls.close.Do(func() {
		for _, l := range ls.all {
			l.Do(func() { l.ending = true })
		}
		ls.done.Wait()
		ReserveProcessors(-len(ls.all))
	})
}

// Least returns the loop with the fewest sockets.
func (ls *Loops) Least() *Loop {
	least := ls.all[ls.next.Add(1)%uint32(len(ls.all))]
	for _, l := range ls.all {
		if l.load.Load() < least.load.Load() {
			least = l
		}
	}
	return least
}

// waitForTurns waits until each loop has run a task, so that what it was running is over. No loop may call it.
func (ls *Loops) waitForTurns() {
	var all sync.WaitGroup
	for _, l := range ls.all {
		all.Add(1)
		l.Do(all.Done)
	}
	all.Wait()
}

// Loop serves sockets on one goroutine. What it calls must not wait.
//
// A turn of the loop, in runLoop:
//
//	waitForEvents ──▶ handleEvent of each event ──▶ runDueTasks: tasks that events scheduled, then posted ones
//	     ▲                                                     │
//	     └─────────────────────────────────────────────────────┘
//
// mu guards what other goroutines share with the loop: slots, posted tasks, and whether it sleeps. It is a leaf:
// nothing else is locked and no function is called under it. Post writes to wakeup only if asleep is set, and clears
// it, so that a loop is woken once. The loop sets asleep under mu after it has found nothing to do, so no post is
// missed.
type Loop struct {
	epoll, wakeup int          // descriptors; wakeup is an eventfd in epoll
	load          atomic.Int64 // sockets

	mu        sync.Mutex
	slots     []loopSlot // registered descriptors; an event has the index
	freeSlots []int32    // indices of slots
	posted    []*Task    // by Post, to be run in the next turn
	asleep    bool       // it waits for events, or is about to
	ended     bool       // it serves nothing more; Do runs functions elsewhere; epoll is closed, or will be soon

	after sync.Mutex // held by the functions that run once the loop has ended

	// Only the loop's goroutine touches these.
	ending     bool // Close was called
	events     [maxEvents]unix.EpollEvent
	eventCount int     // of the batch in events
	due        []*Task // scheduled by this batch of events, in this order
	spareDue   []*Task // the other buffer of due
	slice      Slice
	deadlines  deadlines
}

// Load returns how many sockets the loop has.
func (l *Loop) Load() int64 { return l.load.Load() }

// loopSlot is the registration of a descriptor. An event that was taken from the kernel before its handler was
// unregistered has an older generation, and is dropped.
type loopSlot struct {
	handler    eventHandler // nil: the slot is free
	generation int32
}

// eventHandler gets the events of a descriptor, on the loop's goroutine.
type eventHandler interface{ handleEvent(l *Loop, events uint32) }

// newLoop returns a loop without a goroutine yet.
func newLoop() (l *Loop, err error) {
	l = &Loop{wakeup: -1}
	if l.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	if l.wakeup, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		l.closeDescriptors()
		return nil, os.NewSyscallError("eventfd", err)
	}
	// Edge-triggered: each write is an event, so that wakeup need not be read.
	if _, err := l.register(l.wakeup, unix.EPOLLIN|unix.EPOLLET, wakeupHandler{}); err != nil {
		l.closeDescriptors()
		return nil, err
	}
	return l, nil
}

// wakeupHandler is the handler of wakeup. It does nothing: the loop is awake.
type wakeupHandler struct{}

func (wakeupHandler) handleEvent(*Loop, uint32) {}

// closeDescriptors closes epoll, and with it all registrations.
func (l *Loop) closeDescriptors() {
	if l.deadlines.timer != nil {
		l.deadlines.timer.Stop()
	}
	_ = unix.Close(l.epoll)
	if l.wakeup >= 0 {
		_ = unix.Close(l.wakeup)
	}
}

// register has the loop call a handler at a descriptor's events. slot is for unregister or freeSlot.
func (l *Loop) register(fd int, events uint32, w eventHandler) (slot int32, err error) {
	l.mu.Lock()
	if l.ended {
		l.mu.Unlock()
		return 0, net.ErrClosed
	}
	if last := len(l.freeSlots) - 1; last >= 0 {
		slot, l.freeSlots = l.freeSlots[last], l.freeSlots[:last]
	} else {
		slot = int32(len(l.slots))
		l.slots = append(l.slots, loopSlot{})
	}
	l.slots[slot].handler = w
	event := unix.EpollEvent{Events: events, Fd: slot, Pad: l.slots[slot].generation}
	err = epollAdd(l.epoll, fd, &event) // mu is held, so that epoll is not closed
	l.mu.Unlock()
	if err != nil {
		l.freeSlot(slot)
		return 0, os.NewSyscallError("epoll_ctl", err)
	}
	return slot, nil
}

// unregister ends what register began.
func (l *Loop) unregister(fd int, slot int32) {
	l.removeFromEpoll(fd)
	l.freeSlot(slot)
}

// removeFromEpoll ends the events of a descriptor if its file stays open by another one.
func (l *Loop) removeFromEpoll(fd int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.ended { // else the number may be another file's
		_ = unix.EpollCtl(l.epoll, unix.EPOLL_CTL_DEL, fd, nil)
	}
}

// freeSlot frees a slot. The descriptor stays in epoll, which drops it once it is closed.
func (l *Loop) freeSlot(slot int32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.slots[slot].handler = nil
	l.slots[slot].generation++
	l.freeSlots = append(l.freeSlots, slot)
}

// findHandler returns the handler of an event; nil: it was unregistered.
func (l *Loop) findHandler(event *unix.EpollEvent) eventHandler {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w := &l.slots[event.Fd]; w.generation == event.Pad {
		return w.handler
	}
	return nil
}

// Task is a function that a loop runs each time the task is posted.
type Task struct {
	loop   *Loop
	run    func()
	queued atomic.Bool // posted or scheduled; cleared before run, so that a post during run has it run again
}

// Task returns a task that calls run on the loop's goroutine. run must not wait.
func (l *Loop) Task(run func()) *Task { return &Task{loop: l, run: run} }

// Prepare makes t such a task, in memory of the caller. No post of it may be underway.
func (t *Task) Prepare(l *Loop, run func()) { *t = Task{loop: l, run: run} }

// OwnLoop returns the loop that runs it.
func (t *Task) OwnLoop() *Loop { return t.loop }

// Do runs f on the loop's goroutine, once. If the loop has ended, f runs on another goroutine, and still at no time
// beside another function of the loop.
func (l *Loop) Do(f func()) {
	if !l.Task(f).tryPost() {
		go func() {
			l.after.Lock()
			defer l.after.Unlock()
			f()
		}()
	}
}

// Post has the task run soon, unless the loop has ended. It may be called from any goroutine, also from the task's
// run, and with locks held: it neither waits nor calls back. Posts before the task runs bring about one run.
func (t *Task) Post() { t.tryPost() }

// tryPost is Post. It returns false if the loop has ended.
func (t *Task) tryPost() bool {
	if t.queued.Swap(true) {
		return true
	}
	l := t.loop
	l.mu.Lock()
	if l.ended {
		l.mu.Unlock()
		return false
	}
	l.posted = append(l.posted, t)
	wake := l.asleep
	l.asleep = false
	l.mu.Unlock()
	if wake {
		signalEvent(l.wakeup)
	}
	return true
}

// scheduleTask is Post for the loop's goroutine: the task runs in this turn, and no lock is taken.
func (l *Loop) scheduleTask(t *Task) {
	if !t.queued.Swap(true) {
		l.due = append(l.due, t)
	}
}

// runLoop is the loop's goroutine. It is not locked to a thread, since Renew would then wake another one each time.
func (l *Loop) runLoop() {
	for !l.ending {
		if err := l.waitForEvents(); err != nil {
			panic(fmt.Sprintf("eventloop: wait for events: %v", err)) // only a bug can cause it
		}
		for i := range l.eventCount {
			if w := l.findHandler(&l.events[i]); w != nil {
				w.handleEvent(l, l.events[i].Events)
			}
		}
		l.runDueTasks()
	}
	l.runLastTasks()
}

// runLastTasks runs what was posted before ended was set, and closes the loop.
func (l *Loop) runLastTasks() {
	l.after.Lock()
	defer l.after.Unlock()
	l.mu.Lock()
	l.ended = true
	l.mu.Unlock()
	l.runDueTasks()
	l.closeDescriptors()
}

// runDueTasks runs the tasks that this batch of events scheduled, then those that were posted.
func (l *Loop) runDueTasks() {
	l.mu.Lock()
	l.due = append(l.due, l.posted...)
	clear(l.posted)
	l.posted = l.posted[:0]
	l.mu.Unlock()
	due := l.due
	l.due = l.spareDue[:0]
	for _, t := range due {
		t.queued.Store(false) // first, so that no Post is lost
		t.run()
	}
	clear(due)
	l.spareDue = due[:0]
}

// waitForEvents takes a batch of events. It waits for one, unless tasks are due. Under load the first look finds some,
// and Go's scheduler then learns of no system call.
func (l *Loop) waitForEvents() error {
	l.mu.Lock()
	l.asleep = len(l.due)+len(l.posted) == 0
	asleep := l.asleep
	l.mu.Unlock()
	n, err := l.pollEvents()
	for asleep && n == 0 && err == nil {
		if n, err = unix.EpollWait(l.epoll, l.events[:], -1); errors.Is(err, unix.EINTR) {
			err = nil
		}
		l.slice.Renew()
	}
	l.eventCount = max(n, 0)
	if asleep {
		l.mu.Lock()
		l.asleep = false
		l.mu.Unlock()
	}
	return err
}

// pollEvents takes a batch of events without waiting.
func (l *Loop) pollEvents() (n int, err error) {
	for {
		if n, err = epollReady(l.epoll, l.events[:]); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}
