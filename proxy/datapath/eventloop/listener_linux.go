package eventloop

import (
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Listener is a listening socket that all loops watch: a loop that waits for events accepts what comes.
type Listener struct {
	loops  *Loops
	fd     int
	accept func(l *Loop, most int) (pause time.Duration)

	mu     sync.Mutex
	slots  []int32 // of the loops, while they watch
	resume *time.Timer
	closed bool
}

// Listen has accept called, on loops, while connections wait in a non-blocking listening socket,
// which is the Listener's from then on; after an error it is still the caller's. accept takes up to
// most of them, which is as many as the loop has events to serve: a loop with nothing else to do
// makes no call in vain for a second one. After accept returns a pause it is not called for that long.
func (ls *Loops) Listen(fd int, accept func(l *Loop, most int) (pause time.Duration)) (*Listener, error) {
	n := &Listener{loops: ls, fd: fd, accept: accept}
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.watchOnLoops(); err != nil {
		return nil, err
	}
	return n, nil
}

// watchOnLoops has the loops watch. mu is held.
func (n *Listener) watchOnLoops() error {
	for _, l := range n.loops.all {
		slot, err := l.register(n.fd, unix.EPOLLIN|unix.EPOLLEXCLUSIVE, n)
		if err != nil {
			n.unwatchOnLoops()
			return err
		}
		n.slots = append(n.slots, slot)
	}
	return nil
}

// unwatchOnLoops has them watch no more. mu is held.
func (n *Listener) unwatchOnLoops() {
	for i, slot := range n.slots {
		n.loops.all[i].unregister(n.fd, slot)
	}
	n.slots = nil
}

// handleEvent implements watcher.
func (n *Listener) handleEvent(l *Loop, _ uint32) {
	if pause := n.accept(l, l.eventCount); pause > 0 {
		n.pauseAccepting(pause)
	}
}

func (n *Listener) pauseAccepting(d time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed || n.slots == nil {
		return
	}
	n.unwatchOnLoops()
	n.resume = time.AfterFunc(d, func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		if !n.closed && n.slots == nil && n.watchOnLoops() != nil { // memory is short: once more
			n.resume.Reset(d)
		}
	})
}

// Close closes the socket. accept is not called after it has returned. No loop may call it.
func (n *Listener) Close() error {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return net.ErrClosed
	}
	n.closed = true
	n.unwatchOnLoops()
	if n.resume != nil {
		n.resume.Stop()
	}
	n.mu.Unlock()
	n.loops.waitForTurns() // no accept is underway any more
	n.loops.waitForTurns() // nor is what one has handed to another loop
	return os.NewSyscallError("close", unix.Close(n.fd))
}
