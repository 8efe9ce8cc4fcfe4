package kernel

import (
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

// Enforce implements datapath.Conn.
func (c *Conn) Enforce(want datapath.Hold, shard int) datapath.Hold {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0
	}
	c.endObservation()
	if want == 0 {
		return 0
	}
	c.system = c.congestionName()
	c.envelope = c.system
	c.dp.placeOnShard(c, shard)
	switch {
	case want&datapath.HoldWindow == 0:
		c.holds = datapath.HoldRate
	case c.enforceWindow():
		c.holds = datapath.HoldAll
	default:
		c.setEnvelope()
	}
	var cell *bpf.Cell
	if h := c.enforced.Load(); h != nil {
		cell = h.cell
	}
	c.ensureLimits().beginKeeping(cell, c.holds)
	return c.holds
}

// ensureLimits returns the leg's limits, and makes them if there are none yet. mu is held.
func (c *Conn) ensureLimits() *limits {
	if c.limits.Load() == nil {
		c.limits.Store(&limits{})
	}
	return c.limits.Load()
}

// enforceWindow has the kernel enforce the window, if it can.
func (c *Conn) enforceWindow() bool {
	if c.dp.enforcer == nil {
		return false
	}
	h, err := c.dp.enforcer.bindCell(c)
	if err != nil {
		c.noteMissing(err.Error())
		return false
	}
	c.enforced.Store(h)
	c.envelope = EBPF
	return true
}

// setEnvelope sets the envelope below a window that the relay keeps.
func (c *Conn) setEnvelope() {
	name := c.dp.envelope
	if name == "" || name == c.envelope {
		return
	}
	if err := c.setCongestion(name); err != nil {
		c.noteMissing(envelopeRefused(name, err))
		return
	}
	c.envelope = name
}

// Observe implements datapath.Conn. report must not call back, but for Apply.
func (c *Conn) Observe(report func(flow.Report)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	if report == nil {
		c.endObservation()
		return
	}
	c.makeLastReport()
	if h := c.enforced.Load(); h != nil {
		h.cell.Read(&h.next) // else the last reading serves once more
		h.startCountersAt(c.wrote.Load())
	} else {
		c.account = &account{}
		if c.readTCPInfo() != nil { // counted in errors
			return
		}
		c.account.findSYNOffset(&c.account.info, c.dialled)
		c.account.startCounting(&c.account.info)
	}
	c.dp.placeOnShard(c, 0)
	c.ensureLimits()
	c.observer = report
	c.observed.Store(true)
	c.sendReport()
	if !c.isDrained() {
		c.addToTick()
	}
}

// makeLastReport makes the last report of an observation, if there is one.
func (c *Conn) makeLastReport() {
	if c.observer == nil {
		return
	}
	if c.readState() == nil {
		c.sendReport()
	}
	c.observed.Store(false)
	c.observer = nil
	c.removeFromTick()
}

// endObservation ends an observation and gives the socket back what it had before Enforce.
func (c *Conn) endObservation() {
	c.makeLastReport()
	if !c.limits.Load().stopKeeping() {
		return
	}
	c.holds = 0
	if h := c.enforced.Load(); h != nil {
		c.dp.enforcer.releaseCell(h)
		c.enforced.Store(nil)
	}
	if c.system != "" && c.system != c.envelope {
		if err := c.setCongestion(c.system); err != nil {
			c.errors++
		} else {
			c.envelope = c.system
		}
	}
	c.errors += born.setOptions(c.raw)
	c.piece.Store(0)
	c.missing = c.dp.missing
}

// noteMissing adds to what Info names as missing.
func (c *Conn) noteMissing(words string) {
	c.missing = append(c.missing[:len(c.missing):len(c.missing)], words)
}

// congestionName is the name of the socket's congestion control; empty: unknown.
func (c *Conn) congestionName() (name string) {
	_ = c.raw.Visit(func(fd int) error {
		name = envelopeOf(fd)
		return nil
	})
	return name
}

func (c *Conn) setCongestion(name string) error {
	return c.raw.Visit(func(fd int) error {
		return unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, name)
	})
}

// readState reads the state that is to be reported.
func (c *Conn) readState() error {
	h := c.enforced.Load()
	if h == nil {
		return c.readTCPInfo()
	}
	h.cell.Read(&h.next) // else the last reading serves once more
	return nil
}

// sendReport reports what measure has read, answers it, and settles.
func (c *Conn) sendReport() {
	now, limits := c.dp.clock(), c.limits.Load()
	limits.noteReport()
	if h := c.enforced.Load(); h != nil {
		o := c.dp.enforcer
		o.fallbacks.Add(uint64(h.next.Fallbacks - h.seen.Fallbacks))
		happened, fresh := o.clockTime(h.next.At), h.next.At != h.seen.At
		limit, before := limits.limitSince(happened)
		fin := c.ending.Load() // before what was written, all of which it follows
		r := h.makeReport(c.wrote.Load(), fin, happened, now, limit, before)
		limits.noteReading(&r, &h.seen, fresh)
		c.observer(r)
		o.answerReport(h, fresh, happened, c.dp.clock()) // after the limit that follows from it
	} else {
		c.observer(c.account.makeReport(&c.account.info, now))
	}
	c.setChangedOptions()
}

// settleQueued is settle for the tick.
func (c *Conn) settleQueued() (sent bool) {
	c.queued.Store(false)
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.closed && c.setChangedOptions()
}

// isDrained says whether nothing more will happen to what was written.
func (c *Conn) isDrained() bool {
	h := c.enforced.Load()
	if h == nil {
		return c.status.isDrained()
	}
	r := &h.report
	return r.Unsent == 0 && r.Acked == r.Written
}

// lastReport is the report that was made last.
func (c *Conn) lastReport() *flow.Report {
	if h := c.enforced.Load(); h != nil {
		return &h.report
	}
	if c.account == nil {
		return &flow.Report{}
	}
	return &c.account.report
}
