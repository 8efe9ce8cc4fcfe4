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
	c.release()
	if want == 0 {
		return 0
	}
	c.system = c.congestion()
	c.envelope = c.system
	c.dp.place(c, shard)
	switch {
	case want&datapath.HoldWindow == 0:
		c.holds = datapath.HoldRate
	case c.enforceWindow():
		c.holds = datapath.HoldAll
	default:
		c.widen()
	}
	var cell *bpf.Cell
	if h := c.enforced.Load(); h != nil {
		cell = h.cell
	}
	c.limited().begin(cell, c.holds)
	return c.holds
}

// limited returns the leg's limits, and makes them if there are none yet. mu is held.
func (c *Conn) limited() *limits {
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
	h, err := c.dp.enforcer.bind(c)
	if err != nil {
		c.lack(err.Error())
		return false
	}
	c.enforced.Store(h)
	c.envelope = EBPF
	return true
}

// widen sets the envelope below a window that the relay keeps.
func (c *Conn) widen() {
	name := c.dp.envelope
	if name == "" || name == c.envelope {
		return
	}
	if err := c.setCongestion(name); err != nil {
		c.lack(envelopeRefused(name, err))
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
		c.release()
		return
	}
	c.conclude()
	if h := c.enforced.Load(); h != nil {
		h.cell.Read(&h.next) // else the last reading serves once more
		h.from(c.wrote.Load())
	} else {
		c.account = &account{}
		if c.refresh() != nil { // counted in errors
			return
		}
		c.account.calibrate(&c.account.info, c.dialled)
		c.account.start(&c.account.info)
	}
	c.dp.place(c, 0)
	c.limited()
	c.observer = report
	c.observed.Store(true)
	c.report()
	if !c.drained() {
		c.activate()
	}
}

// conclude makes the last report of an observation, if there is one.
func (c *Conn) conclude() {
	if c.observer == nil {
		return
	}
	if c.measure() == nil {
		c.report()
	}
	c.observed.Store(false)
	c.observer = nil
	c.retire()
}

// release ends an observation and gives the socket back what it had before Enforce.
func (c *Conn) release() {
	c.conclude()
	if !c.limits.Load().end() {
		return
	}
	c.holds = 0
	if h := c.enforced.Load(); h != nil {
		c.dp.enforcer.release(h)
		c.enforced.Store(nil)
	}
	if c.system != "" && c.system != c.envelope {
		if err := c.setCongestion(c.system); err != nil {
			c.errors++
		} else {
			c.envelope = c.system
		}
	}
	c.errors += born.set(c.raw)
	c.piece.Store(0)
	c.missing = c.dp.missing
}

// lack adds to what Info names as missing.
func (c *Conn) lack(words string) {
	c.missing = append(c.missing[:len(c.missing):len(c.missing)], words)
}

// congestion is the name of the socket's congestion control; empty: unknown.
func (c *Conn) congestion() (name string) {
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

// measure reads the state that is to be reported.
func (c *Conn) measure() error {
	h := c.enforced.Load()
	if h == nil {
		return c.refresh()
	}
	h.cell.Read(&h.next) // else the last reading serves once more
	return nil
}

// report reports what measure has read, answers it, and settles.
func (c *Conn) report() {
	now, limits := c.dp.clock(), c.limits.Load()
	limits.report()
	if h := c.enforced.Load(); h != nil {
		o := c.dp.enforcer
		o.fallbacks.Add(uint64(h.next.Fallbacks - h.seen.Fallbacks))
		happened, fresh := o.when(h.next.At), h.next.At != h.seen.At
		limit, before := limits.since(happened)
		fin := c.ending.Load() // before what was written, all of which it follows
		r := h.step(c.wrote.Load(), fin, happened, now, limit, before)
		limits.reading(&r, &h.seen, fresh)
		c.observer(r)
		o.answer(h, fresh, happened, c.dp.clock()) // after the limit that follows from it
	} else {
		c.observer(c.account.step(&c.account.info, now))
	}
	c.settle()
}

// settleQueued is settle for the tick.
func (c *Conn) settleQueued() (sent bool) {
	c.queued.Store(false)
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.closed && c.settle()
}

// drained says whether nothing more will happen to what was written.
func (c *Conn) drained() bool {
	h := c.enforced.Load()
	if h == nil {
		return c.status.drained()
	}
	r := &h.report
	return r.Unsent == 0 && r.Acked == r.Written
}

// last is the report that was made last.
func (c *Conn) last() *flow.Report {
	if h := c.enforced.Load(); h != nil {
		return &h.report
	}
	if c.account == nil {
		return &flow.Report{}
	}
	return &c.account.report
}
