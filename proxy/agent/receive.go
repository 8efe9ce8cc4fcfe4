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

// inbox is what an agent on this machine sends.
type inbox struct {
	mu    sync.Mutex // locked before the locks of groups, which have the flows of what came
	batch *batch     // nil: nothing has been read yet
	bad   int        // datagrams in a row that were malformed
}

// takeDatagrams reads what the agent has sent and hands it to the flows. What it sends in this time may wait for
// the next call: one that never pauses is not to hold up who calls. l.in.mu is held.
func (l *Link) takeDatagrams() {
	for range mostReads {
		n := l.readDatagrams()
		for i := range n {
			l.judgeDatagram(l.in.batch.datagramAt(i))
		}
		if n < together {
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

// judgeDatagram takes a datagram. Too many in a row that are malformed end the connection.
func (l *Link) judgeDatagram(datagram []byte) {
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
	if l.in.bad = l.countMalformed(l.in.bad, err); l.in.bad >= nonsense {
		l.mu.Lock()
		l.failWith(fmt.Errorf("%w: %d datagrams in a row", ccp.ErrMalformed, nonsense))
		l.mu.Unlock()
	}
}

// countMalformed returns how many messages in a row are malformed after one more, which led to err. A message that
// installs a program that cannot run is not malformed: the agent's other programs may run.
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

// noteRefused notes a datagram that is malformed, or that installs a program that cannot run: flows that the agent
// sets that program for keep their fallback. The first one of a connection is logged as a warning.
func (l *Link) noteRefused(err error) {
	l.malformed.Add(1)
	level := slog.LevelWarn
	if l.refused.Swap(true) {
		level = slog.LevelDebug
	}
	l.log.Log(context.Background(), level, "message of the agent refused", "err", err)
}

// takeNow is take for a tick: it returns at once if another goroutine is in take.
func (l *Link) takeNow() {
	if l.in.mu.TryLock() {
		defer l.in.mu.Unlock()
		l.takeDatagrams()
	}
}

// serveEvents takes in what comes between ticks, all of it at once, and sends what waits as soon as the agent
// makes room.
func (l *Link) serveEvents(e *events) error {
	for {
		l.in.mu.Lock()
		l.takeDatagrams()
		l.in.mu.Unlock()
		l.mu.Lock()
		if l.waiting.full {
			_ = l.flushBacklog() // watch ends the connection after an error
		}
		l.armEvents()
		l.mu.Unlock()
		if err := e.waitForEvent(); err != nil {
			return fmt.Errorf("waiting for it: %w", err)
		}
	}
}

// armEvents asks for the event that attend has to wake for. l.mu is held.
func (l *Link) armEvents() {
	if l.fd < 0 {
		return
	}
	what := uint32(unix.EPOLLIN)
	if l.waiting.full {
		what |= unix.EPOLLOUT
	}
	l.events.askOnce(l.fd, what)
}
