package eventloop

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// batch is how many events are taken from the kernel at a time.
const maxEvents = 128

// mostTurns is how many batches a loop serves in a row before it lets other goroutines run, which
// takes a system call.
const maxBatches = 16

// Loops are the loops of a process.
type Loops struct {
	all  []*Loop
	next atomic.Uint32
	done sync.WaitGroup
}

// New starts n loops; 0: one for each processor that Go uses. Close ends them.
func New(n int) (*Loops, error) {
	if n <= 0 {
		n = runtime.GOMAXPROCS(0)
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
	for _, l := range ls.all {
		ls.done.Go(l.runLoop)
	}
	return ls, nil
}

// Close ends the loops and waits for them. Sockets stay open, but nobody is told of them
// any more.
func (ls *Loops) Close() {
	for _, l := range ls.all {
		l.Do(func() { l.ending = true })
	}
	ls.done.Wait()
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

// waitForTurns waits until the loops have done what they were doing. No loop may call it.
func (ls *Loops) waitForTurns() {
	var all sync.WaitGroup
	for _, l := range ls.all {
		all.Add(1)
		l.Do(all.Done)
	}
	all.Wait()
}

// Loop serves sockets on one goroutine. Whatever it calls must not wait.
type Loop struct {
	epoll, wakeup int
	epollFile     *os.File        // of epoll
	epollConn     syscall.RawConn // of file
	load          atomic.Int64    // sockets

	mu        sync.Mutex // guards what follows
	slots     []loopSlot // by slot
	freeSlots []int32    // slots
	posted    []*Task
	asleep    bool // or about to be
	ended     bool // it watches nothing more, and runs what it is to do once elsewhere; epoll is closed, or soon

	after sync.Mutex // held by what runs once the loop has ended

	// Only the loop's goroutine touches these.
	ending       bool
	batchesInRow int // batches served in a row
	events       [maxEvents]unix.EpollEvent
	eventCount   int
	pollFunc     func(epoll uintptr) bool // poll, made once
	due          []*Task                  // to be run next, in this order
	spareDue     []*Task                  // the other buffer of due

	deadlines deadlines
}

// Load is how many sockets the loop has.
func (l *Loop) Load() int64 { return l.load.Load() }

// watched is a slot. Events of a watcher that had the slot before have another generation.
type loopSlot struct {
	handler    eventHandler // nil: the slot is free
	generation int32
}

// eventHandler is told of the events of a descriptor.
type eventHandler interface{ handleEvent(l *Loop, events uint32) }

func newLoop() (l *Loop, err error) {
	l = &Loop{wakeup: -1}
	if l.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	// Go's poller waits for the loop's: a goroutine that waits in a system call of its own
	// keeps a processor from others for up to 10 ms, and has to find one when it returns.
	if err := unix.SetNonblock(l.epoll, true); err != nil {
		_ = unix.Close(l.epoll)
		return nil, os.NewSyscallError("fcntl", err)
	}
	l.epollFile = os.NewFile(uintptr(l.epoll), "epoll")
	if l.epollConn, err = l.epollFile.SyscallConn(); err != nil {
		l.closeDescriptors()
		return nil, err
	}
	l.pollFunc = func(epoll uintptr) bool {
		if l.pollEvents(epoll) {
			return true
		}
		l.batchesInRow = 0 // it is about to wait, and others run
		return false
	}
	if l.wakeup, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		l.closeDescriptors()
		return nil, os.NewSyscallError("eventfd", err)
	}
	// Edge-triggered: each write is an event, and nobody reads.
	if _, err := l.register(l.wakeup, unix.EPOLLIN|unix.EPOLLET, wakeupHandler{}); err != nil {
		l.closeDescriptors()
		return nil, err
	}
	return l, nil
}

// wakeupHandler is the watcher of wakeup: that the loop runs is all there is to it.
type wakeupHandler struct{}

func (wakeupHandler) handleEvent(*Loop, uint32) {}

func (l *Loop) closeDescriptors() {
	if l.deadlines.timer != nil {
		l.deadlines.timer.Stop()
	}
	_ = l.epollFile.Close()
	if l.wakeup >= 0 {
		_ = unix.Close(l.wakeup)
	}
}

// register has the watcher told of a descriptor's events.
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
	err = unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, fd, &event) // mu is held, so that epoll is not closed
	l.mu.Unlock()
	if err != nil {
		l.freeSlot(slot)
		return 0, os.NewSyscallError("epoll_ctl", err)
	}
	return slot, nil
}

