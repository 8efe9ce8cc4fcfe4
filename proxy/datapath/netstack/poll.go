package netstack

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// pollEvery is how often connections are looked at that wait for an
// acknowledgement: a stalled reader, a retransmission timeout and a stack that
// has stopped retransmitting show only here.
const pollEvery = 10 * time.Millisecond

// poller looks at the connections that wait for an acknowledgement. It runs only
// while there are any.
type poller struct {
	mu      sync.Mutex
	waiting map[*Conn]struct{}
	running bool
	closed  chan struct{}
	done    sync.WaitGroup
}

// watch has c looked at until it waits for nothing any more.
func (p *poller) watch(c *Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.closed:
		return
	default:
	}
	p.waiting[c] = struct{}{}
	if !p.running {
		p.running = true
		p.done.Go(p.run)
	}
}

// stop waits until no look is underway any more. Nobody is watched from now on.
func (p *poller) stop() {
	p.mu.Lock()
	close(p.closed)
	p.mu.Unlock()
	p.done.Wait()
}

func (p *poller) run() {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	var round []*Conn
	for {
		select {
		case <-p.closed:
			return
		case <-tick.C:
		}
		p.mu.Lock()
		if len(p.waiting) == 0 {
			p.running = false
			p.mu.Unlock()
			return
		}
		round = slices.AppendSeq(round[:0], maps.Keys(p.waiting))
		p.mu.Unlock()
		for _, c := range round {
			if !c.look() {
				p.forget(c)
			}
		}
		clear(round)
	}
}

// forget has c looked at no more, unless it waits again meanwhile.
func (p *poller) forget(c *Conn) {
	p.mu.Lock()
	delete(p.waiting, c)
	c.watched.Store(false)
	p.mu.Unlock()
	if c.waits() {
		c.watch()
	} else if c.over() {
		c.forget()
	}
}
