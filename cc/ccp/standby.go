package ccp

import "github.com/penstock-net/penstock/cc"

// shouldFallBack reports whether the agent must decide no longer, and why.
func (f *Flow) shouldFallBack(s cc.State) (why reason, should bool) {
	unread := cc.Time(f.agent.unread.Load())
	switch {
	case f.epoch != f.agent.epoch.Load():
		return gone, true
	case f.starts != f.agent.starts.Load() && f.asked != 0 && s.Now.Sub(f.asked) > Patience(s.SRTT):
		return gone, true // the agent has started anew, and does not know this flow
	case unread != 0 && s.Now.Sub(unread) > Patience(s.SRTT):
		return stalled, true
	case f.asked != 0 && s.Now.Sub(f.asked) > f.silence:
		return silent, true
	case f.failed != 0 && f.aborted >= minAborted && s.Now.Sub(f.failed) > Patience(s.SRTT):
		return failing, true
	}
	return 0, false
}

// isForgotten reports whether the agent does not know a suspended flow any more. It has gone, has started anew, or has
// read reports without an answer for twice the time after which it counts as silent.
func (f *Flow) isForgotten(s cc.State) bool {
	if f.epoch != f.agent.epoch.Load() || f.starts != f.agent.starts.Load() {
		return true
	}
	if f.agent.unread.Load() != 0 { // unread reports cannot be answered
		f.asked = s.Now
	}
	return f.asked != 0 && s.Now.Sub(f.asked) > 2*f.silence
}

// fallBack makes the fallback decide. It starts from the window in force, but with no more than the path
// has recently delivered in a round trip, or ten segments. A slow agent keeps the flow, which is
// suspended.
func (f *Flow) fallBack(s cc.State, why reason) {
	least := cc.InitialCwndPackets * f.mss
	inForce := f.Control().Cwnd
	cfg := f.cfg
	cfg.MSS, cfg.Wake, cfg.Ssthresh = f.mss, nil, 0
	if delivered := f.allowance.deliveredPerRTT(); delivered >= least {
		cfg.Ssthresh = min(inForce, delivered)
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
	f.renumberFlow()
	if why == failing { // the same program would fail again
		f.epoch, f.createAt = f.agent.epoch.Load(), s.Now.Add(afterFailing)
	}
}

// renumberFlow gives the flow a new number, so that it is a new flow to the agent. Messages about the old one are
// late.
func (f *Flow) renumberFlow() {
	f.closeAtAgent()
	f.agent.openFlow(f)
	f.suspended = false
	f.epoch, f.createAt, f.createDelay, f.asked, f.failed = 0, 0, minCreateDelay, 0, 0
	f.mu.Lock()
	f.staged = staged{}
	f.mu.Unlock()
}

// resumeFlow lets the agent decide again for a suspended flow. The window starts from that of the fallback. It rises
// to the one that the agent asked for last as in slow start, and does not fall until the agent asks for less.
func (f *Flow) resumeFlow() {
	held := f.standby.Control().Cwnd
	f.standby, f.suspended = nil, false
	f.failed = 0
	f.resumed = max(held, minWindow*f.mss)
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
