package eventloop

import (
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// Socket is a non-blocking socket that a loop watches. It is a syscall.RawConn: Read and
// Write call f until it returns true, and wait in between. Once a task drives the socket
// they return datapath.ErrWait instead of waiting, only the task may call them, and deadlines do
// not count.
type Socket struct {
	loop *Loop
	fd   int
	slot int32

	refs   atomic.Int32 // number of calls underway, plus 1 until Close, plus closing from then on
	in     side
	out    side
	urgent atomic.Bool // an urgent byte has come, once

	// Only the loop's goroutine touches these.
	peerEnded bool  // the peer sends no more, or there is an error
	broken    bool  // nothing moves in either direction any more
	onBroken  *Task // nil: nobody is told of that

	driver atomic.Pointer[Task] // drives it; nil: goroutines wait

	// Whether an event has told of bytes since the last read. Only the loop's goroutine uses told and early.
	toldTask   *Task       // the task that was told; nil: none
	toldEarly  bool        // before a task drove the socket
	everWaited atomic.Bool // a goroutine has read, or may have

	mu sync.Mutex // guards the sides' wake and timers
}

// closing is set in users once the socket is closed.
const closing = 1 << 30

// side is reading, or writing.
type side struct {
	ready bool // it may be possible; the loop's goroutine alone

	calls   sync.Mutex // one at a time
	expired atomic.Bool
	wake    chan struct{} // there is a reason to try again; nil: nobody has waited
	timer   *time.Timer   // of the deadline
}

// Every event of a socket. The kernel tells of each once.
const allEvents = unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLPRI | unix.EPOLLET

// Watch has the loop watch a non-blocking socket, which is the Socket's from then on;
// after an error it is still the caller's.
func (l *Loop) Watch(fd int) (*Socket, error) {
	s := &Socket{loop: l, fd: fd}
	s.refs.Store(1)
	var err error
	if s.slot, err = l.register(fd, allEvents&(1<<32-1), s); err != nil {
		return nil, err
	}
	l.load.Add(1)
	return s, nil
}

// Loop is the one that watches it.
func (s *Socket) Loop() *Loop { return s.loop }

// handleEvent implements watcher.
func (s *Socket) handleEvent(l *Loop, events uint32) {
	const broken = unix.EPOLLHUP | unix.EPOLLERR
	in := events&(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLPRI|broken) != 0
	out := events&(unix.EPOLLOUT|broken) != 0
	s.in.ready = s.in.ready || in
	s.out.ready = s.out.ready || out
	s.peerEnded = s.peerEnded || events&(unix.EPOLLRDHUP|broken) != 0
	if events&unix.EPOLLPRI != 0 {
		s.urgent.Store(true)
	}
	if events&unix.EPOLLHUP != 0 {
		s.broken = true
		if s.onBroken != nil {
			l.scheduleTask(s.onBroken)
		}
	}
	t := s.driver.Load()
	if events&unix.EPOLLIN != 0 {
		s.toldTask, s.toldEarly = t, t == nil
	}
	if t != nil {
		l.scheduleTask(t)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if in {
		s.in.wakeWaiters()
	}
	if out {
		s.out.wakeWaiters()
	}
}

// wakeWaiters wakes who waits. The socket's mu is held.
func (d *side) wakeWaiters() {
	if d.wake == nil {
		return
	}
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// Drive has the task run whenever the socket may be read or written, and once it is closed. The task
// is not told of what happened before, so the caller posts it. nil: goroutines wait again. Nobody may
// be reading or writing.
func (s *Socket) Drive(t *Task) { s.driver.Store(t) }

// Driven tells whether a task drives it.
func (s *Socket) Driven() bool { return s.driver.Load() != nil }

// Urgent tells whether an urgent byte has ever been announced.
func (s *Socket) Urgent() bool { return s.urgent.Load() }

// MayBeUrgent tells, in a call of Read, whether the next byte may be an urgent one. An event that
// tells of bytes tells of an urgent one among them, too: it is none where the task that drives
// the socket reads for the first time since an event, and none was ever announced.
func (s *Socket) MayBeUrgent() bool {
	t := s.driver.Load()
	return s.Urgent() || t == nil || s.toldTask != t && (!s.toldEarly || s.everWaited.Load())
}

// Writable tells whether the socket may be written to, and Ended whether the peer sends no
// more or there is an error. Only the loop's goroutine calls them.
func (s *Socket) Writable() bool { return s.out.ready }

// Ended is described with Writable.
func (s *Socket) Ended() bool { return s.peerEnded }

// Broken tells whether nothing moves in either direction any more: the peer has reset the connection, or
// both have sent all. Only the loop's goroutine calls it.
func (s *Socket) Broken() bool { return s.broken }

// OnBroken has the task run once the socket is broken, and soon if it is already; nil: no task. Only the
// loop's goroutine calls it.
func (s *Socket) OnBroken(t *Task) {
	s.onBroken = t
	if t != nil && s.broken {
		s.loop.scheduleTask(t)
	}
}

// Emptied notes that a read has found less than there was room for: until the next event
// there is nothing more to be read. Only who drives the socket calls it.
func (s *Socket) Emptied() {
	if !s.peerEnded { // the end has been told of, and is still to be read
		s.in.ready = false
	}
}

// Control implements syscall.RawConn.
func (s *Socket) Control(f func(fd uintptr)) error {
	return s.Visit(func(fd int) error {
		f(uintptr(fd))
		return nil
	})
}

// Visit calls f with the descriptor, which stays open meanwhile. Unlike datapath.Control it allocates nothing.
func (s *Socket) Visit(f func(fd int) error) error {
	if !s.acquire() {
		return net.ErrClosed
	}
	defer s.release()
	return f(s.fd)
}

// Read implements syscall.RawConn.
func (s *Socket) Read(f func(fd uintptr) bool) error { return s.waitUntilDone(&s.in, f) }

// Write implements syscall.RawConn.
func (s *Socket) Write(f func(fd uintptr) bool) error { return s.waitUntilDone(&s.out, f) }

func (s *Socket) waitUntilDone(d *side, f func(fd uintptr) bool) error {
	if !s.acquire() {
		return net.ErrClosed
	}
	defer s.release()
	if !s.Driven() {
		return s.waitLoop(d, f)
	}
	done := d.ready && f(uintptr(s.fd))
	if d == &s.in {
		s.toldTask, s.toldEarly = nil, false
	}
	if done {
		return nil
	}
	d.ready = false
	return datapath.ErrWait
}

// waitLoop calls f until it returns true.
func (s *Socket) waitLoop(d *side, f func(fd uintptr) bool) error {
	d.calls.Lock()
	defer d.calls.Unlock()
	s.everWaited.Store(true)
	for {
		switch {
		case s.refs.Load()&closing != 0:
			return net.ErrClosed
		case d.expired.Load():
			return os.ErrDeadlineExceeded
		case f(uintptr(s.fd)):
			return nil
		}
		s.mu.Lock()
		wake := d.wake
		if wake == nil { // what happens from now on is told
			d.wake = make(chan struct{}, 1)
		}
		s.mu.Unlock()
		if wake != nil {
			<-wake
		}
	}
}

// acquire keeps the descriptor open until leave; false: it is closed.
func (s *Socket) acquire() bool {
	for {
		n := s.refs.Load()
		if n&closing != 0 {
			return false
		}
		if s.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (s *Socket) release() {
	if s.refs.Add(-1) == closing {
		s.loop.freeSlot(s.slot)
		s.loop.load.Add(-1)
		_ = Close(s.fd)
	}
}

// Close closes the socket once no call is underway any more, and ends those that wait.
func (s *Socket) Close() error {
	for {
		n := s.refs.Load()
		if n&closing != 0 {
			return net.ErrClosed
		}
		if s.refs.CompareAndSwap(n, n|closing) {
			break
		}
	}
	for _, d := range []*side{&s.in, &s.out} {
		s.expireDeadline(d, time.Time{})
	}
	if t := s.driver.Load(); t != nil {
		t.Post()
	}
	s.mu.Lock()
	s.in.wakeWaiters()
	s.out.wakeWaiters()
	s.mu.Unlock()
	s.release()
	return nil
}

// SetReadDeadline is net.Conn's.
func (s *Socket) SetReadDeadline(t time.Time) error { return s.setDeadline(&s.in, t) }

// SetWriteDeadline is net.Conn's.
func (s *Socket) SetWriteDeadline(t time.Time) error { return s.setDeadline(&s.out, t) }

func (s *Socket) setDeadline(d *side, t time.Time) error {
	if !s.acquire() {
		return net.ErrClosed
	}
	defer s.release()
	s.expireDeadline(d, t)
	return nil
}

func (s *Socket) expireDeadline(d *side, t time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	d.expired.Store(false)
	if t.IsZero() {
		return
	}
	after := time.Until(t) //nolint:forbidigo // a deadline of net.Conn is of the real clock
	if after <= 0 {
		d.expired.Store(true)
		d.wakeWaiters()
		return
	}
	var timer *time.Timer
	timer = time.AfterFunc(after, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if d.timer == timer { // it has not been set anew meanwhile
			d.expired.Store(true)
			d.wakeWaiters()
		}
	})
	d.timer = timer
}
