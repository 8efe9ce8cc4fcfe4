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

// Socket is a non-blocking socket that a loop serves. It is a syscall.RawConn: Read and Write call f until it returns
// true, and wait in between.
//
//	             Drive(task): nothing may be reading or writing
//	┌─────────────────┐ ──────────────────────────────────▶ ┌──────────────────────────────┐
//	│ goroutines wait │                                     │ a task drives                │
//	│ in Read, Write  │ ◀────────────────────────────────── │ Read, Write: datapath.ErrWait│
//	└─────────────────┘              Drive(nil)             └──────────────────────────────┘
//	  any state ── Close ──▶ closing: new calls return net.ErrClosed, waiting calls end, a driver is posted
//	  closing ── the last call returns ──▶ the descriptor is closed
//
// While a task drives the socket, only the task's run may read and write, and deadlines do not count.
//
//	word                says                              written by                  read by
//	refs                calls underway, +1 until Close,   every call, Close           every call: closing refuses it,
//	                    +closing from Close on                                        and alone closes the descriptor
//	driver              the task; nil: goroutines wait    Drive                       the loop, every call
//	urgent              an urgent byte was announced      the loop                    readers
//	everWaited          a goroutine has called Read or    waitLoop                    Recycle
//	                    Write
//	side.expired        the deadline has passed           setDeadline, a timer        waitLoop, before each try
//	side.wake, timer    see side                          under mu                    under mu
//	side.ready, others  see below                         the loop's goroutine        the loop's goroutine
//
// side.calls is taken before mu, and is held while a goroutine waits. mu is a leaf.
type Socket struct {
	loop *Loop
	fd   int
	slot int32 // of the loop

	refs   atomic.Int32
	in     side
	out    side
	urgent atomic.Bool

	// Only the loop's goroutine touches these.
	peerEnded bool  // the peer sends no more, or there is an error
	broken    bool  // nothing moves in either direction any more
	onBroken  *Task // posted when broken is set; nil: none

	driver atomic.Pointer[Task]

	everWaited atomic.Bool // a goroutine has called Read or Write

	mu sync.Mutex
}

// closing is added to refs by Close.
const closing = 1 << 30

// side is one direction of a socket.
type side struct {
	ready bool // a call may succeed; the loop's goroutine alone

	calls   sync.Mutex // one goroutine at a time reads, and one writes
	expired atomic.Bool
	wake    chan struct{} // has a value if there is a reason to try again; nil: no goroutine has waited yet
	timer   *time.Timer   // of the deadline; nil: none
}

// allEvents are the events of a socket. Edge-triggered: the kernel announces each once.
const allEvents = unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLPRI | unix.EPOLLET

// Watch has the loop serve a non-blocking socket. The Socket owns fd from then on; after an error the caller still
// does.
func (l *Loop) Watch(fd int) (*Socket, error) {
	s := freeSockets.Get().(*Socket)
	s.loop, s.fd = l, fd
	s.refs.Store(1)
	var err error
	if s.slot, err = l.register(fd, allEvents&(1<<32-1), s); err != nil {
		return nil, err
	}
	l.load.Add(1)
	return s, nil
}

// freeSockets holds the memory of recycled sockets.
var freeSockets = sync.Pool{New: func() any { return new(Socket) }}

// Recycle gives the memory of a closed socket to a later one, and reports whether it does. It does not if a call is
// underway, or if a goroutine has ever waited, since a timer of its deadline may still run. Only the loop's goroutine
// calls it. Nothing else may refer to the socket any more.
func (s *Socket) Recycle() (recycled bool) {
	if s.refs.Load() != closing || s.everWaited.Load() {
		return false
	}
	*s = Socket{}
	freeSockets.Put(s)
	return true
}

// Loop returns the loop that serves it.
func (s *Socket) Loop() *Loop { return s.loop }

// handleEvent implements eventHandler. It notes what has become possible, and runs the driver or wakes goroutines.
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

// wakeWaiters wakes the goroutine that waits, if one does. The socket's mu is held.
func (d *side) wakeWaiters() {
	if d.wake != nil {
		datapath.Signal(d.wake)
	}
}

// Drive has the task run whenever the socket may be read or written, and once it is closed. Events that came before
// are not repeated, so the caller posts the task. nil: goroutines wait again. No call of Read or Write may be
// underway.
func (s *Socket) Drive(t *Task) { s.driver.Store(t) }

// Driven reports whether a task drives the socket.
func (s *Socket) Driven() bool { return s.driver.Load() != nil }

// Urgent reports whether an urgent byte has ever been announced.
func (s *Socket) Urgent() bool { return s.urgent.Load() }

// Writable reports whether the socket may take bytes. Only the loop's goroutine calls it.
func (s *Socket) Writable() bool { return s.out.ready }

// Ended reports whether the peer sends no more, or there is an error. Only the loop's goroutine calls it.
func (s *Socket) Ended() bool { return s.peerEnded }

