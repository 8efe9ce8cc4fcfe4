package userspace

import (
	"container/list"
	"encoding/binary"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// queuedInAll is what may wait of all peers' datagrams, in bytes. A peer's queue may
// take what the others leave free of that (dynamic thresholds, Choudhury and
// Hahne 1998), up to flow.QueuedBytes.
const queuedInAll = 16 << 20

// peer is one of a tunnel's, as long as it has sessions: its datagrams share the
// window of its flows.
type peer struct {
	d        *Datagrams
	name     string
	sessions list.List // of *session; guarded by d.mu
	place    int       // in d.bySessions; likewise
	pending  atomic.Bool

	mu    sync.Mutex
	queue *flow.FairQueue[fiveTuple, packet] // nil: they are not held back
	close func()                             // of its window
}

// fiveTuple tells the flows of a peer apart.
type fiveTuple struct {
	source netip.AddrPort
	target origin
}

// packet is a datagram, or an echo reply, on its way to a peer.
type packet struct {
	fiveTuple
	payload []byte
}

// newPeer starts with what the terms of its first datagram say.
func (d *Datagrams) newPeer(name string, terms flow.Terms) *peer {
	p := &peer{d: d, name: name}
	share := d.cfg.Load().Share
	if share == 0 || terms.Algorithm == "" || d.with.Flows == nil {
		return p
	}
	window, err := d.with.Flows.OpenDatagrams(d.with.Clock(), terms, share, p.wake)
	if err != nil {
		d.with.Log.Error("tunnel: datagrams go unshaped", "client", name, "err", err)
		return p
	}
	p.queue, p.close = flow.NewFairQueue[fiveTuple](window, d.dropped), window.Close
	return p
}

// dropped counts what a queue does not send.
func (d *Datagrams) dropped(_ packet, why flow.Drop) {
	if why == flow.DroppedOverflow {
		d.count.overflow.Add(1)
		return
	}
	d.count.late.Add(1)
}

// leave gives back what the peer has of its window.
func (p *peer) leave() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.queue == nil {
		return
	}
	defer p.account(p.queued())
	p.queue.Trim(0, 0)
	p.close()
	p.queue = nil
}

// wake is the window's to call: it only notes.
func (p *peer) wake() {
	if p.pending.Swap(true) {
		return
	}
	d := p.d
	d.wake.Lock()
	d.woken = append(d.woken, p)
	d.wake.Unlock()
	select {
	case d.wakes <- struct{}{}:
	default:
	}
}

// pass sends a packet to the peer now, or as soon as there is room for it.
func (p *peer) pass(now cc.Time, pkt packet) {
	p.mu.Lock()
	defer p.mu.Unlock()
	size := pkt.size()
	if p.queue == nil || p.queue.Pass(now, pkt.fiveTuple, size) {
		p.send(pkt)
		return
	}
	defer p.account(p.queued())
	pkt.payload = append([]byte(nil), pkt.payload...)
	p.queue.Push(now, pkt.fiveTuple, size, pkt)
	p.sendQueued(now)
	// queued has what this queue held before, but not this packet.
	p.queue.Trim(flow.QueuedPackets, min(flow.QueuedBytes, cc.Bytes(queuedInAll-p.d.queued.Load())))
}

// drain sends what there is room for by now.
func (p *peer) drain(now cc.Time) {
	p.pending.Store(false)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.queue != nil {
		defer p.account(p.queued())
		p.sendQueued(now)
	}
}

// sendQueued sends what waits, as far as there is room. The caller holds p.mu.
func (p *peer) sendQueued(now cc.Time) {
	for pkt, ok := p.queue.Pop(now); ok; pkt, ok = p.queue.Pop(now) {
		p.send(pkt)
	}
}

// queued is how many bytes wait.
func (p *peer) queued() cc.Bytes {
	if p.queue == nil {
		return 0
	}
	_, bytes := p.queue.Len()
	return bytes
}

// account adds to the sum of all queues what has changed in this one.
func (p *peer) account(before cc.Bytes) { p.d.queued.Add(int64(p.queued() - before)) }

// size is the packet's with its headers.
func (pkt packet) size() cc.Bytes {
	headers := 28
	if pkt.source.Addr().Is6() {
		headers = 48
	}
	return cc.Bytes(len(pkt.payload) + headers)
}

// send puts a packet into the tunnel.
func (p *peer) send(pkt packet) {
	c := &p.d.count
	c.receivedPackets.Add(1)
	c.receivedBytes.Add(uint64(len(pkt.payload)))
	var err error
	if pkt.target.stream != nil {
		err = pkt.target.stream.deliver(pkt.payload)
	} else if pkt.target.echo {
		binary.BigEndian.PutUint16(pkt.payload[4:], pkt.target.Port())
		err = p.d.stack.SendICMP(pkt.source.Addr(), pkt.target.Addr(), pkt.payload)
	} else {
		err = p.d.stack.SendUDP(pkt.target.shown(pkt.source), pkt.target.AddrPort, pkt.payload)
	}
	if err != nil {
		c.failed.Add(1)
	}
}

// peerHeap is a heap of the peers that have sessions, the one with the most first.
type peerHeap []*peer

func (c peerHeap) Len() int           { return len(c) }
func (c peerHeap) Less(i, j int) bool { return c[i].sessions.Len() > c[j].sessions.Len() }
func (c peerHeap) Swap(i, j int) {
	c[i], c[j] = c[j], c[i]
	c[i].place, c[j].place = i, j
}

func (c *peerHeap) Push(x any) {
	p := x.(*peer)
	p.place = len(*c)
	*c = append(*c, p)
}

func (c *peerHeap) Pop() any {
	last := len(*c) - 1
	p := (*c)[last]
	(*c)[last] = nil
	*c = (*c)[:last]
	return p
}
