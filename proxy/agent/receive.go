package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/ccp"
)

// inbox is the state of reading from an agent on this machine.
type inbox struct {
	mu    sync.Mutex // locked before the locks of groups: their flows get the decisions
	batch *batch     // nil: nothing has been read yet
	bad   int        // datagrams in a row that were malformed
}

// takeDatagrams reads the agent's datagrams and passes them to the flows. It reads a bounded number, so that an agent
// that sends without a pause does not delay the caller. l.in.mu is held.
func (l *Link) takeDatagrams() {
	for range maxReads {
		n := l.readDatagrams()
		for i := range n {
			l.checkAndHandle(l.in.batch.datagramAt(i))
		}
		if n < batchLen {
			return
		}
	}
}

// readDatagrams reads datagrams of the agent, and returns how many.
func (l *Link) readDatagrams() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fd < 0 {
		return 0
	}
	if l.in.batch == nil {
		l.in.batch = newBatch()
	}
	n, err := l.in.batch.readWaiting(uintptr(l.fd))
	if err != nil {
		l.failWith(fmt.Errorf("hearing it: %w", err))
	} else if n > 0 {
		l.noteAlive(l.cfg.Clock())
	}
	return n
}

// checkAndHandle handles a datagram. Too many malformed ones in a row end the connection. l.in.mu is held.
func (l *Link) checkAndHandle(datagram []byte) {
	var err error
	switch n := len(datagram); {
	case n > ccp.MaxFromAgent:
		l.agent.CountMalformed()
		err = fmt.Errorf("%w: more than %d bytes", ccp.ErrMalformed, ccp.MaxFromAgent)
	case n == 0:
		l.agent.CountMalformed()
		err = fmt.Errorf("%w: no bytes", ccp.ErrMalformed)
	default:
		err = l.handleDatagram(datagram)
	}
	if l.in.bad = l.countMalformed(l.in.bad, err); l.in.bad >= maxMalformed {
		l.mu.Lock()
		l.failWith(fmt.Errorf("%w: %d datagrams in a row", ccp.ErrMalformed, maxMalformed))
		l.mu.Unlock()
	}
}

// countMalformed returns the number of malformed messages in a row after one more message, which led to err. A message
// that installs a program that cannot run is not malformed, because the agent's other programs may run.
func (l *Link) countMalformed(bad int, err error) int {
	if err == nil {
		return 0
	}
	l.noteRefused(err)
	if errors.Is(err, ccp.ErrProgram) {
		return bad
	}
	return bad + 1
}

// noteRefused counts and logs a datagram that is malformed, or that installs a program that cannot run. Flows for
// which the agent sets such a program keep their fallback. The first one of a connection is logged as a warning.
func (l *Link) noteRefused(err error) {
	l.malformed.Add(1)
	level := slog.LevelWarn
	if l.warned.Swap(true) {
		level = slog.LevelDebug
	}
	l.log.Log(context.Background(), level, "message of the agent refused", "err", err)
}

// tryTakeDatagrams calls takeDatagrams for a tick. It returns at once if another goroutine is reading.
func (l *Link) tryTakeDatagrams() {
	if l.in.mu.TryLock() {
		defer l.in.mu.Unlock()
		l.takeDatagrams()
	}
}

// serveEvents reads datagrams that come between ticks, and sends waiting messages as soon as the agent makes room.
func (l *Link) serveEvents(e *events) error {
	for {
		l.in.mu.Lock()
		l.takeDatagrams()
		l.in.mu.Unlock()
		l.mu.Lock()
		if l.waiting.full {
			_ = l.flushBacklog() // watchAgent ends the connection after an error
		}
		l.armEvents()
		l.mu.Unlock()
		if err := e.waitForEvent(); err != nil {
			return fmt.Errorf("waiting for it: %w", err)
		}
	}
}

// armEvents sets the events that wake serveEvents. l.mu is held.
func (l *Link) armEvents() {
	if l.fd < 0 {
		return
	}
	what := uint32(unix.EPOLLIN)
	if l.waiting.full {
		what |= unix.EPOLLOUT
	}
	l.events.armOnce(l.fd, what)
}
