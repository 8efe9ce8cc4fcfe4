package stage

import (
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// dial is how long a new connection of a host takes from a moment on, in virtual time, until its request has
// reached the server: a handshake, and the request.
func (s Stage) dial(at time.Duration, host int) time.Duration {
	now := at
	for _, up := range []bool{true, false, true} {
		now = s.propagated(now, up, host)
	}
	return now - at
}

// propagated is when what leaves at a moment arrives; nothing else is on the way.
func (s Stage) propagated(at time.Duration, up bool, host int) time.Duration {
	way := s.Down
	switch {
	case up:
		way = s.Up
	case s.Cell != nil:
		way = sim.LinkConfig{Delay: s.Cell.Delay}
	}
	for _, c := range s.Changes {
		if c.Delay > 0 && c.At <= at {
			way.Delay = c.Delay
		}
	}
	if !up && s.Cell != nil {
		way.Delay += s.Cell.Host(host).Delay
	}
	line := sim.NewLink(sim.LinkConfig{Delay: way.Delay, Delays: way.Delays}, 0)
	return time.Duration(line.Send(cc.Time(at), 0).Arrives)
}
