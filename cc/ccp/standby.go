package ccp

import "github.com/penstock-net/penstock/cc"

// agentIsOver says whether the agent decides no more, and why.
func (f *Flow) agentIsOver(s cc.State) (why reason, over bool) {
	unread := cc.Time(f.agent.unread.Load())
	switch {
	case f.epoch != f.agent.epoch.Load():
		return gone, true
	case f.starts != f.agent.starts.Load() && f.asked != 0 && s.Now.Sub(f.asked) > Patience(s.SRTT):
		return gone, true // it has begun anew, and answers for this flow no more
	case unread != 0 && s.Now.Sub(unread) > Patience(s.SRTT):
		return stalled, true
	case f.asked != 0 && s.Now.Sub(f.asked) > f.silence:
		return silent, true
	case f.failed != 0 && f.aborted >= leastAborted && s.Now.Sub(f.failed) > Patience(s.SRTT):
		return failing, true
	}
	return 0, false
}

// isForgotten reports whether the agent does not know a suspended flow any more: it has gone, has begun anew, or has
// read reports and answered none for as long again as made it count as silent.
func (f *Flow) isForgotten(s cc.State) bool {
	if f.epoch != f.agent.epoch.Load() || f.starts != f.agent.starts.Load() {
		return true
	}
	if f.agent.unread.Load() != 0 { // it cannot have answered what it has not read
		f.asked = s.Now
	}
	return f.asked != 0 && s.Now.Sub(f.asked) > 2*f.silence
}

// fallBack lets the fallback decide: from the window that there is, but with no more than
// what has arrived of late in a round trip, or ten segments. The path is known to carry
// that. An agent that is slow keeps the flow.
func (f *Flow) fallBack(s cc.State, why reason) {
	least := cc.InitialCwndPackets * f.mss
	inForce := f.Control().Cwnd
	cfg := f.cfg
	cfg.MSS, cfg.Wake, cfg.Ssthresh = f.mss, nil, 0
	if arrived := f.allowance.delivered(); arrived >= least {
		cfg.Ssthresh = min(inForce, arrived)
	}
	cfg.InitialCwnd = max(f.mss, min(inForce, max(least, cfg.Ssthresh)))
	f.standby = f.fallback.New(cfg)
	f.suspended = why == stalled || why == silent
	f.fallbacks++
	f.agent.counters.fallbacks[why].Add(1)
	f.agent.counters.steered.Add(^uint64(0))
	if f.suspended {
		return
	}
	f.renumber()
	if why == failing { // the same program would fail again
		f.epoch, f.create = f.agent.epoch.Load(), s.Now.Add(afterFailing)
	}
}

// renumber makes the flow a new one to the agent: what the agent says about the old one is late.
func (f *Flow) renumber() {
	f.closeAtAgent()
	f.agent.openFlow(f)
	f.suspended = false
	f.epoch, f.create, f.retry, f.asked, f.failed = 0, 0, createFirst, 0, 0
	f.mu.Lock()
	f.staged = staged{}
	f.mu.Unlock()
}

// resume lets the agent decide again for a suspended flow. The window goes on from that of the fallback: it rises to
// what the agent asked for last as in slow start, and does not fall until the agent asks for less.
func (f *Flow) resume() {
	held := f.standby.Control().Cwnd
	f.standby, f.suspended = nil, false
	f.failed = 0
	f.resumed = max(held, leastWindow*f.mss)
	f.ctl.Cwnd = max(f.ctl.Cwnd, held)
	f.agent.counters.steered.Add(1)
}

// raiseResumed raises the bound on a resumed flow's window by what was acknowledged.
func (f *Flow) raiseResumed(acked cc.Bytes) {
	if f.resumed == 0 {
		return
	}
	if f.resumed += acked; f.resumed >= f.ctl.Cwnd {
		f.resumed = 0
	}
}
