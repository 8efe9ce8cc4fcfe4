package flow

import (
	"cmp"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// maxIdleRoutes bounds the hosts that a macroflow remembers without a member
// whose bytes go there.
const maxIdleRoutes = 16

// alike is by how much base round trips may differ and still be taken for one.
const alike = 1.2

// learnFor is for how many round trips a route learns its base from others.
const learnFor = 3

// rescale is by how much the ratio of two round trips has to change before what
// is in flight is counted anew.
const rescale = 1.0 / 16

// route is the way to one host, as the members of a macroflow see it whose bytes
// go there. Routes share the bottleneck and its queue; where their round trips
// differ without it, equal windows would not be equal rates. Then one of them is
// the macroflow's reference, whose round trips are what the algorithm sees, and
// bytes in flight elsewhere count by how much shorter or longer it is: as many as
// the same rate would keep in flight there.
type route struct {
	macro   *macroflow
	host    netip.Addr // invalid: not known
	members int
	left    cc.Time       // when the last of them did
	base    time.Duration // least round trip, less what a queue made of it that others knew; 0: no sample yet
	learnt  cc.Time       // until when base is an average of samples less what a queue makes of them
	samples time.Duration // how many of those there have been
	scale   float64       // reference's round trip over this one's; 0: they are alike
	slot    int           // in the manager's index of hosts; guarded by its mu, the others by the macroflow's
}

// far reports whether r's round trips are unlike the reference's.
func (r *route) far() bool { return r.scale != 0 }

// shrink is what n bytes along r count in the macroflow's window, rounded up.
func (r *route) shrink(n cc.Bytes) cc.Bytes {
	if !r.far() {
		return n
	}
	return cc.Bytes(math.Ceil(float64(n) * r.scale))
}

// expand is how many bytes along r count for n; it errs by less than one of
// those, upwards, so that a whole segment that has room keeps it.
func (r *route) expand(n cc.Bytes) cc.Bytes {
	if !r.far() || n <= 0 {
		return n
	}
	return cc.Bytes(min(float64(n+1)/r.scale, float64(cc.MaxCwnd)))
}

// sample takes in a round trip along r, and returns what it would have been
// along the reference.
func (m *macroflow) sample(now cc.Time, r *route, rtt time.Duration) time.Duration {
	rtt = max(rtt, time.Microsecond) // clocks are coarse; nothing may divide by zero
	switch {
	case m.ref == nil:
		m.ref, r.base = r, cmp.Or(min(r.base, rtt), rtt)
	case r.base == 0 || now < r.learnt:
		r.learn(now, rtt, m.queue)
	default:
		r.base = min(r.base, rtt)
	}
	if now >= r.learnt {
		m.queue = queue{rtt - r.base, now}
	}
	m.fit(r)
	if r.far() {
		rtt = max(rtt-r.base+m.ref.base, time.Microsecond)
	}
	m.rtt.add(rtt)
	return rtt
}

// queue is what members see of the queue that they share: how much longer their
// round trips take than the least of their own.
type queue struct {
	latest time.Duration
	at     cc.Time
}

// learn takes in a round trip that is among the first of r, while others know the
// queue that stands: the base is what the samples are longer by than that, on
// average, since neither sees it at the same moment; and something is left of each
// for the way. Where the others are silent, there is only the sample.
func (r *route) learn(now cc.Time, rtt time.Duration, q queue) {
	if r.base == 0 {
		r.learnt = now.Add(learnFor * rtt)
	}
	base := max(rtt-q.latest, rtt/8)
	if now.Sub(q.at) > max(rtt, q.latest) {
		base, r.learnt = rtt, now
	}
	r.samples++
	r.base = min(r.base+(base-r.base)/r.samples, rtt)
}

// fit works out anew how bytes along r count.
func (m *macroflow) fit(r *route) {
	if r == m.ref || r.base == 0 {
		return
	}
	scale := 0.0
	if ratio := float64(r.base) / float64(m.ref.base); ratio > alike || ratio < 1/alike {
		queue := max(0, m.rtt.srtt-m.ref.base)
		scale = float64(m.ref.base+queue) / float64(r.base+queue)
	}
	if scale == r.scale || scale != 0 && math.Abs(scale-r.scale) <= rescale*r.scale {
		return
	}
	r.scale = scale
	m.recount(r)
}

// recount counts what is in flight along r anew.
func (m *macroflow) recount(r *route) {
	if r.members == 0 {
		return
	}
	for _, f := range m.members {
		if f.route == r {
			f.recount()
		}
	}
}

// anchor makes r the reference, as it is whenever an algorithm starts that will
// see nothing of what was before.
func (m *macroflow) anchor(r *route) {
	m.ref = nil
	if r.base > 0 {
		m.ref = r
	}
	for _, each := range m.routes {
		each.scale = 0
		if m.ref != nil {
			m.fit(each)
		}
		m.recount(each)
	}
}

// plain is a host's address as paths and hints are told apart by it.
func plain(host netip.Addr) netip.Addr { return host.Unmap().WithZone("") }

// route returns g's route to host, a new one if need be. The caller holds m.mu and g.mu.
func (m *Manager) route(g *macroflow, host netip.Addr) *route {
	host = plain(host)
	known := m.hosts[host]
	if len(g.routes) < len(known) {
		known = g.routes
	}
	for _, r := range known {
		if r.macro == g && r.host == host {
			return r
		}
	}
	r := &route{macro: g, host: host, slot: len(m.hosts[host])}
	g.routes = append(g.routes, r)
	m.hosts[host] = append(m.hosts[host], r)
	return r
}

// dropRoute forgets the i-th route of g. The caller holds m.mu and g.mu.
func (m *Manager) dropRoute(g *macroflow, i int) {
	r := g.routes[i]
	g.routes = slices.Delete(g.routes, i, i+1)
	all := m.hosts[r.host]
	last := all[len(all)-1]
	all[r.slot], last.slot = last, r.slot
	all[len(all)-1] = nil
	if all = all[:len(all)-1]; len(all) == 0 {
		delete(m.hosts, r.host)
		return
	}
	m.hosts[r.host] = all
}

// trimRoutes forgets the route that has been without members for longest, where
// there are too many of them. The caller holds m.mu and g.mu.
func (m *Manager) trimRoutes(g *macroflow) {
	idle, oldest := 0, -1
	for i, r := range g.routes {
		if r.members > 0 {
			continue
		}
		if idle++; oldest < 0 || r.left < g.routes[oldest].left {
			oldest = i
		}
	}
	if idle > maxIdleRoutes {
		m.dropRoute(g, oldest)
	}
}

// inUse reports whether m's bytes go along r: as long as m has members, theirs
// do; one that lingers waits for all that it remembers.
func (m *macroflow) inUse(r *route) bool { return r.members > 0 || len(m.members) == 0 }
