package flow

import "github.com/penstock-net/penstock/cc"

// HasMaxRate reports whether f's group has a maximum rate, so that Take is to be asked
// even where the transport enforces the window.
func (f *Flow) HasMaxRate() bool { return f.limited.Load() }

// lock returns f's group, locked.
func (f *Flow) lock() *group {
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
	g := f.lock()
	var events [2]Event // at most a loss, then an acknowledgement
	n, news, doubts := 0, HintNews{}, false
	if !f.closed && r.At >= f.last.At {
		n = g.absorb(&f.member, r, &events)
		g.wakeDatagrams(r.At)
		g.settle(r.At)
		g.open(&f.member, r.At)
		news, doubts = g.hintNews()
	}
	g.mu.Unlock()
	g.trace(events[:n]...)
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
	g := f.lock()
	defer g.unlock(now)
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
		n := f.pass(now, want, min(want, f.mss()))
		f.gate.blocked = n == 0
		return Grant{n}
	}
	f.lossBegan(g.lossEpoch, g.lossAt)
	g.begin(&f.member, now)
	f.asked, f.lastBusy = now, now
	quantum := f.quantum(want, f.mss())
	if f.limit.Cwnd-f.inflight < want && !g.content(&f.member) {
		g.cwndFullAt = now
	}
	n, by := f.grant(now, want, f.inflight, f.mss())
	f.limits.enter(now, by)
	if n = f.pass(now, n, quantum); n > 0 {
		g.send(&f.member, now, n)
		f.pacer.spend(now, n)
	} else if f.retryAt > now {
		g.timers.schedule(f, f.retryAt)
	}
	f.gate.blocked = n == 0
	if g.setWant(&f.member, want-n); n < want {
		g.wantedAt = now
	}
	return Grant{n}
}

// pass asks the group's maximum rate to let up to want bytes pass, in whole quanta,
// and returns how many may. A flow that has the rate for itself passes freely where
// its transport keeps the rate.
func (f *Flow) pass(now cc.Time, want, quantum cc.Bytes) (n cc.Bytes) {
	switch {
	case f.maxRate == nil || want == 0:
		return want
	case f.enforced && f.maxRate.users.Load() == 1:
		f.maxRate.spend(now, want, f.mss())
		return want
	}
	f.maxRate.mu.Lock()
	n = f.maxRate.take(now, &f.waiter, want, quantum, f.mss())
	f.maxRate.mu.Unlock()
	if n == 0 {
		f.limits.enter(now, LimitedByPacing)
	}
	return n
}

// when implements ticker.
func (f *Flow) when() *timer { return &f.due }

// tick wakes f if its pacer, or its turn at the maximum rate, lets it send.
func (f *Flow) tick(now cc.Time) {
	g := f.lock()
	defer g.mu.Unlock()
	if f.closed {
		return
	}
	g.open(&f.member, now)
}

// Close leaves the group; what was in flight no longer counts.
func (f *Flow) Close(now cc.Time) {
	g := f.lock()
	if f.closed {
		g.mu.Unlock()
		return
	}
	f.closed = true
	f.maxRate.leave(&f.waiter)
	g.leave(&f.member, now)
	g.unlock(now)
	f.mgr.left(f, now)
}
