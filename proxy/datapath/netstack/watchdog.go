package netstack

import (
	"fmt"
	"syscall"

	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/penstock-net/penstock/cc"
)

const (
	// quiet is for how long nothing has come before the stack's timers are looked at.
	quiet = tcp.MinRTO
	// resumeAtMost is how often, without an answer, a timer of the stack's is started
	// that has stopped: as often as the stack itself sends again, at intervals that
	// double likewise.
	resumeAtMost = tcp.MaxRetries
)

var errStuck = fmt.Errorf("the stack in user space has stopped retransmitting: %w", syscall.ECONNABORTED)

// watch has the poller look at the connection until it waits for no acknowledgement.
func (c *Conn) watch() {
	if !c.watched.Swap(true) {
		c.stack.poller.watch(c)
	}
}

// waits tells whether the peer has yet to acknowledge bytes, or their end.
func (c *Conn) waits() bool {
	e := c.tcp()
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

// over tells whether the connection was closed.
func (c *Conn) over() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// look is the poller's: it reports what shows without anything coming, has the stack
// send again where it has stopped to, and tells whether there may be more to see.
func (c *Conn) look() bool {
	early := c.signals.look(c.stack.clock, c.timeouts, c.ended() && !c.aborted.Load())
	if !c.waits() {
		return early
	}
	now := c.stack.clock()
	switch heard := c.signals.heard(); {
	case heard > c.checked:
		c.checked, c.resumed = heard, 0
	case now.Sub(c.checked) >= quiet:
		c.checked = now
		c.revive(c.tcp())
	}
	return true
}

// revive has the stack send again where it waits for an acknowledgement without a
// timer running. It starts none where it takes nothing to be in flight, which recount
// corrects only after the next segment that comes.
func (c *Conn) revive(e *tcp.Endpoint) {
	e.LockUser()
	snd, ok := senderOf(e)
	resumed := ok && snd.resume()
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

// heard is when the newest segment came.
func (g *signals) heard() cc.Time {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.at
}
