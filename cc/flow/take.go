package flow

import "github.com/penstock-net/penstock/cc"

// quantum is the least worth waking for: a segment, or all it wants; never more
// than a window that is smaller than a segment.
func (f *Flow) quantum() cc.Bytes {
	return min(f.want, f.mss(), max(f.macro.ctl.Cwnd, 1))
}

// roundUp rounds to whole segments, so that shares of a fraction of one are of use.
func (f *Flow) roundUp(n cc.Bytes) cc.Bytes {
	mss := f.mss()
	return (n + mss - 1) / mss * mss
}

// Take asks to send want bytes and accounts for what it grants in the same
// step. Grants are whole segments unless want is smaller. After a Grant of 0
// the flow's wake is called when asking again may help. A transport that holds
// the window takes all it is given, which counts once it leaves.
func (f *Flow) Take(now cc.Time, want cc.Bytes) Grant {
	m := f.lock()
	if f.closed || want <= 0 {
		m.mu.Unlock()
		return Grant{}
	}
	if f.last.Held {
		n := f.pass(now, want, min(want, f.mss()))
		f.parked = n == 0
		m.mu.Unlock()
		return Grant{Bytes: n}
	}
	m.start(now)
	if f.want == 0 {
		f.join(now)
	}
	f.want, f.parked, f.asked, f.busy = want, false, now, now
	n := f.grant(now, want)
	if n > 0 {
		f.charge(now, n)
	}
	f.want = want - n
	f.parked = n == 0
	if f.want > 0 {
		m.wantedAt = now
	}
	m.mu.Unlock()
	return Grant{Bytes: n}
}

// pass asks the group's maximum rate to let up to want bytes pass, in whole quanta,
// and returns how many may. A flow that has the rate for itself passes freely where
// its transport holds the rate.
func (f *Flow) pass(now cc.Time, want, quantum cc.Bytes) (n cc.Bytes) {
	switch {
	case f.maxRate == nil || want == 0:
		return want
	case f.last.Held && f.maxRate.users.Load() == 1:
		f.maxRate.spend(now, want, f.mss())
		return want
	}
	f.maxRate.mu.Lock()
	n, f.turn = f.maxRate.take(now, want, quantum, f.mss(), f.turn)
	f.maxRate.mu.Unlock()
	if n == 0 {
		f.limits.enter(now, LimitedByPacing)
		f.ready = f.turn
		f.macro.mgr.schedule(f.macro, f.ready)
	}
	return n
}

// grant decides how much of want may go now.
func (f *Flow) grant(now cc.Time, want cc.Bytes) cc.Bytes {
	m := f.macro
	quantum := f.quantum()
	if m.concerned(f, 1) || now < f.ramp {
		m.allot(now, f)
	}
	room := f.usable(0)
	if room < want && !f.content() {
		m.cwndFullAt = now
	}
	f.pacer.rate = f.ownRate(now)
	credit := min(m.pacer.credit(now, m.segment(f)), f.pacer.credit(now, f.mss()))
	n := min(want, room, credit)
	switch n {
	case want:
		f.limits.enter(now, LimitedByApplication)
		return f.pass(now, n, quantum)
	case room:
		f.limits.enter(now, LimitedByCwnd)
	default:
		f.limits.enter(now, LimitedByPacing)
	}
	if n >= quantum {
		return f.pass(now, n-n%quantum, quantum)
	}
	if room >= quantum {
		f.ready = f.pacer.ready(now, quantum, f.mss())
		m.mgr.schedule(m, max(f.ready, m.pacer.ready(now, quantum, m.segment(f))))
	}
	return 0
}

// usable is room in bytes of f's own path, where nothing in flight leaves room
// for a segment.
func (f *Flow) usable(promised cc.Bytes) cc.Bytes {
	room := f.route.expand(f.macro.room(f, promised))
	if f.route.far() && f.inflight == 0 {
		room = max(room, f.mss())
	}
	return room
}

// charge counts n granted bytes in flight and against the pacers.
func (f *Flow) charge(now cc.Time, n cc.Bytes) {
	f.count(now, n)
	f.macro.pacer.spend(now, n)
	f.pacer.spend(now, n)
	f.ready = 0
}

// count counts n bytes in flight that leave now.
func (f *Flow) count(now cc.Time, n cc.Bytes) {
	m := f.macro
	granule := max(f.mss(), m.ctl.Cwnd/(ledgerChunks/2))
	f.ledger.push(n, f.roundUp(min(granule, cc.MaxCwnd/ledgerChunks)), m.sent(now))
	f.taken += n
	f.inflight += n
	f.recount()
	m.serve(f, n)
}
