package telemetry

import (
	"net/http"
	"net/netip"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/telemetry/page"
)

// Flow is one connection as /flows lists it. Durations are in seconds; what is
// not known yet is 0.
type Flow struct {
	ID       uint64 `json:"id"`
	State    string `json:"state"` // greeting, dialing, open, half_closed or closing
	Listener string `json:"listener"`
	Rule     string `json:"rule"`             // empty: the defaults
	Client   string `json:"client"`           // address and port
	Peer     string `json:"peer,omitempty"`   // of the tunnel that the client is inside; absent: it is in none
	Target   string `json:"target,omitempty"` // address and port; empty until it is dialled
	Host     string `json:"host,omitempty"`   // as the client named it
	// ServerName is absent where no rule asked for it, and where there was none.
	ServerName string  `json:"server_name,omitempty"`
	Age        float64 `json:"age_seconds"`
	Setup      float64 `json:"setup_seconds"` // from accepted to relaying
	Idle       float64 `json:"idle_seconds"`  // since a byte last moved

	Down *Direction `json:"down,omitempty"` // towards the client; absent until relaying
	Up   *Direction `json:"up,omitempty"`   // towards the server

	ClientLeg *Leg `json:"client_leg,omitempty"`
	ServerLeg *Leg `json:"server_leg,omitempty"`
}

// Direction is one direction of a connection: what has moved, and what its
// congestion control holds.
type Direction struct {
	Algorithm string   `json:"algorithm"`     // none: the kernel alone decides
	Read      cc.Bytes `json:"read_bytes"`    // from the leg that the bytes come from
	Written   cc.Bytes `json:"written_bytes"` // to the leg that they go to
	Spliced   cc.Bytes `json:"spliced_bytes"` // of Written, moved inside the kernel
	Finished  bool     `json:"finished"`      // its FIN has been passed on

	// Control is absent where the kernel alone decides.
	Control *Control `json:"control,omitempty"`
	Receive Receive  `json:"receive"`
}

// Receive is the receive window that a leg advertises to the sender of these bytes.
type Receive struct {
	Algorithm string `json:"algorithm"`      // none: it is left to the transport
	Held      bool   `json:"held,omitempty"` // the window is in force, because bytes on their way here are queued
	Why       string `json:"why,omitempty"`  // the reason why there is none although it was asked for
	// Control is absent until many bytes have come, or for the reason in Why. Its queueing delay is that on the bytes'
	// way here. Its share is the window that comes into force once there is a queue.
	Control *Control `json:"control,omitempty"`
}

// Control is the congestion control of a direction. The window and the rate
// are those of all flows in the group together.
type Control struct {
	Group         string   `json:"group"`
	Members       int      `json:"members"`                // flows of the group
	Class         string   `json:"class"`                  // bulk, delay_sensitive or guarantee
	Target        cc.Rate  `json:"target_bits_per_second"` // 0: none
	Phase         string   `json:"phase"`                  // of the algorithm, in its own words
	Cwnd          cc.Bytes `json:"cwnd_bytes"`             // of the group
	Share         cc.Bytes `json:"share_bytes"`            // this flow's part of the window
	Unused        cc.Bytes `json:"unused_share_bytes"`     // the part of its share by weight that it leaves to others
	PacingRate    cc.Rate  `json:"pacing_bits_per_second"` // 0: not paced
	Inflight      cc.Bytes `json:"inflight_bytes"`
	Unsent        cc.Bytes `json:"unsent_bytes"` // in the socket and not on the wire
	SRTT          float64  `json:"srtt_seconds"`
	MinRTT        float64  `json:"min_rtt_seconds"`
	LatestRTT     float64  `json:"latest_rtt_seconds"`
	QueueingDelay float64  `json:"queueing_delay_seconds"` // the newest round trip above the least
	// Forward and Reverse are its parts on the way there and on the way back; absent
	// where the peer's timestamps do not tell them apart.
	Forward      *float64 `json:"forward_queueing_delay_seconds,omitempty"`
	Reverse      *float64 `json:"reverse_queueing_delay_seconds,omitempty"`
	DeliveryRate cc.Rate  `json:"delivery_bits_per_second"`
	Delivered    cc.Bytes `json:"delivered_bytes"`
	Lost         cc.Bytes `json:"lost_bytes"`
	Marked       cc.Bytes `json:"marked_bytes"` // with ECN's CE (RFC 3168)
	LossEvents   int      `json:"loss_events"`
	Timeouts     int      `json:"timeouts"`
	LimitedBy    string   `json:"limited_by"` // the cause at present
	// Limited is the time spent limited by each cause, in seconds.
	Limited map[string]float64 `json:"limited_seconds"`
	// Internals are absent where the algorithm shows none.
	Internals Internals `json:"internals,omitempty"`
}

