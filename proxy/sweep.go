package proxy

import (
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// sweepBounds are how often connections are looked at for timeouts: often
// enough for the shortest timeout, and never busily.
const (
	sweepMin = 50 * time.Millisecond
	sweepMax = 5 * time.Second
)

// sweepConnections resets the connections on which nothing has moved for too long. One
// look at all of them now and then replaces a timer reset for every byte.
func (s *Server) sweepConnections(done <-chan struct{}) {
	_, _, period := s.sweepTimeouts()
	ticker := time.NewTicker(period)
	defer ticker.Stop()
	for {
		select {
		case <-done:
			return
		case <-ticker.C:
		}
		idle, half, next := s.sweepTimeouts()
		if next != period {
			period = next
			ticker.Reset(period)
		}
		s.lookAtLimits()
		now := s.clock()
		for _, c := range s.liveConnections() {
			quiet := now.Sub(cc.Time(c.active.Load()))
			c.mu.Lock()
			state := c.state
			c.mu.Unlock()
			if state == StateOpen || state == StateHalfClosed {
				c.keepAlive()
			}
			limit, how := half, ClosedHalfClosed
			switch state {
			case StateOpen:
				limit, how = idle, ClosedIdle
			case StateGreeting, StateDialing: // have timeouts of their own
				limit = 0
			}
			if limit > 0 && quiet >= limit/2 && c.hasDelivered(now) {
				quiet = 0
			}
			switch {
			case c.peerIsRevoked():
				c.tearDown(Cause{ProxySide, ClosedRevoked}, nil)
			case limit > 0 && quiet >= limit:
				c.tearDown(Cause{ProxySide, how}, nil)
			case state == StateOpen && half > 0 && quiet >= half && quiet%half < period:
				c.reapBlocked() // not each time: it looks at both legs
			case state == StateHalfClosed:
				c.resetIfPeerGone()
			}
		}
	}
}

// keepAlive has the server leg find out that its peer has vanished. Only sweep calls it.
func (c *connection) keepAlive() {
	if c.keptAlive {
		return
	}
	c.keptAlive = true
	if k, ok := c.server.conn.(datapath.KeepAliver); ok {
		if err := k.KeepAlive(); err != nil {
			c.srv.log.Debug("a peer that vanishes is found by the idle timeout alone", "id", c.id, "err", err)
		}
	}
}

// sweepTimeouts are how long a connection may be quiet, and how often to look.
func (s *Server) sweepTimeouts() (idle, half, period time.Duration) {
	limits := s.currentSettings().cfg.Limits
	idle, half = limits.IdleTimeout, limits.HalfClosedTimeout
	period = sweepMax
	for _, d := range []time.Duration{idle, half} {
		if d > 0 {
			period = min(period, d/8)
		}
	}
	return idle, half, max(period, sweepMin)
}

// resetIfPeerGone ends a half-closed connection of which the finished side has gone away
// altogether: nobody reads from that leg any more, so nobody else would notice.
func (c *connection) resetIfPeerGone() {
	for _, l := range []struct{ gone, other *leg }{{&c.client, &c.server}, {&c.server, &c.client}} {
		c.mu.Lock()
		idle := l.gone.ended && !l.gone.closed && !l.gone.failed
		c.mu.Unlock()
		if !idle || !isAborted(l.gone.conn) {
			continue
		}
		if e, ok := l.other.conn.(datapath.Ending); ok {
			if n, err := e.Undelivered(); err == nil && n > 0 {
				return // the next look, once it has arrived
			}
		}
		c.tearDown(Cause{c.sideOf(l.gone), ClosedReset}, nil)
	}
}

// look is what the legs had still to deliver, when a byte had last moved at active.
type look struct {
	active int64
	left   cc.Bytes
}

// hasDelivered tells whether the legs have delivered bytes since the last call, between which
// and this one none has moved here. Only sweep calls it.
func (c *connection) hasDelivered(now cc.Time) bool {
	last := c.looked
	c.looked = look{active: c.active.Load()}
	for _, l := range []*leg{&c.client, &c.server} {
		if e, ok := l.conn.(datapath.Ending); ok {
			n, _ := e.Undelivered() // of a leg that is closed: nothing
			c.looked.left += n
		}
	}
	if c.looked.active != last.active || c.looked.left == last.left {
		return false
	}
	c.looked.active = int64(now)
	c.active.Store(int64(now))
	return true
}

// reapBlocked ends a connection that one side has reset, or vanished from, with so much on its
// way that the other takes no more: the reset is behind that, and nobody has read it.
func (c *connection) reapBlocked() {
	for _, l := range []*leg{&c.client, &c.server} {
		if isAborted(l.conn) {
			c.tearDown(Cause{c.sideOf(l), ClosedReset}, nil)
			return
		}
	}
}