// unregister has the watcher told no more.
func (l *Loop) unregister(fd int, slot int32) {
	l.mu.Lock()
	if !l.ended { // else the number may be another file's
		_ = unix.EpollCtl(l.epoll, unix.EPOLL_CTL_DEL, fd, nil)
	}
	l.mu.Unlock()
	l.freeSlot(slot)
}

// freeSlot frees a slot. It leaves the descriptor with epoll, which drops one that is closed.
func (l *Loop) freeSlot(slot int32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.slots[slot].handler = nil
	l.slots[slot].generation++
	l.freeSlots = append(l.freeSlots, slot)
}

// findHandler returns the watcher of an event; nil: it was forgotten.
func (l *Loop) findHandler(event *unix.EpollEvent) eventHandler {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w := &l.slots[event.Fd]; w.generation == event.Pad {
		return w.handler
	}
	return nil
}

// Task is something that a loop does, again and again.
type Task struct {
	loop   *Loop
	run    func()
	queued atomic.Bool
}

// Task returns a task that calls run on the loop's goroutine each time it is posted.
func (l *Loop) Task(run func()) *Task { return &Task{loop: l, run: run} }

// Do has f run on the loop's goroutine, once. Where the loop has ended it runs on another, and still
// beside nothing else of the loop's.
func (l *Loop) Do(f func()) {
	if !l.Task(f).tryPost() {
		go func() {
			l.after.Lock()
			defer l.after.Unlock()
			f()
		}()
	}
}

// Post has the task run soon, unless the loop has ended. It may be called from any goroutine, the task's
// own run included, and neither waits nor calls back. What is posted before it runs is one run.
func (t *Task) Post() { t.tryPost() }

// tryPost is Post; false: the loop has ended.
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
		var one [8]byte
		binary.NativeEndian.PutUint64(one[:], 1)
		_, _ = Write(l.wakeup, one[:])
	}
	return true
}

// scheduleTask is Post on the loop's goroutine.
func (l *Loop) scheduleTask(t *Task) {
	if !t.queued.Swap(true) {
		l.due = append(l.due, t)
	}
}

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
		if l.batchesInRow++; l.batchesInRow == maxBatches {
			l.batchesInRow = 0
			runtime.Gosched() // who else wants to run has waited for long enough
		}
	}
	l.runLastTasks()
}

// runLastTasks does what was posted last, and closes the loop.
func (l *Loop) runLastTasks() {
	l.after.Lock()
	defer l.after.Unlock()
	l.mu.Lock()
	l.ended = true
	l.mu.Unlock()
	l.runDueTasks()
	l.closeDescriptors()
}

// runDueTasks runs what is due: what this batch of events brought about, then what others posted.
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

// waitForEvents takes a batch of events. It waits for them, unless there is something to do.
func (l *Loop) waitForEvents() error {
	l.mu.Lock()
	l.asleep = len(l.due)+len(l.posted) == 0
	asleep := l.asleep
	l.mu.Unlock()
	if !asleep {
		l.pollEvents(uintptr(l.epoll))
		return nil
	}
	err := l.epollConn.Read(l.pollFunc)
	l.mu.Lock()
	l.asleep = false
	l.mu.Unlock()
	return err
}

// pollEvents takes a batch of events; false: there are none.
func (l *Loop) pollEvents(epoll uintptr) bool {
	for {
		n, err := epollReady(int(epoll), l.events[:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		l.eventCount = max(n, 0)
		return n != 0
	}
}
