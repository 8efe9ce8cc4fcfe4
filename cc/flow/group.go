package flow

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// group is the flows that share one algorithm and one window: a macroflow of RFC 3124.
// Its mutex guards everything in it and in its members.
type group struct {
	key      string
	name     string // the Terms.Group of all members
	spec     cc.Spec
	params   cc.Params
	receives bool // members' bytes come here; the window is the peers'
	seed     uint64
	timers   *timers
	emit     func(Event) // sees every event of the algorithm; nil: nobody does

	mu        sync.Mutex
	alg       cc.Algorithm // nil before the first event, when the segment size is known, and once it is forgotten
	ctl       cc.Control   // alg's limits, as far as caps leave them
	mss       cc.Bytes
	members   []*member // in no order
	weights   cc.Bytes  // sum of theirs
	alloc     allocator
	datagrams []*Datagrams // beside the members, in their window
	rtt       rttEstimator
	paths     paths
	delivered delivery
	rate      cc.Rate  // newest delivery-rate sample
	oneWay    bool     // the newest acknowledgement's way back is known
	inflight  cc.Bytes // sum of what the members count
	overflow  int      // members that have more than their floors in flight
	wanting   int      // members that want more than they have

	changed   bool    // the window or what members want: divide anew
	sendNow   bool    // likewise, and what the limits let out is not to wait for acknowledgements
	divideAt  cc.Time // not before this, unless it is urgent
	dividedAt cc.Time // the newest division
	lossEpoch uint64  // counts loss events
	lossAt    cc.Time

	cwndFullAt   cc.Time  // when the window last cut a grant short, or kept bytes waiting in a transport
	wantedAt     cc.Time  // when a member last got less than it wanted; 0: never
	allContent   bool     // at the last division, all that contended had all that their terms allow
	limitedBelow bool     // the transport or the receiver, not the window, holds bytes back
	started      cc.Time  // when alg was built
	starts       uint64   // how many have been
	base         cc.Bytes // what had been delivered then: alg counts from there
	initial      cc.Bytes // window for alg to start from; 0: the usual one
	ssthresh     cc.Bytes // window that the path is known to carry, for alg to start with; 0: not known
	takenAway    float64  // part of the window that members have taken elsewhere, until a round trip after takenAt
	takenAt      cc.Time
	idle         idleness
	caps         caps

	timer
}

// countInflight works out anew what m counts in the group's window. Bytes that wait for the
// peer to open its own window load no path, and must not keep the others from theirs.
func (g *group) countInflight(m *member) {
	before := m.counts
	m.counts = m.path.toReference(m.inflight - m.sampler.blocked)
	g.inflight += m.counts - before
	if overflow := m.counts > m.leastWindow(); overflow != m.overflow {
		m.overflow = overflow
		if overflow {
			g.overflow++
		} else {
			g.overflow--
		}
	}
}

// countInflightOf does so for each of some members.
func (g *group) countInflightOf(members []*member) {
	for _, m := range members {
		g.countInflight(m)
	}
}

// setReferencePath makes p the reference path.
func (g *group) setReferencePath(p *path) {
	g.paths.setReference(p, g.rtt.srtt)
	g.countInflightOf(g.members)
}

// setWant notes how much m wants beyond what it has.
func (g *group) setWant(m *member, want cc.Bytes) {
	if (want > 0) != (m.want > 0) {
		g.changed = true
		if want > 0 {
			if m.active && !m.wants { // it was told what one such member would have
				m.wants = true
				g.alloc.fresh++
			}
			g.wanting++
		} else {
			g.wanting--
		}
	}
	m.want = want
}

// noteSent counts n bytes of m in flight that leave now.
func (g *group) noteSent(m *member, now cc.Time, n cc.Bytes) {
	granule := max(m.segmentSize(), g.ctl.Cwnd/(ledgerChunks/2))
	m.sampler.addSent(n, roundUp(min(granule, cc.MaxCwnd/ledgerChunks), m.segmentSize()), g.sentState(now))
	g.countInflight(m)
}

