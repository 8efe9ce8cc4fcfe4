package hold

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/policy"
)

const segment = cc.Bytes(1250)

// road is a Holder in virtual time, with the verdicts that it gave and a TCP flow beside that wants the window.
type road struct {
	*Holder
	now      cc.Time
	due      cc.Time // of the manager's next tick
	manager  *flow.Manager
	accepted []uint32
	dropped  []uint32
	marked   []uint32
	requests []echoRequest
	// neighbour is a client on a connected network, if its address is valid, and asked are the requests to it, marked
	// or not.
	neighbour Neighbour
	asked     []bool
	ecn       flow.ECN // of packets that arrive
	nextID    uint32
	whole     bool // the last argument of SetGSO
	decide    func(FlowKey) Decision
	seen      []string // server name of each decision
}

// echoRequest is an echo request that was sent behind a number of accepted packets.
type echoRequest struct {
	to           netip.Addr
	id, sequence uint16
	behind       int
}

func (r *road) Send(to netip.Addr, id, sequence uint16) {
	r.requests = append(r.requests, echoRequest{to, id, sequence, len(r.accepted)})
}

// FindNeighbour finds the host of neighbour.
func (r *road) FindNeighbour(address netip.Addr) (Neighbour, bool) {
	return r.neighbour, r.neighbour.address == address
}

func (r *road) AskNeighbour(_ *Neighbour, marked bool) { r.asked = append(r.asked, marked) }

// answerAsNeighbour answers all requests to a neighbour after a round trip, as a host with that hardware address.
func (r *road) answerAsNeighbour(rtt time.Duration, hardware byte) {
	asked := r.asked
	r.asked = nil
	r.wait(rtt)
	for _, marked := range asked {
		a := neighbourAnswer{from: r.neighbour.address, to: r.neighbour.source, hardware: []byte{2, 0, 0, 0, 0, hardware}}
		if marked {
			a.to = r.neighbour.marked
		}
		r.receiveNeighbour(r.now, a)
	}
}

func (r *road) AcceptWithMark(id, mark uint32) {
	r.accepted, r.marked = append(r.accepted, id), append(r.marked, mark)
}

// answer answers all echo requests after a round trip.
func (r *road) answer(rtt time.Duration) {
	requests := r.requests
	r.requests = nil
	r.wait(rtt)
	for _, e := range requests {
		r.ReceiveEcho(r.now, e.to, e.id, e.sequence)
	}
}

func (r *road) SetGSO(on bool) { r.whole = on }

func (r *road) Flush() error { return nil }

func (r *road) Accept(id uint32) { r.accepted = append(r.accepted, id) }
func (r *road) Drop(id uint32)   { r.dropped = append(r.dropped, id) }

var window = flow.Terms{Group: "phone", Algorithm: "static", Params: cc.Params{"cwnd_packets": 10}}

func newRoad(t require.TestingT) *road {
	r := &road{now: cc.Time(time.Second), due: cc.Never, manager: &flow.Manager{}}
	r.manager.Arm = func(_ int, at cc.Time) { r.due = min(r.due, at) }
	r.decide = func(FlowKey) Decision { return Decision{Manage: true, Acknowledged: true, Terms: window} }
	r.Holder = New(Config{
		Flows: r.manager, Clock: func() cc.Time { return r.now },
		KeepServed: func(time.Duration) (bool, error) { return true, nil },
		Decide: func(f FlowKey, name string) Decision {
			r.seen = append(r.seen, name)
			return r.decide(f)
		},
		NeedsName:      func(FlowKey) bool { return true },
		ReadName:       policy.HelloServerName,
		CongestionMark: 0x80,
	}, r, r)
	return r
}

// wait lets time pass with the ticks of the manager and the rounds of the Holder.
func (r *road) wait(d time.Duration) {
	for end := r.now.Add(d); r.now < end; {
		r.now = min(end, r.now.Add(time.Millisecond))
		if r.due <= r.now {
			r.due = cc.Never
			r.due = min(r.due, r.manager.Tick(0, r.now))
		}
		r.runDueWork(r.now)
	}
}

// arrive lets a packet of a flow from the server's port arrive, and returns its identifier.
func (r *road) arrive(port uint16, size cc.Bytes) uint32 {
	packet := make([]byte, 28)
	packet[0], packet[1], packet[9] = 0x45, byte(r.ecn), protocolUDP
	copy(packet[12:], []byte{10, 77, 2, 2, 203, 0, 113, 9})
	packet[20], packet[21] = byte(port>>8), byte(port)
	return r.arriveAs(packet, size)
}

