package flow

import "github.com/penstock-net/penstock/cc"

// tick serves what has become due: the algorithm's clock, a hint that grows old, an idle
// group, a division.
func (g *group) tick(now cc.Time) {
	var events [1]Event
	n := 0
	g.mu.Lock()
	if g.recap(now) {
		g.now = true
	}
	if len(g.members) > 0 && g.alg != nil && g.ctl.NextTick != 0 {
		if g.ctl.NextTick <= now {
			events[0], n, g.now = g.clock(now), 1, true
		} else {
			g.timers.schedule(g, g.ctl.NextTick)
		}
	}
	g.changed = g.changed || len(g.alloc.members) > 1
	g.wakeDatagrams(now)
	g.settle(now)
	g.mu.Unlock()
	g.trace(events[:n]...)
}