// roundUp rounds to whole units.
func roundUp(n, unit cc.Bytes) cc.Bytes { return (n + unit - 1) / unit * unit }

// sentState describes the group to the bytes that leave now.
func (g *group) sentState(now cc.Time) chunk {
	if g.inflight == 0 {
		g.delivered.restartMeasuring(now)
	}
	return chunk{
		sent: cc.Sent{
			At:          now,
			DeliveredAt: g.delivered.at,
			Cwnd:        g.ctl.Cwnd,
			Inflight:    g.inflight,
			Delivered:   g.delivered.total,
			AppLimited:  g.delivered.appLimited != 0,
		},
		first: g.delivered.firstSent,
	}
}

// srtt and leastRTT are the round trips of m's own path.
func (g *group) srtt(m *member) time.Duration {
	if m.path.isFar() && m.rtt.srtt > 0 {
		return m.rtt.srtt
	}
	return g.rtt.srtt
}

func (g *group) leastRTT(m *member) time.Duration {
	if m.path.isFar() {
		return m.path.base
	}
	return g.rtt.min
}

// Datagrams are bytes in the window of a group that nobody acknowledges: the
// UDP and ICMP of the same peer. What was granted counts for one round trip of
// the flows beside it, and is then taken as gone, at the pace at which theirs
// arrive; they make no event.
//
// They are held back only while one of these flows wants more than it has: what
// a window is worth that nobody wants to fill, nobody knows. Then they have their
// share of it in each round trip, and at least two segments, so that a name is found
// whatever else goes on. Towards that share they fall by half with each round trip,
// which is how fast a flow that starts beside them can grow.
type Datagrams struct {
	closeFunc func(*Datagrams) // the manager's
	key       string
	share     float64
	waiter
	home atomic.Pointer[group] // nil while there is none: nobody to give way to

	maxRate *rateLimit // of the group; nil: none

	// Guarded by the mutex of home.
	group   *group
	chunks  []granted // in flight, the oldest first
	loose   cc.Bytes  // their sum
	waiting cc.Bytes  // asked for and refused; 0: nothing
	sparse  bool      // what was refused is of a sparse flow
	own     cc.Bytes  // what they may have in flight while the flows want the window
	room    cc.Bytes  // of that, what they may send now; below 0: what sparse flows were lent
	roomAt  cc.Time   // when own and room were; 0: never
	usual   cc.Rate   // own in each round trip, smoothed; 0: not known
	carry   cc.Bytes  // in flight when they were last free to go
	carryAt cc.Time
}

// granted is what was granted within a short time.
type granted struct {
	at cc.Time
	n  cc.Bytes
}

// idleness is what a group knows of its own silence.
type idleness struct {
	since cc.Time  // when the last byte arrived and nobody wanted to send; 0: somebody sends
	cwnd  cc.Bytes // the window when the algorithm was forgotten; 0: it is not
}

// memberWindow is what the members may have in flight together: what datagrams use, or wait
// for, of their share is not theirs.
func (g *group) memberWindow() cc.Bytes { return g.ctl.Cwnd - g.datagramBytes(true) }

// datagramBytes is what datagrams have in flight of the window, with those that wait or not.
func (g *group) datagramBytes(waiting bool) cc.Bytes {
	var loose, most cc.Bytes
	for _, d := range g.datagrams {
		loose += d.loose
		if waiting {
			loose += d.waiting
		}
		most = max(most, d.shareOfWindow())
	}
	return min(loose, most)
}

// shareOfWindow is d's share of what the members can use of the window: a pacer may not let
// them fill it.
func (d *Datagrams) shareOfWindow() cc.Bytes {
	g := d.group
	return cc.Bytes(d.share * float64(g.ctl.Cwnd-g.unpacedWindow()))
}

// unpacedWindow is the part of the window that the pacing rate does not let anybody fill.
func (g *group) unpacedWindow() cc.Bytes {
	if g.ctl.PacingRate == 0 || g.rtt.srtt == 0 {
		return 0
	}
	return max(0, g.ctl.Cwnd-g.ctl.PacingRate.BytesIn(g.rtt.srtt))
}
