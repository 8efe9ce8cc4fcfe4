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
	budget := s.dp.pollBudget
	for scan := len(s.pollList); scan > 0; scan-- {
		if s.pollTurn >= len(s.pollList) {
			s.pollTurn = 0
		}
		c := s.pollList[s.pollTurn]
		switch {
		case !c.onTick.Load(): // it left by itself
			s.pollList = removeLeg(s.pollList, s.pollTurn)
			continue
		case c.enforced.Load() != nil: // by now
			s.pollList = removeLeg(s.pollList, s.pollTurn)
			s.addLeg(c)
			continue
		case s.tickTime.Add(Tick/2) < c.nextPoll && (c.writeCount.Load() == c.seenWrites || c.isBulk()):
		case budget == 0:
			s.logOverload()
			return s.tickTime
		default:
			budget--
			if c.pollAndNote(s.tickTime) == polledGone {
				s.pollList = removeLeg(s.pollList, s.pollTurn)
				continue
			}
			c.nextPoll = s.tickTime.Add(pollPause(s.tickTime.Sub(c.progressAt)))
			if c.isBulk() {
				c.nextPoll = s.tickTime.Add(bulkPause)
			}
		}
		next = min(next, c.nextPoll)
		s.pollTurn++
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
	if !c.onTick.Load() {
		return
	}
	o := c.pollAndNote(s.tickTime)
	c.nextPoll = s.tickTime.Add(confirmAfter + c.pacedRest())
	switch {
	case o == polledQuiet, o == polledGone:
	case c.isBulk():
		s.bulkAt = s.tickTime
	default:
		s.progressAt = s.tickTime
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
	if writes := c.writeCount.Load(); c.seenWrites != writes {
		c.seenWrites, c.progressAt = writes, now
	}
	o := c.pollSocket()
	switch o {
	case polledBulk:
		c.bulkStreak++
		c.gapStreak, c.progressAt = 0, now
		return o
	case polledGap:
		c.gapStreak++
		return o
	case polledBusy:
		c.progressAt = now
	case polledIdle:
		if c.tryRetire() {
			o = polledGone
		}
	case polledGone:
		c.removeFromTick()
	}
	c.bulkStreak, c.gapStreak = 0, 0
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

func (c *Conn) isBulk() bool { return c.bulkStreak >= bulkPolls }

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
		if c.bulkStreak > 0 && c.gapStreak < gapPolls {
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
	maxConfirm   = 16 * time.Second
)

// pacedRest is how long what waits unsent takes at the pacing rate, up to mostConfirm.
func (c *Conn) pacedRest() time.Duration {
	c.mu.Lock()
	unsent := c.lastReport().Unsent
	c.mu.Unlock()
	if rate := c.limits.Load().pacingRate(); unsent > 0 && rate > 0 {
		return min(rate.TimeFor(unsent), maxConfirm)
	}
	return 0
}

// confirmWatched looks at so many legs in s.watched that each has its turn once in confirmAfter,
// and drops those that are busy no more.
func (s *shard) confirmQuietLegs() {
	turns := len(s.confirmList)
	if passed := s.tickTime.Sub(s.confirmedAt); s.enforcedBusy.Load() > 0 && passed < confirmAfter {
		turns = int((time.Duration(turns)*passed + confirmAfter - 1) / confirmAfter)
	}
	s.confirmedAt = s.tickTime
	for ; turns > 0; turns-- {
		if s.confirmTurn >= len(s.confirmList) {
			s.confirmTurn = 0
		}
		c := s.confirmList[s.confirmTurn]
		switch {
		case !c.onTick.Load():
			s.confirmList = removeLeg(s.confirmList, s.confirmTurn)
			continue
		case c.enforced.Load() == nil: // by now
			s.confirmList = removeLeg(s.confirmList, s.confirmTurn)
			s.addLeg(c)
			continue
		case s.tickTime >= c.nextPoll:
			c.confirmArrivals()
			c.nextPoll = s.tickTime.Add(min(max(confirmAfter, s.tickTime.Sub(c.progressAt)), maxConfirm))
		}
		s.confirmTurn++
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
	wrote := c.accepted.Load() // before the socket says that it has nothing left
	if c.readTCPInfo() == nil && c.status.isDrained() && !c.status.closed {
		h.confirmArrival(wrote)
		h.cell.Mark()
	}
}
