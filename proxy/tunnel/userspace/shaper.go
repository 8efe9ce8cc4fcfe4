package userspace

import (
	"container/list"
	"encoding/binary"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath/quic"
)

// maxQueuedTotal bounds the datagrams in the queues of all peers, in bytes. One peer's queue may
// take all that the others leave free, up to flow.QueuedBytes (dynamic thresholds, Choudhury and
// Hahne 1998).
const maxQueuedTotal = 16 << 20

// peer is a peer of the tunnel while it has sessions. The datagrams for it share a window with its
// connections.
type peer struct {
	// shaper holds packets for the peer.
	shaper
	name string
	// sessions has *session values. The mu of Datagrams guards this field and the two below.
	sessions list.List
	// heapIndex is the place in Datagrams.bySessions.
	heapIndex int
	// uplinks are by maximum rate.
	uplinks map[rateLimit]*uplink
}

// shaper holds packets back until there is room for them.
type shaper struct {
	d *Datagrams
	// pending is set while the shaper is among Datagrams.wokenShapers.
	pending atomic.Bool

	mu sync.Mutex
	// queue is nil where packets are not held back.
	queue  *flow.FairQueue[fiveTuple, packet]
	window *flow.EchoFlow
	pinger pinger
	// usedAt is when a packet came last, and countedAt when busy flows were counted last.
	usedAt, countedAt cc.Time
	busy              int  // flows at the last count
	isListed          bool // the shaper is among Datagrams.activeShapers
}

// fiveTuple identifies a flow of a peer.
type fiveTuple struct {
	source netip.AddrPort
	target origin
}

// packet is a datagram or an echo message. From a peer, source is its target outside.
type packet struct {
	fiveTuple
	payload []byte
	// viaSession sends it outside; nil: it is for the peer.
	viaSession *session
	// answers is the session that it answers; nil: another peer sends it.
	answers *session
	hops    uint8
	// ack asks for the acknowledgement of a packet to a CONNECT-UDP request.
	ack quic.AckRequest
}

// openWindow makes packets wait for room in a window, or for a maximum rate, as terms say. It runs
// before the shaper is shared.
func (s *shaper) openWindow(name string, terms flow.Terms) {
	if s.d.with.Flows == nil {
		return
	}
	window, err := s.d.with.Flows.OpenEcho(s.d.with.Clock(), terms, flow.ByTransport, s.wakeForRoom)
	if err != nil {
		s.d.with.Log.Error("tunnel: datagrams go unshaped", "client", name, "err", err)
		return
	}
	s.queue = flow.NewFairQueue[fiveTuple](flow.QueueConfig[packet]{Window: window, Dropped: s.d.countDropped})
	s.window, s.pinger.isUseful = window, terms.Algorithm != unmanaged
}

// closeWindow gives up the part of the window, and drops the queue.
func (s *shaper) closeWindow() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.queue == nil {
		return
	}
	defer s.accountQueued(s.queuedBytes())
	s.queue.Trim(0, 0)
	s.window.Close(s.d.with.Clock())
	s.queue = nil
}

// wakeForRoom is called by the flow once there is room. It must not send packets there, so it makes
// serveTimers do so.
func (s *shaper) wakeForRoom() {
	if s.pending.Swap(true) {
		return
	}
	d := s.d
	d.wakeMu.Lock()
	d.wokenShapers = append(d.wokenShapers, s)
	d.wakeMu.Unlock()
	d.signalWake()
}

// signalWake makes serveTimers look at wokenShapers and activeShapers.
func (d *Datagrams) signalWake() {
	select {
	case d.wakeSignal <- struct{}{}:
	default:
	}
}

// sendOrQueue sends a packet now, or queues a copy of it until there is room.
func (s *shaper) sendOrQueue(now cc.Time, pkt packet) {
	s.mu.Lock()
	defer s.mu.Unlock()
	size := pkt.sizeWithHeaders()
	if s.queue == nil {
		s.sendPacket(pkt)
		return
	}
	s.usedAt = now
	s.addToActive()
	if s.queue.Pass(now, pkt.fiveTuple, size) {
		s.sendAndPing(now, pkt)
		return
	}
	defer s.accountQueued(s.queuedBytes())
	pkt.payload = append([]byte(nil), pkt.payload...)
	s.queue.Push(now, pkt.fiveTuple, size, pkt)
	s.sendQueued(now)
	// queued has what this queue held before, but not this packet.
	s.queue.Trim(flow.QueuedPackets, min(flow.QueuedBytes, cc.Bytes(maxQueuedTotal-s.d.queued.Load())))
}

// sendAfterWake sends the packets that there is room for by now.
func (s *shaper) sendAfterWake(now cc.Time) {
	s.pending.Store(false)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.queue != nil {
		defer s.accountQueued(s.queuedBytes())
		s.sendQueued(now)
	}
}

// sendQueued sends queued packets while there is room. The caller holds s.mu.
func (s *shaper) sendQueued(now cc.Time) {
	for pkt, ok := s.queue.Pop(now); ok; pkt, ok = s.queue.Pop(now) {
		s.sendAndPing(now, pkt)
	}
	if packets, _ := s.queue.Len(); packets == 0 {
		s.window.StopWanting(now)
	}
}