// Leg is one leg as its transport sees it.
type Leg struct {
	Tier          string   `json:"tier"`              // of the datapath: kernel, netstack or quic
	Envelope      string   `json:"envelope"`          // the transport's own congestion control
	Missing       []string `json:"missing,omitempty"` // what the leg does without, in words
	Cwnd          cc.Bytes `json:"cwnd_bytes"`        // of that congestion control
	SRTT          float64  `json:"srtt_seconds"`
	MinRTT        float64  `json:"min_rtt_seconds"`
	DeliveryRate  cc.Rate  `json:"delivery_bits_per_second"`
	Unsent        cc.Bytes `json:"unsent_bytes"` // in the send queue and not on the wire
	Retransmitted cc.Bytes `json:"retransmitted_bytes"`
	SignalErrors  uint64   `json:"signal_errors"` // failed reads of the transport's state
	// Fallbacks is how often the kernel ran Reno on the leg, because the process did not answer in time.
	Fallbacks uint64 `json:"fallbacks"`
}

// describeFlow returns a connection as /flows lists it.
func describeFlow(f *proxy.FlowInfo) Flow {
	out := Flow{
		ID: f.ID, State: string(f.State), Listener: f.Listener, Rule: f.Rule,
		Peer: f.Peer, Host: f.Host, ServerName: f.ServerName,
		Age: f.Age.Seconds(), Setup: f.Setup.Seconds(), Idle: f.Idle.Seconds(),
	}
	if f.Source.IsValid() {
		out.Client = f.Source.String()
	}
	if f.Target.IsValid() {
		out.Target = f.Target.String()
	}
	if f.Relayed() {
		out.Down, out.Up = describeDirection(&f.Down), describeDirection(&f.Up)
		out.ClientLeg, out.ServerLeg = describeLeg(&f.Client), describeLeg(&f.Server)
	}
	return out
}

// describeLeg returns a leg as /flows lists it.
func describeLeg(i *datapath.Info) *Leg {
	return &Leg{
		Tier: i.Tier, Envelope: i.Envelope, Missing: i.Missing,
		Cwnd: i.Cwnd, SRTT: i.SRTT.Seconds(), MinRTT: i.MinRTT.Seconds(), DeliveryRate: i.DeliveryRate,
		Unsent: i.Unsent, Retransmitted: i.Retransmitted, SignalErrors: i.SignalErrors,
		Fallbacks: i.Fallbacks,
	}
}

// describeDirection has a Control only where a window of ours is in force.
func describeDirection(d *proxy.DirectionInfo) *Direction {
	out := &Direction{
		Algorithm: d.Algorithm, Read: d.Read, Written: d.Written, Spliced: d.Spliced, Finished: d.Finished,
	}
	if d.Managed {
		out.Control = describeControl(&d.Flow)
	}
	out.Receive = Receive{Algorithm: d.Receive.Algorithm, Held: d.Receive.InForce, Why: d.Receive.Why}
	if d.Receive.Held {
		out.Receive.Control = describeControl(&d.Receive.Flow)
	}
	return out
}

// describeControl returns the state of a flow as lists have it: durations in seconds, causes by name.
func describeControl(s *flow.Snapshot) *Control {
	c := &Control{
		Group: s.Group, Members: s.Members, Class: s.Class.String(), Target: s.Target, Phase: s.Phase,
		Cwnd: s.Cwnd, Share: s.Share, Unused: s.Lent, PacingRate: s.PacingRate,
		Inflight: s.Inflight, Unsent: s.Unsent,
		SRTT: s.SRTT.Seconds(), MinRTT: s.MinRTT.Seconds(), LatestRTT: s.LatestRTT.Seconds(),
		QueueingDelay: s.QueueingDelay.Seconds(),
		DeliveryRate:  s.DeliveryRate, Delivered: s.Delivered, Lost: s.Lost, Marked: s.Marked,
		LossEvents: s.LossEvents, Timeouts: s.Timeouts, LimitedBy: s.LimitedBy.String(), Limited: map[string]float64{},
		Internals: InternalsOf(s.Algorithm, s.Internals),
	}
	if s.OneWay {
		forward, reverse := (s.QueueingDelay - s.ReverseQueue).Seconds(), s.ReverseQueue.Seconds()
		c.Forward, c.Reverse = &forward, &reverse
	}
	for by, d := range s.Limited {
		if d > 0 {
			c.Limited[flow.LimitedBy(by).String()] = d.Seconds()
		}
	}
	return c
}

// Group is one group of flows that share a window, as /hosts lists it. Durations
// are in seconds; what is not known yet is 0.
type Group struct {
	Name      string       `json:"name"`
	Algorithm string       `json:"algorithm"`
	Receives  bool         `json:"receives"` // the hosts send, and this is the window that we advertise
	Phase     string       `json:"phase"`
	Hosts     []netip.Addr `json:"hosts"`   // where the bytes go; the first of them where there are many
	Members   int          `json:"members"` // flows; 0: the window waits for the next
	Active    int          `json:"active"`  // members with something in flight or to send
	Idle      float64      `json:"idle_seconds"`

	Cwnd     cc.Bytes `json:"cwnd_bytes"`
	Inflight cc.Bytes `json:"inflight_bytes"`
	// Borrowed is what members have in flight beyond their shares by weight, out of what others leave unused.
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
	// RivalRate is the rate of what goes to the host and is not of the group. 0: nothing does, or nothing counts it.
	RivalRate cc.Rate `json:"rival_bits_per_second"`

	// UDP is what is held of the group's; absent where none is.
	UDP *page.HeldUDP `json:"held_udp,omitempty"`
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
	// Believed is the part of these rates that the group believes. Doubt says that they are too "high" or too "low";
	// empty: neither.
	Believed float64        `json:"believed"`
	Doubt    flow.HintDoubt `json:"doubt"`
}

