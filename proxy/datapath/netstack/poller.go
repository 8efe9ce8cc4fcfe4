package netstack

import (
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// The poller checks a connection that waits for an acknowledgement pollEvery after a write. It
// checks again after the time since the last segment divided by pollShare, but no less than
// pollEvery and no more than maxPollDelay. A stalled reader, a retransmission timeout and a stack
// that has stopped retransmitting show only in these checks.
const (
	pollEvery    = 10 * time.Millisecond
	pollShare    = 8
	maxPollDelay = tcp.MinRTO
)

// poller checks the connections that wait for an acknowledgement. Its goroutine runs only while
// there are any.
type poller struct {
	clock   func() cc.Time
	mu      sync.Mutex
	joining []*Conn // given to watchConn, and not yet taken by pollLoop
	next    cc.Time // time of the next check
	running bool
	wake    chan struct{} // next has become earlier
	closed  chan struct{}
	done    sync.WaitGroup
}

// polledConn is a connection that the poller checks.
type polledConn struct {
	*Conn
	since cc.Time // when the poller took it
	due   cc.Time // time of its next check
}

// newPoller returns a poller without a goroutine; watchConn starts it.
func newPoller(clock func() cc.Time) poller {
	return poller{clock: clock, wake: make(chan struct{}, 1), closed: make(chan struct{})}
}

// watchConn makes the poller check c until c waits for no acknowledgement any more.
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
		p.next = soon // so that further calls do not wake the poller again
		datapath.Signal(p.wake)
	}
}

// stopAndWait ends the poller, and waits until it has ended.
func (p *poller) stopAndWait() {
	p.mu.Lock()
	close(p.closed)
	p.mu.Unlock()
	p.done.Wait()
}

// pollLoop is the poller's goroutine. Its list of connections is a local variable, so that checks
// take no lock of the poller.
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

// takeNewConns adds the joining connections to conns. If it returns none, the poller ends.
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

// sleepUntil waits until next, or until the poller is woken; false: the poller is to end.
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
		case <-p.wake:
		case <-p.closed:
			return false
		}
	}
	return true
}
