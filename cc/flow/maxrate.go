package flow

import "github.com/penstock-net/penstock/cc"

// setMaxRate has f keep to l; nil: to none. The caller holds the mutex of f's group,
// if it has one.
func (f *Flow) setMaxRate(l *rateLimit) {
	f.maxRate = l
	if l != nil && f.waiter.wake == nil {
		f.waiter.wake = f.onTimer
	}
	f.notePermits()
}

// acquireRateLimit returns the one that t leads to, counted as used once more; nil if t
// has none. The caller holds m.mu.
func (m *Manager) acquireRateLimit(now cc.Time, t Terms) *rateLimit {
	m.dropUnusedLimits(now)
	if t.MaxRate == 0 {
		return nil
	}
	key := limitKey{t.Group, t.MaxRate}
	l := m.limits[key]
	if l == nil {
		if m.limits == nil {
			m.limits = map[limitKey]*rateLimit{}
		}
		rate := cc.Rate(rateLimitSlack * float64(t.MaxRate))
		l = &rateLimit{timers: &m.shardTimers()[0], key: key, bucket: pacer{rate: rate, most: limitBurst}}
		m.limits[key] = l
	}
	l.users.Add(1)
	return l
}

// releaseRateLimit undoes one call of rateLimit. A rateLimit without users is kept until its
// bucket is full: a client that opens a connection for each object gains nothing. The
// caller holds m.mu.
func (m *Manager) releaseRateLimit(now cc.Time, l *rateLimit) {
	if l != nil && l.users.Add(-1) == 0 && !l.parked {
		l.parked = true
		m.unused = append(m.unused, l)
	}
	m.dropUnusedLimits(now)
}

// dropUnusedLimits drops the rateLimits that have no users and a full bucket. The caller
// holds m.mu.
func (m *Manager) dropUnusedLimits(now cc.Time) {
	kept := m.unused[:0]
	for _, l := range m.unused {
		used := l.users.Load() > 0
		if !used && !l.isFull(now) {
			kept = append(kept, l)
			continue
		}
		l.parked = false
		if !used {
			delete(m.limits, l.key)
		}
	}
	clear(m.unused[len(kept):])
	m.unused = kept
}
