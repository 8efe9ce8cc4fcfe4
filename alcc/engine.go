package alcc

import (
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// engine has what all connections of the process share: their windows, and what calls their ticks. It
// starts with the first connection and lives as long as the process.
type engine struct {
	start   time.Time
	flows   flow.Manager
	agents  agents
	sockets *sockets // the kernel datapath; nil: it cannot be had
	missing string   // why sockets is nil

	arm  chan struct{} // wakes tickLoop, which calls ticks if sockets is nil
	stop chan struct{}
}

// sharedEngine returns the engine of the process.
var sharedEngine = sync.OnceValue(func() *engine { return newEngine("") })

// newEngine starts an engine. envelope is that of the kernel datapath; empty: the best that the process may use.
func newEngine(envelope string) *engine {
	e := &engine{arm: make(chan struct{}, 1), stop: make(chan struct{})}
	e.start = time.Now() //nolint:forbidigo // the program's clock
	e.flows.Lookup = e.agents.lookupAlgorithm
	var err error
	if e.sockets, err = openSockets(e, envelope); err != nil {
		e.missing = err.Error()
		e.flows.Arm = func(int, cc.Time) { notify(e.arm) }
		go e.tickLoop()
	}
	return e
}

// now returns the time since the engine started; it is above zero.
func (e *engine) now() cc.Time { return 1 + cc.Time(time.Since(e.start)) } //nolint:forbidigo // the program's clock

// tickLoop calls the flows' ticks when they are due.
func (e *engine) tickLoop() {
	timer := time.NewTimer(time.Hour) //nolint:forbidigo // as above
	defer timer.Stop()
	for {
		if next := e.flows.Tick(0, e.now()); next == cc.Never {
			timer.Stop()
		} else {
			timer.Reset(max(0, next.Sub(e.now())))
		}
		select {
		case <-timer.C:
		case <-e.arm:
		case <-e.stop:
			return
		}
	}
}

// close ends what newEngine has started.
func (e *engine) close() error {
	close(e.stop)
	if e.sockets == nil {
		return nil
	}
	return e.sockets.Close()
}

// notify puts a value into a channel with room for one, unless it is full.
func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
