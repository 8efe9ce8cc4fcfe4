package flow

import (
	"container/list"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// macroflow is the flows that share one algorithm, one window and one pacer
// (RFC 3124). Its mutex guards everything in it and in its members.
type macroflow struct {
	mgr   *Manager
	key   string
	group string // the Terms.Group of all members
	spec  cc.Spec
	prm   cc.Params
	seed  uint64

	mu        sync.Mutex
	alg       cc.Algorithm // built with the first event, when the segment size is known
	ctl       cc.Control   // alg's newest word
	mss       cc.Bytes
	members   []*Flow      // in no order that lasts: see line
	held      bool         // by transports, as the newest report has it
	divided   bool         // the window, for wakeable, which comes next: nothing has changed since
	routes    []*route     // changed under the manager's mu as well
	datagrams []*Datagrams // beside the members, in their window; likewise
	pacer     pacer
	rtt       rttEstimator
	queue     queue
	ref       *route  // whose round trips rtt's are; nil: no sample since the algorithm started
	rate      cc.Rate // newest delivery-rate sample

	inflight    cc.Bytes // sum of what the members count
	delivered   cc.Bytes // by members past and present
	deliveredAt cc.Time
	firstSent   cc.Time  // when the newest delivered byte had left
	appLimited  cc.Bytes // deliveries up to this count understate the path; 0: none do
	served      float64  // virtual time: what the flow served last had been served before
	cwndFullAt  cc.Time  // when the window last cut a grant short, or kept bytes waiting in a transport
	wantedAt    cc.Time  // when a member last got less than it wanted; 0: never
	heldBelow   bool     // the transport or the receiver, not the window, holds bytes back
	idleSince   cc.Time  // when the last member left
	started     cc.Time  // when alg was built
	base        cc.Bytes // what had been delivered then: alg counts from there
	initial     cc.Bytes // window that members brought with them or that is remembered, for alg to start from; 0: neither
	ssthresh    cc.Bytes // window that the path is known to carry, for alg to start with; 0: not known
	memory      cc.Bytes // the window as the last member left it, once alg is forgotten; 0: it is not
	gone        float64  // part of the window that members have taken elsewhere, until a round trip after goneAt
	goneAt      cc.Time
	hint        cc.Hint    // the network's newest word about the hosts
	hinted      bool       // there has been one
	maxRate     *rateLimit // that all members have; nil: they have none, or not the same
	hintCap     float64    // the least of the members' Terms.HintCap; 0: none has one
	capped      bool       // hintCap or maxRate holds ctl below what alg asks for
	rateBound   bool       // maxRate does: parts of the window are parts of that rate

	idle *list.Element // in the manager's list, while without members; guarded by its mu
	timer
}

// start builds the algorithm on first use.
func (m *macroflow) start(now cc.Time) {
	if m.alg != nil {
		return
	}
	m.mss = cc.DefaultMSS
	for _, f := range m.members {
		if f.last.MSS > 0 {
			m.mss = f.last.MSS
			break
		}
	}
	initial := m.initial
	if initial == 0 {
		initial = cc.InitialCwndPackets * m.mss
	}
	m.started, m.base = now, m.delivered
	m.alg = m.spec.New(cc.Config{
		MSS:         m.mss,
		InitialCwnd: initial,
		Ssthresh:    m.ssthresh,
		Params:      m.prm,
		Rand:        rand.New(rand.NewPCG(m.seed, 0)),
	})
	m.adopt(now)
}

// segment is what the pacer's burst must hold for f: its path may take larger
// segments than the one the algorithm was built for.
func (m *macroflow) segment(f *Flow) cc.Bytes { return max(m.mss, f.mss()) }

// leastTick keeps an algorithm that asks for ticks in the past from having
// nothing else happen.
const leastTick = 100 * time.Microsecond

// adopt takes over the algorithm's limits after it has seen an event at now.
func (m *macroflow) adopt(now cc.Time) {
	m.ctl = m.alg.Control()
	m.cap(now)
	m.pacer.rate = m.ctl.PacingRate
	if m.ctl.NextTick != 0 {
		m.mgr.schedule(m, max(m.ctl.NextTick, now.Add(leastTick)))
	}
}

func (m *macroflow) state(now cc.Time) cc.State {
	s := cc.State{
		Now:         now,
		MSS:         m.mss,
		Inflight:    m.ownInflight(),
		Delivered:   m.delivered - m.base,
		SRTT:        m.rtt.srtt,
		RTTVar:      m.rtt.rttvar,
		MinRTT:      m.rtt.min,
		CwndLimited: m.cwndLimited(),
	}
	if m.held && len(m.members) > 1 {
		s.Lag = m.rtt.srtt
	}
	if m.hinted {
		s.Hint = &m.hint
	}
	return s
}

// seen is s as the algorithm may see it, which counts from its own start.
func (m *macroflow) seen(s cc.Sent) cc.Sent {
	s.Delivered = max(0, s.Delivered-m.base)
	return s
}

// join has f be a member, along r.
func (m *macroflow) join(f *Flow, r *route) {
	m.members = append(m.members, f)
	r.members++
	f.macro, f.route = m, r
	f.home.Store(m)
	m.noteCap()
}

// lose has f be a member no more.
func (m *macroflow) lose(f *Flow, now cc.Time) {
	m.inflight -= f.counted()
	f.counts = 0
	f.route.members--
	f.route.left = now
	if i := slices.Index(m.members, f); i >= 0 {
		m.members = slices.Delete(m.members, i, i+1)
	}
	if len(m.members) == 0 {
		m.idleSince = now
	}
	m.noteCap()
}

// cwndLimited tells whether the window was what held the sender back since the
// newest delivered byte left, a round trip ago. Bytes piling up below us mean
// that it was not; nor was it where a hint holds less.
func (m *macroflow) cwndLimited() bool {
	return m.cwndFullAt != 0 && !m.heldBelow && !m.capped && m.cwndFullAt >= m.firstSent
}

// sent describes the macroflow to the bytes that leave now.
func (m *macroflow) sent(now cc.Time) chunk {
	if m.inflight == 0 { // idle: measure rates from here
		m.deliveredAt, m.firstSent = now, now
	}
	return chunk{
		sent: cc.Sent{
			At:          now,
			DeliveredAt: m.deliveredAt,
			Cwnd:        m.ctl.Cwnd,
			Inflight:    m.inflight,
			Delivered:   m.delivered,
			AppLimited:  m.appLimited != 0,
		},
		first: m.firstSent,
	}
}

// deliveryRate is the rate over the flight of chunk c: bytes delivered since it
// left, over the longer of the time it took to send and to acknowledge them
// (the BBR draft's §4.1.2.3), so that bunched acknowledgements do not inflate
// it; 0 for a burst shorter than a round trip.
func (m *macroflow) deliveryRate(now cc.Time, c chunk, leastRTT time.Duration) cc.Rate {
	d := max(now.Sub(c.sent.DeliveredAt), c.sent.At.Sub(c.first))
	if d < leastRTT {
		return 0
	}
	return cc.RateOf(m.delivered-c.sent.Delivered, d)
}

// noteAppLimited marks what is in flight as too little to probe the path, when
// there is room in the window and nobody wants it, or a hint does not let it be used.
func (m *macroflow) noteAppLimited() {
	if m.delivered > m.appLimited {
		m.appLimited = 0
	}
	if !m.capped {
		if m.inflight+m.mss > m.window() {
			return
		}
		for _, f := range m.members {
			if f.want > 0 {
				return
			}
		}
	}
	m.appLimited = max(m.delivered+m.inflight, 1)
}
