package telemetry

import (
	"net/netip"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// Group is one group of flows that share a window, as /hosts lists it. Durations
// are in seconds; what is not known yet is 0.
type Group struct {
	Name      string       `json:"name"`
	Algorithm string       `json:"algorithm"`
	Receives  bool         `json:"receives"` // the hosts send, and this is the window that they are let send in
	Phase     string       `json:"phase"`
	Hosts     []netip.Addr `json:"hosts"`   // where the bytes go; the first of them where there are many
	Members   int          `json:"members"` // flows; 0: the window waits for the next
	Active    int          `json:"active"`  // members with something in flight or to send
	Idle      float64      `json:"idle_seconds"`

	Cwnd     cc.Bytes `json:"cwnd_bytes"`
	Inflight cc.Bytes `json:"inflight_bytes"`
	// in flight beyond shares by weight, out of what other members leave unused
	Borrowed   cc.Bytes `json:"borrowed_bytes"`
	Unused     cc.Bytes `json:"unused_bytes"` // what no member wants
	PacingRate cc.Rate  `json:"pacing_bits_per_second"`

	SRTT          float64  `json:"srtt_seconds"`
	MinRTT        float64  `json:"min_rtt_seconds"`
	LatestRTT     float64  `json:"latest_rtt_seconds"`
	QueueingDelay float64  `json:"queueing_delay_seconds"`
	DeliveryRate  cc.Rate  `json:"delivery_bits_per_second"`
	Delivered     cc.Bytes `json:"delivered_bytes"`
	LimitedBy     string   `json:"limited_by"`

	// Hint is the newest one, with its age now; absent where there is none.
	Hint   *GroupHint `json:"hint,omitempty"`
	Capped bool       `json:"capped"` // by that hint
	// Internals are absent where the algorithm shows none.
	Internals Internals `json:"internals,omitempty"`
}

// GroupHint is a hint as a group knows it.
type GroupHint struct {
	Age         float64  `json:"age_seconds"`
	Capacity    cc.Rate  `json:"capacity_bits_per_second"`
	FairShare   cc.Rate  `json:"fair_share_bits_per_second"`
	LinkRate    cc.Rate  `json:"link_rate_bits_per_second"`
	ArrivalRate cc.Rate  `json:"arrival_rate_bits_per_second"`
	QueueRoom   cc.Bytes `json:"queue_room_bytes"`
	Flows       int      `json:"flows"`
	RadioLost   cc.Bytes `json:"radio_lost_bytes"`
	Share       float64  `json:"share"`
	// Believed is the part of these rates that is; Doubt is empty, "high" or "low".
	Believed float64        `json:"believed"`
	Doubt    flow.HintDoubt `json:"doubt"`
}

// describeGroup turns the flow manager's account of a group into ours.
func describeGroup(g *flow.Group, now cc.Time) Group {
	out := Group{
		Name: g.Name, Algorithm: g.Algorithm, Receives: g.Receives, Phase: g.Phase,
		Hosts: g.Hosts, Members: g.Members, Active: g.Active, Idle: g.Idle.Seconds(),
		Cwnd: g.Cwnd, Inflight: g.Inflight, Borrowed: g.Lent, Unused: g.Unused, PacingRate: g.PacingRate,
		SRTT: g.SRTT.Seconds(), MinRTT: g.MinRTT.Seconds(), LatestRTT: g.LatestRTT.Seconds(), QueueingDelay: g.QueueingDelay.Seconds(),
		DeliveryRate: g.DeliveryRate, Delivered: g.Delivered, LimitedBy: g.LimitedBy.String(),
		Capped: g.Capped, Internals: InternalsOf(g.Algorithm, g.Internals),
	}
	if out.Hosts == nil {
		out.Hosts = []netip.Addr{}
	}
	if h := g.Hint; h != nil {
		out.Hint = &GroupHint{
			Age: h.Age(now).Seconds(), Capacity: h.Capacity, FairShare: h.FairShare, LinkRate: h.LinkRate, ArrivalRate: h.ArrivalRate,
			QueueRoom: h.QueueRoom, Flows: h.Flows, RadioLost: h.RadioLost, Share: h.Share,
			Believed: g.Believed, Doubt: g.HintDoubt,
		}
	}
	return out
}
