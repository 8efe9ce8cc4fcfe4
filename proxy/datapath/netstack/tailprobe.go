package netstack

import (
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/penstock-net/penstock/cc"
)

// leastProbe is the least time without a segment in either direction before the stack sends a
// tail loss probe (draft-dukkipati-tcpm-tcp-loss-probe-01 §2.1). The stack itself has no such
// bound: on a path of less than a millisecond it would probe whenever the processor is busy
// for two round trips, and each probe counts as a loss.
const leastProbe = 10 * time.Millisecond

// delayTailProbe makes the stack's timer for tail loss probes wait for leastProbe. The caller holds the
// endpoint's lock, and calls it again later if it returns false: the timer has just expired.
func (c *Conn) delayTailProbe(e *tcp.Endpoint, probe *timer) bool {
	if probe.state != timerStopped && probe.timer != nil && !probe.timer.Stop() {
		return false
	}
	expired := probe.callback
	probe.callback = func() {
		e.LockUser()
		if quiet := c.signals.quietTime(c.stack.clock()); probe.isRunning() && quiet < leastProbe {
			if due := probe.clock.NowMonotonic().Add(leastProbe - quiet); probe.target.Before(due) {
				probe.target = due
			}
		}
		e.UnlockUser()
		expired()
	}
	probe.timer = nil
	if probe.isRunning() {
		probe.startTimer(probe.target.Sub(probe.clock.NowMonotonic()))
	} else {
		probe.state = timerStopped
	}
	return true
}

// quietTime is the time since a segment came or bytes left.
func (g *signals) quietTime(now cc.Time) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	return now.Sub(max(g.at, g.left))
}
