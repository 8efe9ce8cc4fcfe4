package proxy

import "sync"

// idleSetters is how many goroutines that set connections up wait for the next.
const idleSetters = 32

// setupPool are the goroutines that bring connections to where they are relayed. What that
// takes is a stack of 16 KB, and to grow one is a tenth of what a short connection costs:
// so they are used again.
type setupPool struct {
	next chan func()
	done chan struct{}
	idle chan struct{} // has room for idleSetters
	all  sync.WaitGroup
}

func newSetters() setupPool {
	return setupPool{next: make(chan func()), done: make(chan struct{}), idle: make(chan struct{}, idleSetters)}
}

// runSetup has f run on a goroutine that waits, or on a new one.
func (s *setupPool) runSetup(f func()) {
	select {
	case s.next <- f:
	default:
		s.all.Go(func() { s.setupLoop(f) })
	}
}

// setupLoop runs f and what comes after it, unless enough others wait.
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

// waitForAll waits until all that do was given has run; it is given no more.
func (s *setupPool) waitForAll() {
	close(s.done)
	s.all.Wait()
}