func (r *road) arriveAs(packet []byte, size cc.Bytes) uint32 {
	r.nextID++
	r.HandlePacket(r.now, Packet{ID: r.nextID, Length: int(size), Content: packet})
	return r.nextID
}

// occupy opens a TCP flow of the phone that has filled the window.
func (r *road) occupy(t require.TestingT) *flow.Flow {
	f, err := r.manager.Open(r.now, window, flow.Leg{Apply: func(flow.Limit) {}, Wake: func() {}})
	require.NoError(t, err)
	granted := f.Take(r.now, 1<<20).Bytes
	report := flow.Report{At: r.now, Written: granted, Pipe: granted, MSS: 1500}
	f.Report(report)
	r.wait(20 * time.Millisecond)
	report.At, report.Acked, report.Pipe, report.RTT = r.now, granted, 0, 20*time.Millisecond
	f.Report(report)
	f.Take(r.now, 1<<20)
	return f
}

func TestPacketsPassWhereNothingHoldsThem(t *testing.T) {
	for name, c := range map[string]struct {
		decision Decision
		packet   []byte
		count    func(Stats) uint64
		dropped  bool
	}{
		"no rule manages it": {Decision{}, nil, func(s Stats) uint64 { return s.UnmanagedPackets }, false},
		"a rule refuses it":  {Decision{Refuse: true}, nil, func(s Stats) uint64 { return s.RefusedPackets }, true},
		"the window has room": {
			Decision{Manage: true, Acknowledged: true, Terms: window}, nil, func(s Stats) uint64 { return s.AcceptedPackets }, false,
		},
		"it cannot be read": {Decision{Refuse: true}, []byte{0}, func(s Stats) uint64 { return s.PassedPackets }, false},
		"there is no such window": {
			Decision{Manage: true, Acknowledged: true, Terms: flow.Terms{Group: "phone", Algorithm: "nonsense"}},
			nil,
			func(s Stats) uint64 { return s.UnmanagedPackets }, false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoad(t)
			r.decide = func(FlowKey) Decision { return c.decision }
			var id uint32
			if c.packet != nil {
				id = r.arriveAs(c.packet, segment)
			} else {
				id = r.arrive(443, segment)
			}
			want := &r.accepted
			if c.dropped {
				want = &r.dropped
			}
			assert.Equal(t, []uint32{id}, *want)
			assert.EqualValues(t, 1, c.count(r.Stats()))
		})
	}
}

func TestPacketsWaitWhileTCPWantsTheWindowAndLeaveInOrder(t *testing.T) {
	r := newRoad(t)
	r.occupy(t)
	var sent []uint32
	for range 200 {
		sent = append(sent, r.arrive(443, segment))
	}
	at := len(r.accepted)
	require.Less(t, at, 100, "a flow that begins is lent a part of half a second's share")
	assert.Equal(t, 200-at, r.Stats().Waiting)
	assert.EqualValues(t, cc.Bytes(200-at)*segment, r.Stats().WaitingBytes)
	r.wait(400 * time.Millisecond)
	assert.Greater(t, len(r.accepted), at, "a round trip later there is room again")
	assert.IsIncreasing(t, r.accepted)
	assert.Subset(t, sent, r.accepted)
}

func TestASparseFlowDoesNotWaitBehindADownload(t *testing.T) {
	r := newRoad(t)
	r.occupy(t)
	for range 60 {
		r.arrive(443, segment)
		r.wait(time.Millisecond)
	}
	require.NotZero(t, r.Stats().Waiting)
	call := r.arrive(5004, 200)
	assert.Contains(t, r.accepted, call)
}

func TestAFullQueueDropsTheOldestOfTheFlowWithMost(t *testing.T) {
	r := newRoad(t)
	r.occupy(t)
	first := r.nextID
	for range 2*maxLanePackets + 50 {
		r.arrive(443, segment)
	}
	assert.LessOrEqual(t, r.Stats().Waiting, maxLanePackets)
	assert.LessOrEqual(t, r.Stats().WaitingBytes, uint64(maxLaneBytes))
	assert.NotZero(t, r.Stats().OverflowDrops)
	assert.Less(t, r.dropped[0], first+50, "the head of the queue is the oldest")
	assert.IsIncreasing(t, r.dropped)
}

