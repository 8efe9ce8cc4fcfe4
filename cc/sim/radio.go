package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// A host counts as active in a cell when it was served in more subframes of the
// window than one, and with more blocks than four on average: what is below is
// signalling (PBE-CC, SIGCOMM 2020 §4.2.1).
const (
	activeSubframes = 2
	activeBlocks    = 4
	radioWindow     = int64(HintWindow / Subframe)
)

// radio is what a cell remembers of how it served a host: the newest subframes.
type radio struct {
	newest int64 // subframe noted last
	given  [radioWindow]int
	came   [radioWindow]cc.Bytes
	lost   cc.Bytes // payload, by the radio, since the start
}

// at returns where a subframe's notes are; those of the ones between it and the
// newest before are empty.
func (r *radio) at(subframe int64) int {
	for k := max(r.newest+1, subframe-radioWindow+1); k <= subframe; k++ {
		r.given[k%radioWindow], r.came[k%radioWindow] = 0, 0
	}
	r.newest = max(r.newest, subframe)
	return int(subframe % radioWindow)
}

// note says how many blocks the host was given in a subframe.
func (r *radio) note(subframe int64, blocks int) { r.given[r.at(subframe)] = blocks }

// arrived says that size bytes came to its queue in a subframe, dropped there or not.
func (r *radio) arrived(subframe int64, size cc.Bytes) { r.came[r.at(subframe)] += size }

// served returns the sum of the host's blocks in the window, and whether it was active.
func (r *radio) served() (blocks int, active bool) {
	subframes := 0
	for _, n := range r.given {
		blocks += n
		if n > 0 {
			subframes++
		}
	}
	return blocks, subframes >= activeSubframes && blocks > activeBlocks*subframes
}

// idle notes n subframes in which no host was given anything.
func (c *Cell) idle(n int64) {
	for _, h := range c.hosts {
		h.note(c.next+n-1, 0)
	}
}

// Report is what a monitor of the cell's control channel knows at now about the
// part of a host: averages over HintWindow.
func (c *Cell) Report(now cc.Time, host int) cc.RadioReport {
	c.advance(now)
	me := c.host(host)
	span := float64(c.window())
	used, users := 0, 1
	for _, h := range c.hosts {
		h.at(c.next - 1)
		blocks, active := h.served()
		used += blocks
		if active && h != me {
			users++
		}
	}
	mine, _ := me.served()
	return cc.RadioReport{At: c.now, Cells: []cc.RadioCell{{
		Blocks: float64(c.cfg.Blocks), BitsPerBlock: float64(me.BitsPerBlock),
		Mine: float64(mine) / span, Idle: float64(c.cfg.Blocks) - float64(used)/span, Users: users,
	}}}
}

// window is how many subframes the newest notes are about.
func (c *Cell) window() int64 { return max(1, min(c.next, radioWindow)) }

// Hint is what the cell tells the senders to a host at now: the report's meaning,
// and what it knows of the host's own queue.
func (c *Cell) Hint(now cc.Time, host int) cc.Hint {
	h := c.Report(now, host).Hint()
	me := c.host(host)
	came := cc.Bytes(0)
	for _, n := range me.came {
		came += n
	}
	h.ArrivalRate = Known(cc.RateOf(came, time.Duration(c.window())*Subframe))
	h.QueueRoom = Known(roomOf(me.QueueBytes, me.QueuePackets, me.queued, me.waiting.Len()))
	h.RadioLost = me.lost
	return h
}
