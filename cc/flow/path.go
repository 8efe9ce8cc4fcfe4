package flow

import (
	"cmp"
	"math"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// alike is by how much base round trips may differ and still be taken for one.
const alike = 1.2

// learnFor is for how many round trips a path learns its base from others.
const learnFor = 3

// rescale is by how much the ratio of two round trips has to change before what
// is in flight is counted anew.
const rescale = 1.0 / 16

// path is the way to one host of a group. RFC 3124 has one path for each macroflow; a
// group may have several that share the bottleneck, such as an uplink. Where their base
// round trips are unlike, equal windows are not equal rates. Then one path is the
// group's reference, whose round trips the algorithm sees, and bytes in flight on
// another count by how much shorter or longer it is: as many as the same rate keeps in
// flight on the reference.
type path struct {
	host    netip.Addr    // invalid: not known
	members []*member     // in no order
	idle    cc.Time       // when the last member left
	base    time.Duration // least round trip without the queue that others knew of; 0: no sample yet
	learnt  cc.Time       // until when base is the average of samples less that queue
	samples time.Duration // how many of those there have been
	scale   float64       // reference's round trip over this one's; 0: they are alike
	slot    int           // in the manager's index of hosts; its mutex guards it

	queue atomic.Pointer[hostQueue] // of all paths to the host; nil: no group receives from it
}

// hostQueue is the queue on the way to a host, as the flows see it that send there and know
// their ways apart. For those that receive from the host it is on the way back: their
// acknowledgements wait in it, and the kernel tells them nothing of the peer's clock.
type hostQueue struct {
	mu    sync.Mutex // taken with a group's
	at    cc.Time    // of the newest
	from  cc.Time    // when the present span began
	least [2]time.Duration
}

// queueSpan is the span of which a hostQueue keeps the least, and of the one before: what a
// receiver's kernel says of round trips lags a little behind a queue that grows, and to take
// off more than they hold would hide a queue on the way from the host. With longer spans
// uploads lose half of their rate whenever the download lets its queue run empty.
const queueSpan = 15 * time.Millisecond

// addDelay takes in a queueing delay.
func (q *hostQueue) addDelay(now cc.Time, delay time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.at = now
	switch passed := now.Sub(q.from); {
	case passed >= 2*queueSpan:
		q.from, q.least = now, [2]time.Duration{delay, delay}
	case passed >= queueSpan:
		q.from, q.least = now, [2]time.Duration{delay, q.least[0]}
	default:
		q.least[0] = min(q.least[0], delay)
	}
}

// recentLeast returns the queueing delay that was there at least; false: none was noted within
// a time.
func (q *hostQueue) recentLeast(now cc.Time, within time.Duration) (time.Duration, bool) {
	if q == nil {
		return 0, false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return min(q.least[0], q.least[1]), q.at > 0 && now.Sub(q.at) <= within
}

// paths are those of a group.
type paths struct {
	all []*path
	ref *path         // whose round trips the algorithm sees; nil: no sample since it started
	q   time.Duration // newest queueing delay that a member has seen
	qAt cc.Time
}

// addMember has m's bytes go along p.
func (p *path) addMember(m *member) {
	m.path, m.along = p, len(p.members)
	p.members = append(p.members, m)
}

// removeMember undoes join.
func (p *path) removeMember(m *member, now cc.Time) {
	last := len(p.members) - 1
	p.members[m.along] = p.members[last]
	p.members[m.along].along = m.along
	p.members[last] = nil
	p.members = p.members[:last]
	p.idle = now
}

// isFar reports whether p's round trips are unlike the reference's.
func (p *path) isFar() bool { return p.scale != 0 }

// toReference is what n bytes on p count in the group's window, rounded up.
func (p *path) toReference(n cc.Bytes) cc.Bytes {
	if !p.isFar() {
		return n
	}
	return cc.Bytes(math.Ceil(float64(n) * p.scale))
}

// fromReference is how many bytes on p count for n; it errs by less than one of those,
// upwards, so that a whole segment that has room keeps it.
func (p *path) fromReference(n cc.Bytes) cc.Bytes {
	if !p.isFar() || n <= 0 {
		return n
	}
	return cc.Bytes(min(float64(n+1)/p.scale, float64(cc.MaxCwnd)))
}

// addRTTSample takes in a round trip on p and returns what it would have been on the
// reference. changed says whether bytes on p count otherwise from now on; srtt is the
// reference's.
func (s *paths) addRTTSample(now cc.Time, p *path, rtt, srtt time.Duration) (seen time.Duration, changed bool) {
	rtt = max(rtt, time.Microsecond) // clocks are coarse; nothing may divide by zero
	switch {
	case s.ref == nil:
		s.ref, p.base = p, cmp.Or(min(p.base, rtt), rtt)
	case p.base == 0 || now < p.learnt:
		s.learnBase(now, p, rtt)
	default:
		p.base = min(p.base, rtt)
	}
	if now >= p.learnt {
		s.q, s.qAt = rtt-p.base, now
	}
	changed = s.updateScale(p, srtt)
	if p.isFar() {
		rtt = max(rtt-p.base+s.ref.base, time.Microsecond)
	}
	return rtt, changed
}

// learnBase takes in one of p's first round trips. Others may know how much of it is the
// queue: the base is what the samples are longer than that queue, on average, since
// neither sees it at the same moment. Where the others are silent, there is only the sample.
func (s *paths) learnBase(now cc.Time, p *path, rtt time.Duration) {
	if p.base == 0 {
		p.learnt = now.Add(learnFor * rtt)
	}
	base := max(rtt-s.q, rtt/8)
	if now.Sub(s.qAt) > max(rtt, s.q) {
		base, p.learnt = rtt, now
	}
	p.samples++
	p.base = min(p.base+(base-p.base)/p.samples, rtt)
}

// updateScale works out anew how bytes on p count, and reports whether that has changed.
func (s *paths) updateScale(p *path, srtt time.Duration) bool {
	if p == s.ref || p.base == 0 {
		return false
	}
	scale := 0.0
	if ratio := float64(p.base) / float64(s.ref.base); ratio > alike || ratio < 1/alike {
		queue := max(0, srtt-s.ref.base)
		scale = float64(s.ref.base+queue) / float64(p.base+queue)
	}
	if scale == p.scale || scale != 0 && math.Abs(scale-p.scale) <= rescale*p.scale {
		return false
	}
	p.scale = scale
	return true
}

// setReference makes p the reference, as it is whenever an algorithm starts that will see
// nothing of what was before.
func (s *paths) setReference(p *path, srtt time.Duration) {
	s.ref = nil
	if p.base > 0 {
		s.ref = p
	}
	for _, each := range s.all {
		each.scale = 0
		if s.ref != nil {
			s.updateScale(each, srtt)
		}
	}
}

// pathTo returns the path to a host; nil: there is none.
func (s *paths) pathTo(host netip.Addr) *path {
	for _, p := range s.all {
		if p.host == host {
			return p
		}
	}
	return nil
}

// plainAddr is a host's address as paths and hints are told apart by it.
func plainAddr(host netip.Addr) netip.Addr { return host.Unmap().WithZone("") }
