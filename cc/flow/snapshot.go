package flow

import (
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Snapshot is the state of one flow at one moment.
type Snapshot struct {
	ID        uint64
	Group     string
	Algorithm string
	Phase     string
	Members   int          // flows in the group
	Internals cc.Internals // in the order of the algorithm's Spec
	Class     Class
	Target    cc.Rate // 0: none

	Cwnd       cc.Bytes // the group's window
	Share      cc.Bytes // this flow's part of it: the window that it was told last
	Lent       cc.Bytes // what it is due of the window, does not want and leaves to others
	PacingRate cc.Rate  // 0: not paced
	Inflight   cc.Bytes // this flow's
	Unsent     cc.Bytes // in the transport's own queue; part of Inflight unless the leg enforces the window

	SRTT, MinRTT, LatestRTT time.Duration // 0: no sample yet
	QueueingDelay           time.Duration // LatestRTT − MinRTT
	ReverseQueue            time.Duration // of that, on the way back
	OneWay                  bool          // which is known
	DeliveryRate            cc.Rate       // newest sample

	Taken, Delivered, Lost, Marked cc.Bytes // Taken: granted, or gone where the leg enforces the window
	Timeouts                       int
	LossEvents                     int // OnLoss calls
	LimitedBy                      LimitedBy
	Limited                        LimitedTime // up to the last report
}

// Snapshots returns the state of every open flow, ordered by ID.
func (m *Manager) Snapshots() []Snapshot {
	m.flowsMu.Lock()
	flows := slices.Clone(m.flows)
	m.flowsMu.Unlock()
	all := make([]Snapshot, 0, len(flows))
	for _, f := range flows {
		if s, open := f.takeSnapshot(); open {
			all = append(all, s)
		}
	}
	return all
}

// Snapshot returns the flow's present state.
func (f *Flow) Snapshot() Snapshot {
	s, _ := f.takeSnapshot()
	return s
}

func (f *Flow) takeSnapshot() (s Snapshot, open bool) {
	g := f.lockGroup()
	s = Snapshot{
		ID: f.id, Group: f.terms.Group, Algorithm: g.spec.Name, Phase: g.ctl.Phase, Members: len(g.members),
		Internals: g.algorithmInternals(), Class: f.terms.Class, Target: f.terms.Target,
		Cwnd: g.ctl.Cwnd, PacingRate: g.ctl.PacingRate, Inflight: f.inflight, Unsent: f.last.Unsent,
		SRTT: g.srtt(&f.member), MinRTT: g.leastRTT(&f.member), LatestRTT: f.rtt.latest,
		DeliveryRate: f.rate, OneWay: f.oneWay,
		Taken: f.taken, Delivered: f.last.Acked, Lost: f.last.Lost, Marked: f.last.Marked,
		Timeouts: f.last.Timeouts, LossEvents: f.losses, LimitedBy: f.limits.by, Limited: f.limits.spent,
	}
	if open = !f.closed; open {
		s.Share = f.limit.Cwnd
		if f.want == 0 {
			s.Lent = f.path.fromReference(max(0, f.share-f.counts))
		}
	}
	reverse := f.reverse
	g.mu.Unlock()
	if s.LatestRTT > 0 {
		s.QueueingDelay = max(0, s.LatestRTT-s.MinRTT)
		s.ReverseQueue = min(reverse, s.QueueingDelay)
	}
	return s, open
}
