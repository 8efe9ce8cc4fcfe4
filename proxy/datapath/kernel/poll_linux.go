package kernel

import (
	"errors"
	"net"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// pollLegs polls the legs in s.list whose turn it is, up to the budget, drops those that
// are busy no more, and returns when it wants to be called next.
func (s *shard) pollLegs() (next cc.Time) {
	next = cc.Never
	budget := s.dp.budget
	for scan := len(s.list); scan > 0; scan-- {
		if s.cursor >= len(s.list) {
			s.cursor = 0
		}
		c := s.list[s.cursor]
		switch {
		case !c.active.Load(): // it left by itself
			s.list = removeLeg(s.list, s.cursor)
			continue
		case c.enforced.Load() != nil: // by now
			s.list = removeLeg(s.list, s.cursor)
			s.addLeg(c)
			continue
		case s.now.Add(Tick/2) < c.due && (c.writes.Load() == c.seen || c.isBulk()):
		case budget == 0:
			s.logOverload()
			return s.now
		default:
			budget--
			if c.pollAndNote(s.now) == polledGone {
				s.list = removeLeg(s.list, s.cursor)
				continue
			}
			c.due = s.now.Add(pollPause(s.now.Sub(c.progress)))
			if c.isBulk() {
				c.due = s.now.Add(bulkPause)
			}
		}
		next = min(next, c.due)
		s.cursor++
	}
	return next
}

// removeLeg takes the leg at i off a list; the last one takes its place.
func removeLeg(list []*Conn, i int) []*Conn {
	last := len(list) - 1
	list[i].listed = false
	list[i] = list[last]
	list[last] = nil
	return list[:last]
}

// visitLeg serves a leg whose window the kernel enforces and that has news, unless nothing
// of what was written to it is underway.
func (s *shard) visitLeg(c *Conn) {
	if !c.active.Load() {
		return
	}
	o := c.pollAndNote(s.now)
	c.due = s.now.Add(confirmAfter + c.pacedRest())
	switch {
	case o == polledQuiet, o == polledGone:
	case c.isBulk():
		s.bulk = s.now
	default:
		s.moved = s.now
	}
}

// outcome is what a poll found.
type outcome uint8

const (
	polledQuiet outcome = iota // nothing happened since the last poll
	polledBulk                 // much moved, and the window was not full
	polledGap                  // nothing moved, as happens between much that does
	polledBusy
	polledIdle // nothing more will happen until the next write
	polledGone // it need not be polled any more until it is written to
)

// pollAndNote polls a leg and remembers what came of it.
func (c *Conn) pollAndNote(now cc.Time) outcome {
	if writes := c.writes.Load(); c.seen != writes {
		c.seen, c.progress = writes, now
	}
	o := c.pollSocket()
	switch o {
	case polledBulk:
		c.bulk++
		c.gap, c.progress = 0, now
		return o
	case polledGap:
		c.gap++
		return o
	case polledBusy:
		c.progress = now
	case polledIdle:
		if c.tryRetire() {
			o = polledGone
		}
	case polledGone:
		c.removeFromTick()
	}
	c.bulk, c.gap = 0, 0
	return o
}

// A bulk leg is one on which much moves although its window is not full: its source
// or its receiver holds it back. What its window would be matters little then, and a
// poll each millisecond is the larger part of what it costs. After bulkPolls of
// bulkBytes each it is polled every bulkPause, until its window is full. A source that
// writes about once a tick leaves out a poll now and then: up to gapPolls are
// forgiven, and the leg stays with the tick meanwhile.
const (
	bulkBytes = 32 << 10
	bulkPolls = 20
	bulkPause = 4 * Tick
	gapPolls  = 3
)

func (c *Conn) isBulk() bool { return c.bulk >= bulkPolls }

// pollSocket reads the socket's state and reports it.
func (c *Conn) pollSocket() outcome {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.observer == nil {
		return polledGone
	}
	before := *c.lastReport()
	if err := c.readState(); err != nil {
		if errors.Is(err, net.ErrClosed) {
			return polledGone
		}
		return polledQuiet
	}
	c.sendReport()
	drained := c.isDrained()
	o := c.compareReports(&before, drained)
	if drained && o != polledIdle {
		c.markForPoll() // there may be no more news
	}
	return o
}

// compareReports compares the newest report with the one before.
func (c *Conn) compareReports(before *flow.Report, drained bool) outcome {
	after := c.lastReport()
	moved := after.Written - before.Written
	switch {
	case moved >= bulkBytes && !c.windowIsFull(after.Written-before.Acked):
		return polledBulk
	case moved == 0 && drained: // what has just moved is rarely the last
		if c.bulk > 0 && c.gap < gapPolls {
			return polledGap
		}
		return polledIdle
	case before.Written == after.Written && before.Acked == after.Acked && before.Unsent == after.Unsent &&
		before.Pipe == after.Pipe && before.Lost == after.Lost && before.Timeouts == after.Timeouts:
		return polledQuiet
	}
	return polledBusy
}

// windowIsFull tells whether the window holds the leg back. Where the relay keeps it, used is
// what the relay took of it until the last poll.
func (c *Conn) windowIsFull(used cc.Bytes) bool {
	r := c.lastReport()
	if c.enforced.Load() != nil {
		return r.Unsent > 0 && !r.RwndFull
	}
	return used+2*r.MSS > c.limits.Load().cwnd()
}

// The kernel can take in an acknowledgement without calling the congestion control, as
// Linux 6.18 does now and then where many come at once. The next one makes up for it, but
// after the last bytes there is none: they would be in flight for ever. So of a leg that
// has said nothing for confirmAfter, though nothing more waits for its pacing rate,
// TCP_INFO tells whether all has arrived; where it has not, again after as long as it has
// been silent, up to mostConfirm.
const (
	confirmAfter = 256 * Tick
	mostConfirm  = 16 * time.Second
)

// pacedRest is how long what waits unsent takes at the pacing rate, up to mostConfirm.
func (c *Conn) pacedRest() time.Duration {
	c.mu.Lock()
	unsent := c.lastReport().Unsent
	c.mu.Unlock()
	if rate := c.limits.Load().pacingRate(); unsent > 0 && rate > 0 {
		return min(rate.TimeFor(unsent), mostConfirm)
	}
	return 0
}

// confirmWatched looks at so many legs in s.watched that each has its turn once in confirmAfter,
// and drops those that are busy no more.
func (s *shard) confirmWatched() {
	turns := len(s.watched)
	if passed := s.now.Sub(s.turned); s.enforced.Load() > 0 && passed < confirmAfter {
		turns = int((time.Duration(turns)*passed + confirmAfter - 1) / confirmAfter)
	}
	s.turned = s.now
	for ; turns > 0; turns-- {
		if s.turn >= len(s.watched) {
			s.turn = 0
		}
		c := s.watched[s.turn]
		switch {
		case !c.active.Load():
			s.watched = removeLeg(s.watched, s.turn)
			continue
		case c.enforced.Load() == nil: // by now
			s.watched = removeLeg(s.watched, s.turn)
			s.addLeg(c)
			continue
		case s.now >= c.due:
			c.confirmArrivals()
			c.due = s.now.Add(min(max(confirmAfter, s.now.Sub(c.progress)), mostConfirm))
		}
		s.turn++
	}
}

// confirmArrivals has the tick report what has arrived without being said.
func (c *Conn) confirmArrivals() {
	c.mu.Lock()
	defer c.mu.Unlock()
	h := c.enforced.Load()
	if h == nil || c.observer == nil || c.isDrained() {
		return
	}
	wrote := c.wrote.Load() // before the socket says that it has nothing left
	if c.readTCPInfo() == nil && c.status.isDrained() && !c.status.closed {
		h.confirmArrival(wrote)
		h.cell.Mark()
	}
}
