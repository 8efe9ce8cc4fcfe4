package telemetry

import (
	"iter"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/hold"
	vpn "github.com/penstock-net/penstock/proxy/tunnel"
)

// still is a proxy that stands still.
type still struct {
	counters proxy.Counters
	flows    []proxy.FlowInfo
	groups   []flow.Group
	tunnels  []proxy.TunnelInfo
	held     []proxy.HeldInfo
}

func (s *still) Flows() (int, iter.Seq[*proxy.FlowInfo]) { return len(s.flows), pointers(s.flows) }
func (s *still) Counters() proxy.Counters                { return s.counters }
func (s *still) Groups() ([]flow.Group, cc.Time)         { return s.groups, cc.Time(time.Minute) }

func (s *still) Snapshot(visit func(*proxy.FlowInfo)) proxy.Counters {
	pointers(s.flows)(func(f *proxy.FlowInfo) bool { visit(f); return true })
	return s.counters
}

// pointers yields pointers to all.
func pointers[T any](all []T) iter.Seq[*T] {
	return func(yield func(*T) bool) {
		for i := range all {
			if !yield(&all[i]) {
				return
			}
		}
	}
}

func (s *still) Tunnels() []proxy.TunnelInfo { return s.tunnels }
func (s *still) Held() []proxy.HeldInfo      { return s.held }

