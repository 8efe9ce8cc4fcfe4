package flow

import "github.com/penstock-net/penstock/cc"

// onTimer serves what has become due: the algorithm's clock, a hint that grows old, an idle
// group, a division.
func (g *group) onTimer(now cc.Time) {
	var events [1]Event
	n := 0
	g.mu.Lock()
	if g.reapplyCaps(now) {
		g.sendNow = true
	}
	if len(g.members) > 0 && g.alg != nil && g.ctl.NextTick != 0 {
		if g.ctl.NextTick <= now {
			events[0], n, g.sendNow = g.tickAlgorithm(now), 1, true
		} else {
			g.timers.scheduleAt(g, g.ctl.NextTick)
		}
	}
	g.changed = g.changed || len(g.alloc.members) > 1
	g.wakeDatagrams(now)
	g.divideIfDue(now)
	g.mu.Unlock()
	g.emitEvents(events[:n]...)
}