func TestChangedRulesLetWaitingPacketsGoInTheirOrder(t *testing.T) {
	r := newRoad(t)
	r.occupy(t)
	for range 200 {
		r.arrive(443, segment)
	}
	require.NotZero(t, r.Stats().Waiting)
	r.decide = func(FlowKey) Decision { return Decision{Refuse: true} }
	r.Reconsider()
	r.runDueWork(r.now)
	assert.Zero(t, r.Stats().Waiting)
	assert.Empty(t, r.dropped)
	assert.Len(t, r.accepted, 200)
	assert.IsIncreasing(t, r.accepted)
	refused := r.arrive(443, segment)
	assert.Equal(t, []uint32{refused}, r.dropped, "the new rule is in force")
}

func TestIdleClientsAndFlowsAreForgotten(t *testing.T) {
	r := newRoad(t)
	r.arrive(443, segment)
	r.runDueWork(r.now)
	require.Equal(t, 1, r.Stats().Clients)
	r.wait(clientIdleTime + 2*sweepTime)
	assert.Zero(t, r.Stats().Clients)
	assert.Zero(t, r.Stats().Flows, "its window is gone, so the decision about its flow is, too")
	r.arrive(443, segment)
	assert.Len(t, r.accepted, 2)
}

func TestFlowsBeyondTheBoundShareAQueueAndKeepTheirOrder(t *testing.T) {
	for name, fill := range map[string]func(*road){
		"of all": func(r *road) {
			for i := range maxFlows {
				source := netip.AddrPortFrom(netip.IPv4Unspecified(), uint16(i))
				r.flows[FlowKey{Source: source, Protocol: uint8(i >> 16)}] = &flowState{}
			}
		},
		"of a client": func(r *road) {
			for i := range maxClientFlows {
				r.arrive(uint16(1000+i), 100)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoad(t)
			r.occupy(t)
			fill(r)
			known := len(r.flows)
			first := len(r.accepted)
			for range 300 {
				for port := range uint16(4) {
					r.arrive(port, segment)
				}
				r.wait(time.Millisecond)
			}
			assert.Len(t, r.flows, known)
			assert.NotZero(t, r.Stats().HeldPackets)
			assert.IsIncreasing(t, r.accepted[first:])
		})
	}
}

// TestAFloodLeavesRoomForACall has a phone with a TCP download and a call flooded from ever other ports.
func TestAFloodLeavesRoomForACall(t *testing.T) {
	for name, ecn := range map[string]flow.ECN{"Not-ECT": flow.NotECT, "ECT(0)": flow.ECT0, "ECT(1)": flow.ECT1} {
		t.Run(name, func(t *testing.T) {
			r := newRoad(t)
			r.wait(time.Second)
			r.arrive(5004, 200)
			r.wait(checkEvery + time.Millisecond)
			r.answer(20 * time.Millisecond)
			var calls []uint32
			port := uint16(10_000)
			for i := range 200 { // 20 ms each: 4 s of a call, the last three beside a flood
				r.ecn = flow.NotECT
				calls = append(calls, r.arrive(5004, 200))
				if i >= 50 {
					r.ecn = ecn
					for range 30 {
						port++
						r.arrive(port, segment)
					}
				}
				r.answer(20 * time.Millisecond)
			}
			assert.Subset(t, r.accepted, calls[:199])
			assert.NotZero(t, r.Stats().LateDrops+r.Stats().OverflowDrops)
			l := r.clients[netip.MustParseAddr("203.0.113.9")].lanes[0]
			assert.LessOrEqual(t, l.busy, 1)
		})
	}
}

func TestEveryPacketHasOneVerdictAndFlowsKeepTheirOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := newRoad(t)
		if rapid.Bool().Draw(t, "TCP beside") {
			r.occupy(t)
		}
		flowOf := map[uint32]uint16{}
		for range rapid.IntRange(1, 600).Draw(t, "events") {
			switch rapid.IntRange(0, 9).Draw(t, "event") {
			case 0:
				r.wait(time.Duration(rapid.IntRange(1, 80).Draw(t, "ms")) * time.Millisecond)
			case 1:
				r.Reconsider()
			default:
				port := uint16(rapid.IntRange(1, 4).Draw(t, "flow"))
				size := cc.Bytes(rapid.IntRange(28, 9000).Draw(t, "size"))
				flowOf[r.arrive(port, size)] = port
			}
		}
		r.releaseWaiting()
		require.Zero(t, r.Stats().Waiting)
		require.Zero(t, r.Stats().WaitingBytes)
		verdicts := map[uint32]int{}
		latest := map[uint16]uint32{}
		for _, id := range r.accepted {
			verdicts[id]++
			require.Greater(t, id, latest[flowOf[id]], "order of flow %d", flowOf[id])
			latest[flowOf[id]] = id
		}
		for _, id := range r.dropped {
			verdicts[id]++
		}
		require.Len(t, verdicts, len(flowOf))
		for id, n := range verdicts {
			require.Equal(t, 1, n, fmt.Sprintf("packet %d", id))
		}
	})
}

