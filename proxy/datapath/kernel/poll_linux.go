package kernel

// poll serves the conns whose turn it is, up to the budget, and drops those
// that have drained. It reports whether all that are left are easy.
func (d *Datapath) poll() (easy bool) {
	budget := d.budget
	easy = true
	for scan := len(d.active); scan > 0 && budget > 0; scan-- {
		if d.cursor >= len(d.active) {
			d.cursor = 0
		}
		c := d.active[d.cursor]
		if d.ticks < c.due && (c.writes.Load() == c.seen || c.isEasy()) {
			easy = easy && c.isEasy()
			d.cursor++
			continue
		}
		budget--
		if !c.serve() {
			d.active = drop(d.active, d.cursor)
			continue
		}
		c.due = d.ticks + pause(c.quiet)
		if c.isEasy() {
			c.due = d.ticks + easyPause
		}
		easy = easy && c.isEasy()
		d.cursor++
	}
	return easy && budget > 0
}

// heldRounds is in how many ticks every leg that the kernel holds is looked at
// even without news: its share may have changed by what others did.
const heldRounds = 64

// attend serves the legs whose windows the kernel holds: those with news, up to
// the budget, and a few of the rest.
func (d *Datapath) attend() error {
	err := d.holder.acks()
	d.holder.news(d.budget, d.look)
	for n := (len(d.awake) + heldRounds - 1) / heldRounds; n > 0 && len(d.awake) > 0; n-- {
		if d.turn++; d.turn >= len(d.awake) {
			d.turn = 0
		}
		if c := d.awake[d.turn]; d.ticks >= c.due {
			d.look(c)
		}
	}
	return err
}

// look serves a leg that the kernel holds, unless it is not awake: then nothing
// that was written is underway.
func (d *Datapath) look(c *Conn) {
	if c.place >= len(d.awake) || d.awake[c.place] != c {
		return
	}
	if c.isEasy() {
		d.easy--
	}
	if c.serve() {
		c.due = d.ticks + heldRounds
		if c.isEasy() {
			d.easy++
		}
		return
	}
	last := d.awake[len(d.awake)-1]
	last.place = c.place
	d.awake = drop(d.awake, c.place)
}

// serve polls a conn and remembers what came of it; false: it need not be
// polled any more until it is written to.
func (c *Conn) serve() bool {
	if writes := c.writes.Load(); c.seen != writes {
		c.seen, c.quiet = writes, 0
	}
	switch c.poll() {
	case polledGone:
		c.easy = 0
		return false
	case polledIdle:
		c.quiet, c.easy, c.lull = 0, 0, 0
		return !c.leave()
	case polledBusy:
		c.quiet, c.easy, c.lull = 0, 0, 0
	case polledQuiet:
		c.quiet++
		c.easy, c.lull = 0, 0
	case polledEasy:
		c.quiet, c.lull = 0, 0
		c.easy++
	case polledLull:
		c.lull++
	}
	return true
}

// A leg on which much moves although no sender waits for room is held back by
// its source or its receiver. What its window would be matters little then, and
// a poll each millisecond is the larger part of what it costs. After easyPolls
// of easyBytes each it is polled every easyPause ticks, until somebody waits. A
// source that writes about once a tick leaves out a poll now and then: up to
// lullPolls are forgiven, and the leg stays with the tick meanwhile.
const (
	easyBytes = 32 << 10
	easyPolls = 20
	easyPause = 4
	lullPolls = 3
)

func (c *Conn) isEasy() bool { return c.easy >= easyPolls }

// drop takes the conn at i out; the last one takes its place.
func drop(conns []*Conn, i int) []*Conn {
	last := len(conns) - 1
	conns[i] = conns[last]
	conns[last] = nil
	return conns[:last]
}

// pause returns in how many ticks to poll again a conn on which nothing
// happened for so many polls: a stalled reader should not cost a poll every
// millisecond. Below 64 ms of silence it is one tick, above it the poll comes
// late by at most 1/64 of the silence, and by no more than 16 ms.
func pause(quiet uint64) uint64 { return min(max(1, quiet/64), 16) }
