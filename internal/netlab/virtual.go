//go:build linux

package netlab

import (
	"context"
	"runtime"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// Simulation is the record of a run in virtual time. It is read as a path's is,
// by the same code, so that the two can stand side by side.
type Simulation struct {
	sim.Result
	History
}

// simulationZero is where the record's clock is at the run's start; 0 would say
// that it has not begun.
const simulationZero = cc.Time(time.Second)

// Simulate plays a scenario, until it is over or ctx is done.
func Simulate(ctx context.Context, s sim.Scenario) (*Simulation, error) {
	var packets []entry
	r := &Simulation{History: History{func() account {
		return account{down: s.Down, up: s.Up, cell: s.Cell, zero: simulationZero, all: func(yield func(*entry) bool) {
			for i := 0; i < len(packets) && yield(&packets[i]); i++ {
			}
		}}
	}}}
	s.Watch = func(p sim.Packet) {
		if ctx.Err() != nil {
			runtime.Goexit() // of a goroutine that has nothing else to do, see below
		}
		e := entry{
			at: simulationZero.Add(p.At), size: uint16(p.Size), host: uint16(p.Host), drop: p.Dropped,
			late: latePending,
		}
		if p.Up {
			e.dir = Up
		}
		if p.Dropped == sim.DropNone {
			e.departs, e.arrives = simulationZero.Add(p.Departs), simulationZero.Add(p.Arrives)
		}
		packets = append(packets, e)
	}
	var err error
	over := make(chan struct{})
	go func() {
		defer close(over)
		err = context.Canceled // unless the run comes to its end
		r.Result, err = sim.Run(s)
	}()
	<-over
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return r, err
}