func TestAClientThatAnswersEchoRequestsHasAWindowWithoutTCP(t *testing.T) {
	r := newRoad(t)
	r.arrive(443, segment)
	r.wait(checkEvery + time.Millisecond)
	require.Len(t, r.requests, 1, "the client is asked")
	assert.Equal(t, "none", r.clients[r.requests[0].to].lanes[0].describeLane().AcknowledgedBy)
	r.answer(20 * time.Millisecond)
	assert.Equal(t, "echo", r.clients[netip.MustParseAddr("203.0.113.9")].lanes[0].describeLane().AcknowledgedBy)

	before := len(r.accepted)
	for range 200 {
		r.arrive(443, segment)
	}
	assert.InDelta(t, 12, len(r.accepted)-before, 1, "15,000 bytes are its window")
	require.NotEmpty(t, r.requests)
	assert.Less(t, r.requests[0].behind, len(r.accepted), "requests stand within the burst")
	before = len(r.accepted)
	r.wait(2 * checkEvery) // the last packets of the burst have a request, too
	r.answer(20 * time.Millisecond)
	assert.InDelta(t, 12, len(r.accepted)-before, 1, "the answers make room for as much")
}

func TestTheUplinkIsAskedAboutInPlaceOfServers(t *testing.T) {
	gateway := netip.MustParseAddr("fe80::1%7")
	r := newRoad(t)
	r.Holder.cfg.Uplink = true
	r.Holder.cfg.EchoTo = func(netip.Addr) netip.Addr { return gateway }
	r.sendFirstFlight(t, "video.test")
	copyOf := make([]byte, 28)
	copy(copyOf, []byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocolUDP, 0, 0, 203, 0, 113, 9, 10, 77, 2, 2, 0, 0, 1, 187})
	r.arriveAs(copyOf, segment)
	assert.Equal(t, []string{"video.test"}, r.seen, "the name is of the flow itself")
	r.wait(checkEvery + time.Millisecond)
	require.Len(t, r.requests, 1)
	assert.Equal(t, gateway, r.requests[0].to)
	r.answer(20 * time.Millisecond)
	server := r.clients[netip.MustParseAddr("10.77.2.2")]
	assert.Equal(t, "echo", server.lanes[0].describeLane().AcknowledgedBy)

	gateway = netip.Addr{}
	r.requests = nil
	r.arrive(443, segment) // to another server
	r.wait(time.Second)
	assert.Empty(t, r.requests)
}

func TestAnAnswerByAnotherAddressIsIgnored(t *testing.T) {
	r := newRoad(t)
	r.arrive(443, segment)
	r.wait(checkEvery + time.Millisecond)
	r.ReceiveEcho(r.now, netip.MustParseAddr("203.0.113.10"), r.requests[0].id, r.requests[0].sequence)
	assert.Zero(t, r.Stats().EchoAnswers)
}

func TestAClientThatAnswersNoMoreFallsBackToItsShare(t *testing.T) {
	r := newRoad(t)
	r.arrive(443, segment)
	r.wait(checkEvery + time.Millisecond)
	r.answer(20 * time.Millisecond)
	for range 15 * 100 {
		r.arrive(443, segment)
		r.wait(10 * time.Millisecond)
	}
	state := r.clients[netip.MustParseAddr("203.0.113.9")].lanes[0].describeLane()
	assert.Equal(t, "none", state.AcknowledgedBy)
	assert.Zero(t, state.Waiting, "no TCP wants the window")
	asked := len(r.requests)
	for range 2 * 100 {
		r.arrive(443, segment)
		r.wait(10 * time.Millisecond)
	}
	assert.Len(t, r.requests, asked, "it is asked again later")
}

