package eventloop

import (
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Listener is a listening socket that all loops watch. A loop that waits for events accepts what comes.
//
// mu guards the registrations with the loops. accept runs without it.
type Listener struct {
	loops  *Loops
	fd     int
	accept func(l *Loop, most int) (pause time.Duration)

	mu     sync.Mutex
	slots  []int32     // of each loop; nil: accepting pauses, or is over
	resume *time.Timer // ends a pause; nil: there was none
	closed bool
}

// Listen calls accept, on loops, while connections wait in a non-blocking listening socket. The Listener owns fd from
// then on; after an error the caller still does. accept takes up to most connections, which is the number of events
// that the loop has to serve: so a loop with nothing else to do makes no vain call for a second connection. After
// accept returns a pause it is not called for that long.
func (ls *Loops) Listen(fd int, accept func(l *Loop, most int) (pause time.Duration)) (*Listener, error) {
	n := &Listener{loops: ls, fd: fd, accept: accept}
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.watchOnLoops(); err != nil {
		return nil, err
	}
	return n, nil
}

// watchOnLoops registers the socket with all loops, or with none after an error. mu is held.
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

// unwatchOnLoops ends the registrations. A loop may still be calling accept. mu is held.
func (n *Listener) unwatchOnLoops() {
	for i, slot := range n.slots {
		n.loops.all[i].unregister(n.fd, slot)
	}
	n.slots = nil
}

// handleEvent implements eventHandler.
func (n *Listener) handleEvent(l *Loop, _ uint32) {
	if pause := n.accept(l, l.eventCount); pause > 0 {
		n.pauseAccepting(pause)
	}
}

// pauseAccepting has no loop call accept for that long. Connections wait in the socket's backlog.
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
		if !n.closed && n.slots == nil && n.watchOnLoops() != nil { // memory is short: try again
			n.resume.Reset(d)
		}
	})
}

// Close closes the socket. accept is not called after Close has returned. Close waits for the loops, so no loop may
// call it.
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
	n.loops.waitForTurns() // and what accepts have handed to other loops has run
	return os.NewSyscallError("close", unix.Close(n.fd))
}