// sendAndPing sends a packet, and an echo request after it if one is due. A packet to a CONNECT-UDP request is
// acknowledged by QUIC, so it counts as an echo request itself. The caller holds s.mu.
func (s *shaper) sendAndPing(now cc.Time, pkt packet) {
	if pkt.viaSession == nil && pkt.target.stream != nil && s.pinger.isUseful {
		pkt.ack.Owner = s
		if s.window.Source() == flow.ByEcho {
			pkt.ack.Sequence = s.window.SendEcho(now)
		}
	}
	s.sendPacket(pkt)
	if pkt.viaSession == nil && pkt.target.stream == nil {
		s.pinger.from, s.pinger.to = pkt.target.shownSource(pkt.source).Addr(), pkt.target.Addr()
	}
	s.pingDue(now)
}

// queuedBytes returns the bytes in the queue. The caller holds s.mu.
func (s *shaper) queuedBytes() cc.Bytes {
	if s.queue == nil {
		return 0
	}
	_, bytes := s.queue.Len()
	return bytes
}

// accountQueued adds the change of this queue to the sum of all. The caller holds s.mu.
func (s *shaper) accountQueued(before cc.Bytes) { s.d.queued.Add(int64(s.queuedBytes() - before)) }

// sizeWithHeaders returns the packet's size with IP and UDP headers, in bytes.
func (pkt packet) sizeWithHeaders() cc.Bytes {
	headers := 28
	if pkt.source.Addr().Is6() {
		headers = 48
	}
	return cc.Bytes(len(pkt.payload) + headers)
}

// sendPacket puts a packet into the tunnel, or sends it outside.
func (s *shaper) sendPacket(pkt packet) {
	if pkt.viaSession != nil {
		pkt.viaSession.sendNow(pkt.source, pkt.payload, pkt.hops)
		return
	}
	c := &s.d.counts
	if pkt.answers != nil && pkt.answers.addressReused.Load() {
		c.late.Add(1)
		return
	}
	c.receivedPackets.Add(1)
	c.receivedBytes.Add(uint64(len(pkt.payload)))
	var err error
	if pkt.target.stream != nil {
		err = pkt.target.stream.queueDatagram(pkt.payload, pkt.ack)
	} else if pkt.target.echo {
		binary.BigEndian.PutUint16(pkt.payload[4:], pkt.target.Port())
		err = s.d.stack.SendICMP(pkt.source.Addr(), pkt.target.Addr(), pkt.payload)
	} else {
		err = s.d.stack.SendUDP(pkt.target.shownSource(pkt.source), pkt.target.AddrPort, pkt.payload)
	}
	if err != nil {
		c.failed.Add(1)
	}
}

// peerHeap is a heap (container/heap) of the peers with sessions. The one with the most is first.
type peerHeap []*peer

func (c peerHeap) Len() int { return len(c) }

func (c peerHeap) Less(i, j int) bool { return c[i].sessions.Len() > c[j].sessions.Len() }

func (c peerHeap) Swap(i, j int) {
	c[i], c[j] = c[j], c[i]
	c[i].heapIndex, c[j].heapIndex = i, j
}

func (c *peerHeap) Push(x any) {
	p := x.(*peer)
	p.heapIndex = len(*c)
	*c = append(*c, p)
}

func (c *peerHeap) Pop() any {
	last := len(*c) - 1
	p := (*c)[last]
	(*c)[last] = nil
	*c = (*c)[:last]
	return p
}

// maxUplinks bounds the maximum rates of one peer at once. With the usual group each host outside
// has its own.
const maxUplinks = 64

// rateLimit identifies a maximum rate that a group's datagrams and connections share.
type rateLimit struct {
	group string
	rate  cc.Rate
}

// uplink holds the datagrams that a peer sends outside to a maximum rate.
type uplink struct {
	shaper
	terms flow.Terms
	// used is the time of its last datagram. The mu of Datagrams guards it, and evicted.
	used cc.Time
	// evicted is set once it has made room for another.
	evicted bool
}

// uplinkFor returns the uplink for the maximum rate of terms; nil: they have none. If the peer has
// maxUplinks, the one that was idle longest makes room. The caller holds d.mu.
func (p *peer) uplinkFor(terms flow.Terms) *uplink {
	if terms.MaxRate == 0 {
		return nil
	}
	l := rateLimit{terms.Group, terms.MaxRate}
	if u := p.uplinks[l]; u != nil {
		return u
	}
	if len(p.uplinks) >= maxUplinks {
		var oldest *uplink
		for _, u := range p.uplinks {
			if oldest == nil || u.used < oldest.used {
				oldest = u
			}
		}
		p.dropUplink(oldest)
	}
	u := &uplink{shaper: shaper{d: p.d}, terms: terms}
	u.openWindow(p.name, u.terms)
	p.uplinks[l] = u
	return u
}

// dropUplink forgets an uplink and its queue. The caller holds d.mu.
func (p *peer) dropUplink(u *uplink) {
	delete(p.uplinks, rateLimit{u.terms.Group, u.terms.MaxRate})
	u.evicted = true
	u.closeWindow()
}
