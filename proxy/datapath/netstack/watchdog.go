package netstack

import (
	"fmt"
	"syscall"

	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/penstock-net/penstock/cc"
)

const (
	// quiet is the time without a segment from the peer before the stack's timers are checked.
	quiet = tcp.MinRTO
	// resumeAtMost is how often, without an answer, a stopped timer of the stack is
	// started: as often as the stack itself sends again, and also at doubling intervals.
	resumeAtMost = tcp.MaxRetries
)

var errStuck = fmt.Errorf("the stack in user space has stopped retransmitting: %w", syscall.ECONNABORTED)

// startWatching makes the poller look at the connection until it waits for no acknowledgement.
func (c *Conn) startWatching() {
	if !c.watched.Swap(true) {
		c.stack.poller.watchConn(c)
	}
}

// isWaitingForAck tells whether the peer has yet to acknowledge bytes, or our FIN.
func (c *Conn) isWaitingForAck() bool {
	e := c.tcpEndpoint()
	if e == nil {
		return false
	}
	switch tcp.EndpointState(e.State()) {
	case tcp.StateEstablished, tcp.StateCloseWait:
		c.signals.mu.Lock()
		defer c.signals.mu.Unlock()
		return c.signals.written > c.signals.una
	case tcp.StateFinWait1, tcp.StateClosing, tcp.StateLastAck:
		return true
	default:
		return false
	}
}

// isClosed tells whether the connection was closed.
func (c *Conn) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// checkProgress is called by the poller. It reports what changes without a segment that comes, makes a
// stack that has stopped retransmitting go on, and tells whether the poller is to look again.
func (c *Conn) checkProgress() bool {
	early := c.signals.checkSilently(c.stack.clock, c.timeoutCount, c.hasEnded() && !c.aborted.Load())
	if !c.isWaitingForAck() {
		return early
	}
	now := c.stack.clock()
	switch heard := c.signals.lastSegmentTime(); {
	case heard > c.checked:
		c.checked, c.resumed = heard, 0
	case now.Sub(c.checked) >= quiet:
		c.checked = now
		c.restartTimer(c.tcpEndpoint())
	}
	return true
}

// restartTimer starts the retransmission timer of a stack that waits for an acknowledgement with no
// timer running. The stack starts none while it counts nothing in flight, and recount corrects
// that count only when the next segment comes.
func (c *Conn) restartTimer(e *tcp.Endpoint) {
	e.LockUser()
	snd, ok := senderOf(e)
	resumed := ok && snd.resumeRetransmission()
	e.UnlockUser()
	if !resumed {
		return
	}
	c.stack.stalls.Add(1)
	if c.resumed++; c.resumed > resumeAtMost {
		c.stuck.Store(true)
		e.Abort()
	}
}

// lastSegmentTime is when the newest segment came.
func (g *signals) lastSegmentTime() cc.Time {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.at
}
