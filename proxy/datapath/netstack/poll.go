package netstack

import (
	"sync"
	"time"
)

// pollEvery is how often connections from which nothing comes are looked at: a
// stalled reader and a retransmission timeout show only here.
const pollEvery = 10 * time.Millisecond

// poller runs while a connection is observed.
type poller struct {
	stack    *Stack
	mu       sync.Mutex
	observed int
	quit     chan struct{}
	done     sync.WaitGroup
}

func (p *poller) add() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.observed++; p.observed == 1 {
		quit := make(chan struct{})
		p.quit = quit
		p.done.Go(func() { p.run(quit) })
	}
}

func (p *poller) remove() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.observed--; p.observed == 0 {
		close(p.quit)
	}
}

// stop waits until no look is underway any more; nobody observes by now.
func (p *poller) stop() { p.done.Wait() }

func (p *poller) run(quit chan struct{}) {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		select {
		case <-quit:
			return
		case <-tick.C:
		}
		for _, c := range p.stack.conns.all() {
			c.signals.look(p.stack.clock, c.timeouts, c.ended() && !c.aborted.Load())
		}
	}
}