// describeGroup returns a group as /hosts lists it.
func describeGroup(g *flow.Group, now cc.Time) Group {
	out := Group{
		Name: g.Name, Algorithm: g.Algorithm, Receives: g.Receives, Phase: g.Phase,
		Hosts: g.Hosts, Members: g.Members, Active: g.Active, Idle: g.Idle.Seconds(),
		Cwnd: g.Cwnd, Inflight: g.Inflight, Borrowed: g.Lent, Unused: g.Unused, PacingRate: g.PacingRate,
		SRTT: g.SRTT.Seconds(), MinRTT: g.MinRTT.Seconds(), LatestRTT: g.LatestRTT.Seconds(),
		QueueingDelay: g.QueueingDelay.Seconds(),
		DeliveryRate:  g.DeliveryRate, Delivered: g.Delivered, LimitedBy: g.LimitedBy.String(),
		RivalRate: g.RivalRate, Capped: g.Capped, Internals: InternalsOf(g.Algorithm, g.Internals),
	}
	if out.Hosts == nil {
		out.Hosts = []netip.Addr{}
	}
	if h := g.Hint; h != nil {
		out.Hint = &GroupHint{
			Age: h.Age(now).Seconds(), Capacity: h.Capacity, FairShare: h.FairShare,
			LinkRate: h.LinkRate, ArrivalRate: h.ArrivalRate,
			QueueRoom: h.QueueRoom, Flows: h.Flows, RadioLost: h.RadioLost, Share: h.Share,
			Believed: g.Believed, Doubt: g.HintDoubt,
		}
	}
	return out
}

// Peer is one peer of a WireGuard tunnel as /v1/peers lists it, or one session of
// a MASQUE client that sends packets.
type Peer struct {
	Listener  string         `json:"listener"`
	Name      string         `json:"name"`
	PublicKey string         `json:"public_key,omitempty"` // WireGuard's
	Addresses []netip.Prefix `json:"addresses"`            // inside the tunnel
	Endpoint  string         `json:"endpoint,omitempty"`   // where it was last heard from; empty: never
	Handshake float64        `json:"handshake_seconds"`    // when WireGuard's last was, in Unix time; 0: never
	Received  uint64         `json:"received_bytes"`       // WireGuard's with the tunnel's own
	Sent      uint64         `json:"sent_bytes"`

	// The load of all connections of this peer. Delay and rate are the newest of connections with bytes in flight to it.
	Connections   int      `json:"connections"`
	QueueingDelay float64  `json:"queueing_delay_seconds"`
	DeliveryRate  cc.Rate  `json:"delivery_bits_per_second"`
	Retransmitted cc.Bytes `json:"retransmitted_bytes"`
}

// withLoads returns p with the load of its connections.
func (p Peer) withLoads(loads peerLoads) Peer {
	l := loads[peerKey{p.Listener, p.Name}]
	p.Connections, p.QueueingDelay = l.connections, l.queueing.Seconds()
	p.DeliveryRate, p.Retransmitted = l.rate, l.retransmitted
	return p
}

// servePeers answers with the peers of all tunnels, each with the load of its connections.
func (p Pages) servePeers(w http.ResponseWriter, r *http.Request) {
	var peers []Peer
	loads := peerLoads{}
	loads.addCounters(p.Source.Snapshot(loads.addFlow).Peers)
	for _, t := range p.Source.Tunnels() {
		for _, s := range t.Peers {
			out := Peer{
				Listener: t.Listener, Name: s.Name, PublicKey: s.PublicKey.String(), Addresses: s.Addresses,
				Endpoint: s.Endpoint, Received: s.Received, Sent: s.Sent,
			}
			if !s.Handshake.IsZero() {
				out.Handshake = unixSeconds(s.Handshake)
			}
			peers = append(peers, out.withLoads(loads))
		}
		for _, s := range t.Sessions {
			out := Peer{Listener: t.Listener, Name: s.Name, Endpoint: s.Endpoint, Received: s.Received, Sent: s.Sent}
			for _, a := range s.Addresses {
				out.Addresses = append(out.Addresses, netip.PrefixFrom(a, a.BitLen()))
			}
			peers = append(peers, out.withLoads(loads))
		}
	}
	p.serveList(w, r, len(peers), eachOf(peers, func(q *Peer) any { return q }))
}
