package proxy

import "sync"

// idleSetups is how many goroutines of a setupPool wait for the next connection.
const idleSetups = 32

// setupPool runs the steps of connections that may wait, up to the relay. Such a step needs a stack of
// 16 KB, and growing one costs a tenth of a short connection. So goroutines are used again.
type setupPool struct {
	next chan func()
	done chan struct{}
	idle chan struct{} // has room for idleSetups
	all  sync.WaitGroup
}

func newSetupPool() setupPool {
	return setupPool{next: make(chan func()), done: make(chan struct{}), idle: make(chan struct{}, idleSetups)}
}

// runSetup runs f on an idle goroutine, or on a new one. It does not wait.
func (s *setupPool) runSetup(f func()) {
	select {
	case s.next <- f:
	default:
		s.all.Go(func() { s.setupLoop(f) })
	}
}

// setupLoop runs f, and then what runSetup hands over. It ends when idleSetups others wait already.
func (s *setupPool) setupLoop(f func()) {
	for {
		f()
		select {
		case s.idle <- struct{}{}:
		default:
			return
		}
		select {
		case f = <-s.next:
			<-s.idle
		case <-s.done:
			return
		}
	}
}

// waitForAll waits until all functions have returned. runSetup is not called after it.
func (s *setupPool) waitForAll() {
	close(s.done)
	s.all.Wait()
}
