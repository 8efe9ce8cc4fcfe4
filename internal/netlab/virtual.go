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
	down, up sim.LinkConfig
	cell     *sim.CellConfig
	packets  []entry
}

// simulationZero is where the record's clock is at the run's start; 0 would say
// that it has not begun.
const simulationZero = cc.Time(time.Second)

// Simulate plays a scenario, until it is over or ctx is done.
func Simulate(ctx context.Context, s sim.Scenario) (*Simulation, error) {
	r := &Simulation{down: s.Down, up: s.Up, cell: s.Cell}
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
		r.packets = append(r.packets, e)
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

// Report is as a path's; nothing is ever late.
func (r *Simulation) Report(from, to time.Duration) Report { return r.account().report(from, to) }

// HostReport is as a path's.
func (r *Simulation) HostReport(host int, from, to time.Duration) Report {
	return r.account().of(host).report(from, to)
}

// Series is as a path's.
func (r *Simulation) Series(dir Direction, to, step time.Duration) []Point {
	return r.account().series(dir, to, step)
}

func (r *Simulation) account() account {
	return account{down: r.down, up: r.up, cell: r.cell, zero: simulationZero, all: func(yield func(*entry) bool) {
		for i := range r.packets {
			if !yield(&r.packets[i]) {
				return
			}
		}
	}}
}
