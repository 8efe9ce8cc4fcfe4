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
	c.systemControl = c.congestionName()
	c.envelope = c.systemControl
	c.dp.placeOnShard(c, shard)
	switch {
	case want&datapath.HoldWindow == 0:
		c.enforces = datapath.HoldRate
	case c.enforceWindow():
		c.enforces = datapath.HoldAll
	default:
		c.setEnvelope()
	}
	var cell *bpf.Cell
	if h := c.enforced.Load(); h != nil {
		cell = h.cell
	}
	c.ensureLimits().beginEnforcing(cell, c.enforces)
	return c.enforces
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
		h.cell.Read(&h.latest) // else the last reading serves once more
		h.startCountersAt(c.accepted.Load())
	} else {
		c.infoReporter = &infoReporter{}
		if c.readTCPInfo() != nil { // counted in errors
			return
		}
		c.infoReporter.findSYNOffset(&c.infoReporter.info, c.dialled)
		c.infoReporter.startCounting(&c.infoReporter.info)
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
	if !c.limits.Load().stopEnforcing() {
		return
	}
	c.enforces = 0
	if h := c.enforced.Load(); h != nil {
		c.dp.enforcer.releaseCell(h)
		c.enforced.Store(nil)
	}
	if c.systemControl != "" && c.systemControl != c.envelope {
		if err := c.setCongestion(c.systemControl); err != nil {
			c.errors++
		} else {
			c.envelope = c.systemControl
		}
	}
	c.errors += defaultSockopts.setOptions(c.raw)
	c.roomStep.Store(0)
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
	h.cell.Read(&h.latest) // else the last reading serves once more
	return nil
}

// sendReport reports what measure has read, answers it, and settles.
func (c *Conn) sendReport() {
	now, limits := c.dp.clock(), c.limits.Load()
	limits.noteReport()
	if h := c.enforced.Load(); h != nil {
		o := c.dp.enforcer
		o.fallbacks.Add(uint64(h.latest.Fallbacks - h.reported.Fallbacks))
		happened, fresh := o.clockTime(h.latest.At), h.latest.At != h.reported.At
		limit, before := limits.limitSince(happened)
		fin := c.ending.Load() // before what was written, all of which it follows
		r := h.makeReport(c.accepted.Load(), fin, happened, now, limit, before)
		limits.noteReading(&r, &h.reported, fresh)
		c.observer(r)
		o.answerReport(h, fresh, happened, c.dp.clock()) // after the limit that follows from it
	} else {
		c.observer(c.infoReporter.makeReport(&c.infoReporter.info, now))
	}
	c.setChangedOptions()
}

// settleQueued is settle for the tick.
func (c *Conn) setQueuedOptions() (sent bool) {
	c.inSettleList.Store(false)
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
	if c.infoReporter == nil {
		return &flow.Report{}
	}
	return &c.infoReporter.report
}