// busyProxy has something in every field that is shown.
func busyProxy() *still {
	histogram := datapath.Histogram{Bounds: []float64{.1, 1}, Counts: []uint64{3, 2, 1}, Sum: 12.5}
	direction := proxy.DirectionCounters{
		Read: 3000, Written: 2000, Spliced: 1000, Retransmitted: 1448, SignalErrors: 1,
		Control: map[string]proxy.AlgorithmCounters{"copa": {
			Algorithm: "copa", LossEvents: 4,
			Limited: flow.LimitedTime{flow.LimitedByCwnd: 1500 * time.Millisecond, flow.LimitedByReceiver: time.Second},
		}},
	}
	managed := proxy.DirectionInfo{
		Algorithm: "copa", Read: 700, Written: 500, Spliced: 100, Managed: true,
		Flow: flow.Snapshot{
			ID: 9, Group: "down|lan|192.0.2.7", Algorithm: "copa", Phase: "steady", Members: 2,
			Class: flow.Guarantee, Target: 5e6, Cwnd: 40000, Share: 20000, Lent: 3000, PacingRate: 8e6, Inflight: 1448, Unsent: 52,
			SRTT: 40 * time.Millisecond, MinRTT: 20 * time.Millisecond, LatestRTT: 45 * time.Millisecond,
			QueueingDelay: 25 * time.Millisecond, ReverseQueue: 10 * time.Millisecond, OneWay: true, DeliveryRate: 12e6,
			Taken: 600, Delivered: 450, Lost: 48, Marked: 1, Timeouts: 2, LossEvents: 3,
			LimitedBy: flow.LimitedByCwnd,
			Limited:   flow.LimitedTime{flow.LimitedByCwnd: 1500 * time.Millisecond},
			Internals: cc.Internals{20.5, 2, 0.02, 41.25},
		},
	}
	leg := datapath.Info{
		Tier: "kernel", Envelope: "bbr", Missing: []string{"a thing"}, Cwnd: 14480, SRTT: 41 * time.Millisecond,
		MinRTT: 19 * time.Millisecond, DeliveryRate: 11e6, Unsent: 52, Retransmitted: 1448, SignalErrors: 1,
	}
	return &still{
		counters: proxy.Counters{
			Listeners: []proxy.ListenerCounters{{
				Listener: "lan", Mode: "tproxy", Accepted: 12, Active: 3,
				Rejected: map[proxy.Reason]uint64{proxy.RejectedDialRefused: 5}, Dial: histogram, Setup: histogram,
			}, {Listener: "vpn", Mode: "masque", Rejected: map[proxy.Reason]uint64{proxy.RejectedAuth: 1}}},
			Routes: []proxy.RouteCounters{{
				Listener: "lan", Rule: "all", Opened: 7, Active: 2,
				Closed: map[proxy.Cause]uint64{
					{Who: "client", How: proxy.ClosedEOF}: 5, {Who: "server", How: proxy.ClosedReset}: 4,
				},
				Down: direction, Up: direction, Duration: histogram,
			}},
			Peers: []proxy.PeerCounters{
				{Listener: "vpn", Peer: "phone", Opened: 9, Active: 2, Retransmitted: 4344},
				{Listener: "vpn", Peer: "sold", Opened: 1, Retransmitted: 1448},
				{Listener: "vpn2", Peer: "browser", Opened: 3, Active: 1, Retransmitted: 2896},
			},
			Active: 3, Sources: 2, Limit: 100, Draining: true,
		},
		flows: []proxy.FlowInfo{
			{
				ID: 1, Listener: "lan", Rule: "all", State: proxy.StateOpen, Host: "server.example:443",
				Source: netip.MustParseAddrPort("192.0.2.7:1234"), Target: netip.MustParseAddrPort("198.51.100.1:443"),
				Age: 90 * time.Second, Setup: 30 * time.Millisecond, Idle: time.Millisecond,
				Down: managed, Up: proxy.DirectionInfo{
					Algorithm: "none", Read: 10,
					Written: 10,
				}, Client: leg, Server: leg,
			},
			{
				ID: 2, Listener: "lan", Peer: "phone", State: proxy.StateGreeting,
				Source: netip.MustParseAddrPort("192.0.2.8:99"),
			},
		},
		groups: []flow.Group{
			{
				Name: managed.Flow.Group, Algorithm: "copa", Phase: "steady", Hosts: []netip.Addr{netip.MustParseAddr("192.0.2.7")},
				Members: 3, Active: 2, Cwnd: 40000, Inflight: 30000, Lent: 6000, Unused: 4000, PacingRate: 8e6,
				SRTT: managed.Flow.SRTT, MinRTT: managed.Flow.MinRTT, LatestRTT: managed.Flow.LatestRTT, QueueingDelay: managed.Flow.QueueingDelay,
				DeliveryRate: 12e6, Delivered: 1e6, LimitedBy: flow.LimitedByCwnd, Capped: true, Internals: managed.Flow.Internals,
				Hint: &cc.Hint{
					At: cc.Time(time.Minute - time.Second/2), Capacity: 20e6, FairShare: 10e6, LinkRate: 40e6, ArrivalRate: 30e6,
					QueueRoom: 15000, Flows: 4, RadioLost: 1448, Share: .5,
				},
				HintDoubt: flow.HintTooHigh, Believed: .75,
			},
			{
				Name: "up|lan|satellite", Algorithm: "cubic", Phase: "avoidance", Idle: 7 * time.Second, Cwnd: 14480,
				Unused: 14480,
			},
		},
		tunnels: []proxy.TunnelInfo{
			{Listener: "vpn", Mode: "wireguard", Up: true, Status: vpn.Status{
				Received: 1000, Sent: 9000, Refused: 3, Unauthorized: 2, Lost: 2, Handshakes: 1, Stalls: 4, Malformed: 5, Damaged: 6, Senseless: 7, Expired: 8,
				SendErrors: vpn.SendErrors{TooLarge: 1, Unreachable: 2, Forbidden: 3, NoBuffer: 4, Other: 5},
				Datagrams: vpn.DatagramStats{
					Sessions: 4, Peers: 2, SentPackets: 50, ReceivedPackets: 60,
					Refused: 1, Crowded: 2, Late: 3, Overflow: 4, Unsolicited: 5, Failed: 6, Evicted: 7, Notices: 8,
				},
				Peers: []vpn.PeerState{
					{
						Name: "phone", PublicKey: access.Key{1}, Addresses: []netip.Prefix{netip.MustParsePrefix("10.9.0.2/32")},
						Endpoint: "198.51.100.9:4000", Handshake: time.Unix(1.7e9, 5e8), Received: 1100, Sent: 9900,
					},
					{
						Name: "tablet", PublicKey: access.Key{2},
						Addresses: []netip.Prefix{netip.MustParsePrefix("10.9.0.3/32")},
					},
				},
			}},
			{Listener: "vpn2", Mode: "masque", Status: vpn.Status{Received: 1, Clients: map[string]vpn.Traffic{
				"laptop": {Received: 5700, Sent: 6800}, "198.51.100.8": {Received: 1},
			}, Sessions: []vpn.SessionState{{
				Name: "laptop", Endpoint: "198.51.100.7:5000", Received: 700, Sent: 800,
				Addresses: []netip.Addr{netip.MustParseAddr("10.10.0.1"), netip.MustParseAddr("fd00:10::1")},
			}}}},
		},
		held: []proxy.HeldInfo{{
			Listener: "lan", Direction: "down",
			Stats: hold.Stats{
				AcceptedPackets: 100, AcceptedBytes: 120_000, HeldPackets: 40, LateDrops: 3, OverflowDrops: 2, MarkedPackets: 5,
				RefusedPackets: 6, PassedPackets: 7, UnmanagedPackets: 8, Waiting: 9, WaitingBytes: 10_800, Echoes: 12,
				EchoAnswers: 11, Clients: 2, Flows: 4,
			},
			Clients: []hold.ClientState{
				{Address: netip.MustParseAddr("192.0.2.8"), Group: "down|lan|192.0.2.8", AcknowledgedBy: "share"},
				{
					Address: netip.MustParseAddr("192.0.2.7"), Group: managed.Flow.Group, Waiting: 9, WaitingBytes: 10_800,
					BusyFlows: 2, AcknowledgedBy: "echo", Flow: &managed.Flow,
				},
			},
		}},
	}
}

// handClock is a clock moved by hand.
type handClock struct{ t cc.Time }

func (c *handClock) now() cc.Time { return c.t }
