package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// unpacedSegments is how many segments of a connection Linux sends whatever the pacing rate is
// (tcp_output.c, tcp_update_skb_after_send).
const unpacedSegments = 10

// pacedAhead is how far ahead of a maximum rate a flow may write that has the rate for itself, where
// its transport keeps the rate: a busy machine must not leave the transport without bytes.
const pacedAhead = 50 * time.Millisecond

// NeedsGrants reports whether Take is to be asked even where the transport enforces the window: there
// is a maximum rate, or one of f's own at the start, when the transport does not keep it.
func (f *Flow) NeedsGrants() bool { return f.asks.Load() }

// notePermits has NeedsGrants say what f's terms and its start ask for. The caller holds the mutex of f's
// group, if it has one.
func (f *Flow) notePermits() { f.asks.Store(f.maxRate != nil || f.startsPaced()) }

// startsPaced reports whether f's first segments are spread here, over a transport that enforces the window.
func (f *Flow) startsPaced() bool {
	return f.enforced && f.unpaced > 0 && (f.terms.ConnectionRate > 0 || f.terms.HintCap > 0)
}

// lockGroup returns f's group, locked.
func (f *Flow) lockGroup() *group {
	for {
		g := f.home.Load()
		g.mu.Lock()
		if f.home.Load() == g {
			return g
		}
		g.mu.Unlock() // f has moved in the meantime
	}
}

// Report tells what became of the bytes. Stale and repeated reports are ignored.
func (f *Flow) Report(r Report) {
	g := f.lockGroup()
	var events [2]Event // at most a loss, then an acknowledgement
	n, news, doubts := 0, HintNews{}, false
	if !f.closed && r.At >= f.last.At {
		n = g.processReport(&f.member, r, &events)
		g.wakeDatagrams(r.At)
		g.divideIfDue(r.At)
		g.wakeIfAllowed(&f.member, r.At)
		news, doubts = g.takeHintNews()
	}
	g.mu.Unlock()
	g.emitEvents(events[:n]...)
	if doubts && f.mgr.HintNews != nil {
		f.mgr.HintNews(news)
	}
}

// Take asks to send want bytes and accounts for what it grants in the same step. Grants
// are whole segments unless want is smaller. After a Grant of 0 the leg's Wake is called
// when asking again may help. One that asks for 0 takes back what it asked for. Over a
// leg that enforces the window only a maximum rate refuses anything, and bytes count once
// they leave.
func (f *Flow) Take(now cc.Time, want cc.Bytes) Grant {
	g := f.lockGroup()
	defer g.divideAndUnlock(now)
	switch {
	case f.closed || want < 0:
		return Grant{}
	case want == 0:
		f.gate.blocked = false
		if !f.enforced {
			g.setWant(&f.member, 0)
		}
		return Grant{}
	case f.enforced:
		n := f.takeEnforced(g, now, want)
		f.gate.blocked = n == 0
		return Grant{n}
	}
	f.noteLossEpoch(g.lossEpoch, g.lossAt)
	g.onSendStart(&f.member, now)
	f.asked, f.lastBusy = now, now
	quantum := f.grantQuantum(want, f.segmentSize())
	if f.limit.Cwnd-f.inflight < want && !g.hasAllItMayUse(&f.member) {
		g.cwndFullAt = now
	}
	n, by := f.grantBytes(now, want, f.inflight, f.segmentSize())
	f.limits.enterState(now, by)
	if n = f.passMaxRate(now, n, quantum); n > 0 {
		g.noteSent(&f.member, now, n)
		f.pacer.spendBytes(now, n)
	} else if f.retryAt > now {
		g.timers.scheduleAt(f, f.retryAt)
	}
	f.gate.blocked = n == 0
	if g.setWant(&f.member, want-n); n < want {
		g.wantedAt = now
	}
	return Grant{n}
}

// takeEnforced is Take over a leg that enforces the window.
func (f *Flow) takeEnforced(g *group, now cc.Time, want cc.Bytes) (n cc.Bytes) {
	quantum := min(want, f.segmentSize())
	n = want
	if f.startsPaced() {
		if n = f.startCredit(g, now, want, quantum); n == 0 {
			return 0
		}
	}
	n = f.passMaxRate(now, n, quantum)
	if f.unpaced > 0 && n > 0 {
		f.starting.spendBytes(now, n)
		f.unpaced = max(0, f.unpaced-n)
		f.notePermits()
	}
	return n
}

// startCredit returns how many of want bytes f's own rates let pass at its start. After 0 f is woken when some may.
func (f *Flow) startCredit(g *group, now cc.Time, want, quantum cc.Bytes) (n cc.Bytes) {
	rate := f.own
	if f.terms.HintCap > 0 {
		g.onSendStart(&f.member, now) // so that there is a limit
		rate = lesserRate(rate, f.limit.PacingRate)
	}
	f.starting.setRate(now, rate)
	if n = min(want, f.starting.creditBytes(now, f.segmentSize())); n < want {
		n -= n % quantum
	}
	if n == 0 {
		f.retryAt = f.starting.readyAt(now, quantum, f.segmentSize())
		g.timers.scheduleAt(f, f.retryAt)
		f.limits.enterState(now, LimitedByPacing)
	}
	return n
}

// passMaxRate asks the group's maximum rate to let up to want bytes pass, in whole quanta,
// and returns how many may.
func (f *Flow) passMaxRate(now cc.Time, want, quantum cc.Bytes) (n cc.Bytes) {
	if f.maxRate == nil || want == 0 {
		return want
	}
	ahead := time.Duration(0)
	if f.enforced && f.unpaced == 0 && f.maxRate.users.Load() == 1 {
		ahead = pacedAhead
	}
	f.maxRate.mu.Lock()
	n = f.maxRate.takeBytes(now, &f.waiter, want, quantum, f.segmentSize(), ahead)
	f.maxRate.mu.Unlock()
	if n == 0 {
		f.limits.enterState(now, LimitedByPacing)
	}
	return n
}

// timerState implements ticker.
func (f *Flow) timerState() *timer { return &f.due }

// onTimer wakes f if its pacer, or its turn at the maximum rate, lets it send.
func (f *Flow) onTimer(now cc.Time) {
	g := f.lockGroup()
	defer g.mu.Unlock()
	if f.closed {
		return
	}
	g.wakeIfAllowed(&f.member, now)
}

// Close leaves the group; what was in flight no longer counts.
func (f *Flow) Close(now cc.Time) {
	g := f.lockGroup()
	if f.closed {
		g.mu.Unlock()
		return
	}
	f.closed = true
	f.maxRate.removeWaiter(&f.waiter)
	g.removeMember(&f.member, now)
	g.divideAndUnlock(now)
	f.mgr.removeFlow(f, now)
}