// Broken reports whether nothing moves in either direction any more: the peer has reset the connection, or both have
// sent all. Only the loop's goroutine calls it.
func (s *Socket) Broken() bool { return s.broken }

// OnBroken has the task run once the socket is broken, and soon if it is already; nil: none. Only the loop's goroutine
// calls it.
func (s *Socket) OnBroken(t *Task) {
	s.onBroken = t
	if t != nil && s.broken {
		s.loop.scheduleTask(t)
	}
}

// Emptied notes that a read has found less than there was room for, so that there is nothing more to read until the
// next event. It spares the driver a read that returns EAGAIN. Only the driver calls it.
func (s *Socket) Emptied() {
	if !s.peerEnded { // the end has been announced, and is still to be read
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

// Visit calls f with the descriptor, which stays open until f returns. Unlike datapath.Control it allocates nothing.
func (s *Socket) Visit(f func(fd int) error) error {
	if !s.holdOpen() {
		return net.ErrClosed
	}
	defer s.releaseHold()
	return f(s.fd)
}

// Read implements syscall.RawConn.
func (s *Socket) Read(f func(fd uintptr) bool) error { return s.waitUntilDone(&s.in, f) }

// Write implements syscall.RawConn.
func (s *Socket) Write(f func(fd uintptr) bool) error { return s.waitUntilDone(&s.out, f) }

// waitUntilDone calls f until it returns true. While a task drives the socket it calls f at most once, and not at all
// if no event says that f could succeed.
func (s *Socket) waitUntilDone(d *side, f func(fd uintptr) bool) error {
	if !s.holdOpen() {
		return net.ErrClosed
	}
	defer s.releaseHold()
	if !s.Driven() {
		return s.waitLoop(d, f)
	}
	if d.ready && f(uintptr(s.fd)) {
		return nil
	}
	d.ready = false
	return datapath.ErrWait
}

// waitLoop calls f until it returns true, and waits for an event in between. f is called before the first wait, since
// events that came before wake was made woke no goroutine.
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
		if wake == nil { // f is tried once more, since an event may have come before wake was made
			d.wake = make(chan struct{}, 1)
		}
		s.mu.Unlock()
		if wake != nil {
			<-wake
		}
	}
}

// holdOpen keeps the descriptor open until releaseHold. It returns false if the socket is closed.
func (s *Socket) holdOpen() bool {
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

// releaseHold ends what holdOpen began. The last one after Close closes the descriptor.
func (s *Socket) releaseHold() {
	if s.refs.Add(-1) == closing {
		s.loop.freeSlot(s.slot)
		s.loop.load.Add(-1)
		_ = Close(s.fd)
	}
}

// Close ends the calls that wait, and closes the descriptor once no call is underway.
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
	if t := s.driver.Load(); t != nil {
		t.Post()
	}
	s.mu.Lock()
	for _, d := range [...]*side{&s.in, &s.out} {
		if d.timer != nil {
			d.timer.Stop()
			d.timer = nil
		}
		d.wakeWaiters()
	}
	s.mu.Unlock()
	s.releaseHold()
	return nil
}

// Duplicate returns another descriptor of the socket, which no loop serves.
func (s *Socket) Duplicate() (fd int, err error) {
	err = s.Visit(func(own int) (err error) {
		fd, err = unix.FcntlInt(uintptr(own), unix.F_DUPFD_CLOEXEC, 0)
		return os.NewSyscallError("fcntl", err)
	})
	return fd, err
}

// Abandon closes a socket that has another descriptor. The connection stays open, and the loop gets no more of its
// events.
func (s *Socket) Abandon() error {
	if err := s.Visit(func(fd int) error { s.loop.removeFromEpoll(fd); return nil }); err != nil {
		return err
	}
	return s.Close()
}

// SetReadDeadline is net.Conn's.
func (s *Socket) SetReadDeadline(t time.Time) error { return s.setDeadline(&s.in, t) }

// SetWriteDeadline is net.Conn's.
func (s *Socket) SetWriteDeadline(t time.Time) error { return s.setDeadline(&s.out, t) }

// setDeadline sets the timer of a side's deadline, or lets the deadline pass if its time has come. Zero: none.
func (s *Socket) setDeadline(d *side, t time.Time) error {
	if !s.holdOpen() {
		return net.ErrClosed
	}
	defer s.releaseHold()
	s.mu.Lock()
	defer s.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	d.expired.Store(false)
	if t.IsZero() {
		return nil
	}
	after := time.Until(t) //nolint:forbidigo // a deadline of net.Conn is of the real clock
	if after <= 0 {
		d.expired.Store(true)
		d.wakeWaiters()
		return nil
	}
	var timer *time.Timer
	timer = time.AfterFunc(after, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if d.timer == timer { // it was not set again in between
			d.expired.Store(true)
			d.wakeWaiters()
		}
	})
	d.timer = timer
	return nil
}
