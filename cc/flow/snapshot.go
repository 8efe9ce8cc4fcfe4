package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// LimitedBy names what holds a flow back at the moment.
type LimitedBy uint8

// The reasons a flow is not sending more.
const (
	LimitedByApplication LimitedBy = iota // nothing to send
	LimitedByCwnd                         // the algorithm's window, or this flow's share of it
	LimitedByPacing                       // the algorithm's pacing rate or the policy's maximum rate
	LimitedByTransport                    // the transport below holds bytes back: its own window or pacing
	LimitedByReceiver                     // the peer's receive window
	numLimits
)

// String returns the name used in metrics, logs and JSON.
func (l LimitedBy) String() string {
	return [...]string{"application", "cwnd", "pacing", "transport", "receiver"}[l]
}

// MarshalText returns String.
func (l LimitedBy) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// Snapshot is the state of one flow at one moment.
type Snapshot struct {
	ID        uint64
	Group     string
	Algorithm string
	Phase     string
	Members   int          // flows in the macroflow
	Internals cc.Internals // in the order of the algorithm's Spec
	Class     Class
	Target    cc.Rate // 0: none

	Cwnd       cc.Bytes // the macroflow's window
	Share      cc.Bytes // this flow's part of it: what its transport was told, where that holds the window
	Lent       cc.Bytes // what it is due of the window, does not want and leaves to others
	PacingRate cc.Rate  // 0: not paced
	Inflight   cc.Bytes // this flow's
	Unsent     cc.Bytes // in the transport's own queue; part of Inflight unless the transport holds the window

	SRTT, MinRTT, LatestRTT time.Duration // 0: no sample yet
	QueueingDelay           time.Duration // LatestRTT − MinRTT
	DeliveryRate            cc.Rate       // newest sample

	Taken, Delivered, Lost, Marked cc.Bytes // Taken: granted, or gone where the transport holds the window
	Timeouts                       int
	LossEvents                     int // OnLoss calls
	LimitedBy                      LimitedBy
	Limited                        map[LimitedBy]time.Duration // time spent in each state, up to the last report
}

// Snapshot returns the flow's present state.
func (f *Flow) Snapshot() Snapshot {
	m := f.lock()
	defer m.mu.Unlock()
	share, lent := f.part()
	s := Snapshot{
		ID: f.id, Group: f.terms.Group, Algorithm: m.spec.Name, Phase: m.ctl.Phase, Members: len(m.members), Internals: m.inspect(),
		Class: f.terms.Class, Target: f.terms.Target,
		Cwnd: m.ctl.Cwnd, Share: share, Lent: lent, PacingRate: m.ctl.PacingRate, Inflight: f.inflight, Unsent: f.last.Unsent,
		SRTT: f.srtt(), MinRTT: f.leastRTT(), LatestRTT: f.rtt.latest, DeliveryRate: f.rate,
		Taken: f.taken, Delivered: f.last.Acked, Lost: f.last.Lost, Marked: f.last.Marked,
		Timeouts: f.last.Timeouts, LossEvents: f.losses, LimitedBy: f.limits.by,
		Limited: make(map[LimitedBy]time.Duration, numLimits),
	}
	if f.rtt.latest > 0 {
		s.QueueingDelay = max(0, f.rtt.latest-f.leastRTT())
	}
	for by, d := range f.limits.spent {
		if d > 0 {
			s.Limited[LimitedBy(by)] = d
		}
	}
	return s
}