func TestAPacketThatSaysECTIsMarkedInPlaceOfADrop(t *testing.T) {
	r := newRoad(t)
	r.ecn = flow.ECT0
	r.occupy(t)
	for range 400 {
		r.arrive(443, segment)
		r.arrive(443, segment)
		r.wait(time.Millisecond)
	}
	require.NotEmpty(t, r.marked)
	assert.Equal(t, uint32(0x80), r.marked[0])
	assert.Zero(t, r.Stats().LateDrops)
}

func TestABusyClientWeighsAsMuchAsItHasFlows(t *testing.T) {
	r := newRoad(t)
	r.arrive(443, segment)
	r.wait(checkEvery + time.Millisecond)
	r.answer(20 * time.Millisecond)
	for range 100 {
		for i := range uint16(12) {
			r.arrive(1000+i%2, segment)
		}
		r.answer(20 * time.Millisecond)
	}
	r.wait(countFlowsTime)
	assert.Equal(t, 2, r.clients[netip.MustParseAddr("203.0.113.9")].lanes[0].describeLane().BusyFlows)
}

func TestIdentifiersOfEchoRequestsRunOut(t *testing.T) {
	r := newRoad(t)
	for id := range 1 << 16 {
		r.lanes[uint16(id)] = &lane{}
	}
	ended := make(chan struct{})
	go func() {
		r.arrive(443, segment)
		close(ended)
	}()
	select {
	case <-ended:
		assert.EqualValues(t, 1, r.Stats().UnmanagedPackets)
	case <-time.After(5 * time.Second):
		t.Fatal("assignID does not end")
	}
}

func TestAnswersForALaneThatAskedNothingAreIgnored(t *testing.T) {
	r := newRoad(t)
	r.decide = func(FlowKey) Decision {
		return Decision{Manage: true, Terms: flow.Terms{Group: "phone", Algorithm: "none", MaxRate: 1e6}}
	}
	r.arrive(443, segment)
	for id := range r.lanes {
		r.ReceiveEcho(r.now, netip.MustParseAddr("203.0.113.9"), id, 0)
	}
	assert.Zero(t, r.Stats().EchoAnswers)
	for _, l := range r.lanes {
		assert.Equal(t, flow.ByTransport, l.window.Source())
	}
}

// sendFirstFlight has the Holder see a copy of each datagram by which a QUIC client asks for a server.
func (r *road) sendFirstFlight(t *testing.T, name string) {
	t.Helper()
	sink, err := net.ListenPacket("udp4", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = sink.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = quic.DialAddr(ctx, sink.LocalAddr().String(), &tls.Config{
			MinVersion: tls.VersionTLS13, ServerName: name, NextProtos: []string{"h3"},
		}, nil)
	}()
	packet := make([]byte, 2000)
	copy(packet, []byte{0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocolUDP, 0, 0, 203, 0, 113, 9, 10, 77, 2, 2, 0, 0, 1, 187})
	for range 2 { // as many take a ClientHello with post-quantum keys
		require.NoError(t, sink.SetReadDeadline(time.Now().Add(10*time.Second)))
		n, _, err := sink.ReadFrom(packet[28:])
		require.NoError(t, err)
		r.HandleCopy(r.now, packet[:28+n])
	}
	cancel()
	<-ended
}

func TestAFlowIsDecidedByItsServerName(t *testing.T) {
	t.Run("that is known", func(t *testing.T) {
		r := newRoad(t)
		r.sendFirstFlight(t, "video.test")
		assert.Empty(t, r.names.handshakes)
		r.arrive(443, segment)
		r.arrive(443, segment)
		r.arrive(444, segment)
		assert.Equal(t, []string{"video.test", ""}, r.seen)
	})
	t.Run("that becomes known later", func(t *testing.T) {
		r := newRoad(t)
		r.occupy(t)
		for range 200 {
			r.arrive(443, segment)
		}
		waiting := r.Stats().Waiting
		require.NotZero(t, waiting)
		r.sendFirstFlight(t, "video.test")
		r.decide = func(FlowKey) Decision { return Decision{Refuse: true} }
		r.arrive(443, segment)
		assert.Equal(t, []string{""}, r.seen, "packets wait by the decision of then")
		for range 100 {
			r.occupy(t)
			r.wait(100 * time.Millisecond)
		}
		require.Zero(t, r.Stats().Waiting)
		last := r.arrive(443, segment)
		assert.Equal(t, []string{"", "video.test"}, r.seen)
		assert.Contains(t, r.dropped, last)
	})
	t.Run("until it is idle", func(t *testing.T) {
		r := newRoad(t)
		r.sendFirstFlight(t, "video.test")
		r.arrive(443, segment)
		for range 3 {
			r.wait(nameIdleTime - time.Minute)
			r.arrive(443, segment)
		}
		r.wait(nameIdleTime + 2*sweepTime)
		r.arrive(443, segment)
		assert.Equal(t, []string{"video.test", "video.test", "video.test", "video.test", ""}, r.seen)
	})
}

