package netstack

import (
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// A connection that waits for an acknowledgement is looked at pollEvery after it was written to.
// A stalled reader, a retransmission timeout and a stack that has stopped retransmitting show
// only here. It is looked at again after the time for which nothing has come divided by
// pollShare, but no less than pollEvery and no more than maxPollDelay.
const (
	pollEvery    = 10 * time.Millisecond
	pollShare    = 8
	maxPollDelay = tcp.MinRTO
)

// poller looks at the connections that wait for an acknowledgement. Its goroutine runs only while
// there are any.
type poller struct {
	clock   func() cc.Time
	mu      sync.Mutex
	joining []*Conn
	next    cc.Time // when it looks next
	running bool
	kick    chan struct{} // it is to look earlier than next
	closed  chan struct{}
	done    sync.WaitGroup
}

// polledConn is a connection that the poller looks at.
type polledConn struct {
	*Conn
	since cc.Time // when the poller began to look at it
	due   cc.Time // when to look next
}

// newPoller returns a poller without a goroutine; watchConn starts it.
func newPoller(clock func() cc.Time) poller {
	return poller{clock: clock, kick: make(chan struct{}, 1), closed: make(chan struct{})}
}

// watchConn makes the poller look at c until c waits for no acknowledgement any more.
func (p *poller) watchConn(c *Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if datapath.IsClosed(p.closed) {
		return
	}
	p.joining = append(p.joining, c)
	switch soon := p.clock().Add(pollEvery); {
	case !p.running:
		p.running = true
		p.done.Go(p.pollLoop)
	case soon < p.next:
		p.next = soon // so that others do not kick as well
		datapath.Signal(p.kick)
	}
}

// stopAndWait ends the poller, and waits until it has ended.
func (p *poller) stopAndWait() {
	p.mu.Lock()
	close(p.closed)
	p.mu.Unlock()
	p.done.Wait()
}

// pollLoop is the poller's goroutine. It keeps the connections for itself, so that looking at
// them takes no lock of the poller.
func (p *poller) pollLoop() {
	timer := time.NewTimer(pollEvery)
	defer timer.Stop()
	var conns []polledConn
	for {
		now := p.clock()
		if conns = p.takeNewConns(conns, now); len(conns) == 0 {
			return
		}
		next := cc.Never
		for i := 0; i < len(conns); {
			c := &conns[i]
			if now >= c.due {
				if !c.checkProgress() {
					ended, last := c.Conn, len(conns)-1
					conns[i], conns[last] = conns[last], polledConn{}
					conns = conns[:last]
					ended.stopWatching()
					continue
				}
				silence := now.Sub(max(c.signals.lastSegmentTime(), c.since))
				c.due = now.Add(min(max(pollEvery, silence/pollShare), maxPollDelay))
			}
			next = min(next, c.due)
			i++
		}
		if !p.sleepUntil(timer, now, next) {
			return
		}
	}
}

// takeNewConns adds the connections that watchConn was called for. If it returns none, the poller
// ends.
func (p *poller) takeNewConns(conns []polledConn, now cc.Time) []polledConn {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.joining {
		conns = append(conns, polledConn{Conn: c, since: now, due: now.Add(pollEvery)})
	}
	clear(p.joining)
	p.joining = p.joining[:0]
	p.running = len(conns) > 0
	return conns
}

// sleepUntil waits until next, or a kick; false: the poller is to end.
func (p *poller) sleepUntil(timer *time.Timer, now, next cc.Time) bool {
	p.mu.Lock()
	if len(p.joining) > 0 {
		next = min(next, now.Add(pollEvery))
	}
	p.next = next
	p.mu.Unlock()
	if next != cc.Never {
		timer.Reset(next.Sub(now))
		select {
		case <-timer.C:
		case <-p.kick:
		case <-p.closed:
			return false
		}
	}
	return true
}