func TestServerNamesAreBounded(t *testing.T) {
	table := nameTable{map[FlowKey]*knownName{}, map[FlowKey]*pendingHandshake{}}
	for i := range uint16(maxNames + 10) {
		key := FlowKey{Source: netip.AddrPortFrom(netip.IPv4Unspecified(), i)}
		table.setName(0, key, "video.test")
		table.addDatagram(0, key, nil)
	}
	assert.Len(t, table.known, maxNames)
	assert.Len(t, table.handshakes, maxHandshakes)
	table.setName(0, FlowKey{}, "")
	assert.Nil(t, table.nameOf(0, FlowKey{}), "another connection at the same ports shows none")
	table.forgetIdle(cc.Time(nameIdleTime))
	assert.Empty(t, table.known)
	assert.Empty(t, table.handshakes)
}

func TestSegmentsStayTogetherWhereAllThatIsBusyIsFast(t *testing.T) {
	for name, c := range map[string]struct {
		cwnd    float64 // packets in a round trip of 25 ms
		maxRate cc.Rate // of another flow; 0: there is none
		whole   bool
	}{
		"70 Mbit/s":                 {150, 0, true},
		"35 Mbit/s":                 {75, 0, false},
		"70 Mbit/s beside 8 Mbit/s": {150, 8e6, false},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoad(t)
			r.decide = func(f FlowKey) Decision {
				terms := flow.Terms{Group: "phone", Algorithm: "static", Params: cc.Params{"cwnd_packets": c.cwnd}}
				if f.Source.Port() == 80 {
					terms = flow.Terms{Group: "slow", Algorithm: "none", MaxRate: c.maxRate}
				}
				return Decision{Manage: true, Acknowledged: true, Terms: terms}
			}
			for range 100 {
				for range 200 {
					r.arrive(443, segment)
				}
				if c.maxRate > 0 {
					r.arrive(80, segment)
					r.arrive(80, segment)
				}
				r.wait(checkEvery)
				r.answer(20 * time.Millisecond)
			}
			assert.Equal(t, c.whole, r.whole)
		})
	}
}

var phone = netip.MustParseAddr("203.0.113.9")

func TestANeighbourThatAnswersNoEchoIsAskedForItsHardwareAddress(t *testing.T) {
	r := newRoad(t)
	r.neighbour = Neighbour{
		address: phone, hardware: []byte{2, 0, 0, 0, 0, 7}, source: netip.MustParseAddr("203.0.113.1"),
		marked: netip.IPv4Unspecified(),
	}
	acknowledgedBy := func() string { return r.clients[phone].lanes[0].describeLane().AcknowledgedBy }
	r.arrive(443, segment)
	r.wait(checkEvery + time.Millisecond)
	assert.Empty(t, r.asked, "echoes go first")
	assert.Equal(t, "none", acknowledgedBy())
	r.wait(time.Second)
	require.Len(t, r.asked, 1)
	r.answerAsNeighbour(20*time.Millisecond, 8)
	assert.Equal(t, "none", acknowledgedBy(), "another host has answered")
	r.wait(time.Second)
	r.answerAsNeighbour(20*time.Millisecond, 7)
	require.Equal(t, "neighbour", acknowledgedBy())
	before := len(r.accepted)
	for range 200 {
		r.arrive(443, segment)
	}
	assert.InDelta(t, 12, len(r.accepted)-before, 1, "15,000 bytes are its window")
	for answered := 24; answered <= 48; answered += 12 {
		r.wait(2 * checkEvery)
		r.answerAsNeighbour(20*time.Millisecond, 7)
		assert.InDelta(t, answered, len(r.accepted)-before, 4, "the answers make room for as much")
	}
	r.ReceiveEcho(r.now, phone, r.lastID, 0)
	assert.Equal(t, "echo", acknowledgedBy(), "it answers echo requests after all")
}
