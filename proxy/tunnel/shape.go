package tunnel

import (
	"container/list"
	"encoding/binary"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// What flows leave no room for waits, so many packets of a peer for so long: a
// queue that a sender can fill, but that never makes anybody wait.
const (
	queuedDatagrams = 64
	queuedFor       = 50 * time.Millisecond
)

// peer is one of a tunnel's, as long as it has sessions: its datagrams share the
// window of its flows.
type peer struct {
	d        *Datagrams
	name     string
	sessions list.List // of *session; guarded by d.mu
	pending  atomic.Bool

	mu     sync.Mutex
	window *flow.Datagrams // nil: they are not held back
	queue  []packet
}

// packet is a datagram, or an echo reply, on its way to a peer.
type packet struct {
	source  netip.AddrPort
	target  origin
	payload []byte
	came    cc.Time // when it had to wait
}

// newPeer starts with what the terms of its first datagram say.
func (d *Datagrams) newPeer(name string, terms flow.Terms) *peer {
	p := &peer{d: d, name: name}
	share := d.cfg.Load().Share
	if share == 0 || terms.Algorithm == "" || d.with.Flows == nil {
		return p
	}
	window, err := d.with.Flows.OpenDatagrams(terms, share, p.wake)
	if err != nil {
		d.with.Log.Error("tunnel: datagrams go unshaped", "client", name, "err", err)
		return p
	}
	p.window = window
	return p
}

// leave gives back what the peer has of its window.
func (p *peer) leave() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.window != nil {
		p.window.Close()
	}
	p.window, p.queue = nil, nil
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
	if len(p.queue) > 0 {
		p.let(now)
	}
	switch {
	case len(p.queue) == 0 && p.grants(now, pkt):
		p.send(pkt)
	case len(p.queue) == queuedDatagrams:
		p.d.count.late.Add(1)
	default:
		pkt.payload, pkt.came = append([]byte(nil), pkt.payload...), now
		p.queue = append(p.queue, pkt)
	}
}

// drain sends what there is room for by now.
func (p *peer) drain(now cc.Time) {
	p.pending.Store(false)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.let(now)
}

// let sends what waits, as far as there is room, and drops what has waited for too
// long. The caller holds p.mu.
func (p *peer) let(now cc.Time) {
	n := 0
	for ; n < len(p.queue); n++ {
		if now.Sub(p.queue[n].came) > queuedFor {
			p.d.count.late.Add(1)
			continue
		}
		if !p.grants(now, p.queue[n]) {
			break
		}
		p.send(p.queue[n])
	}
	p.queue = append(p.queue[:0], p.queue[n:]...)
	clear(p.queue[len(p.queue):cap(p.queue)])
}

func (p *peer) grants(now cc.Time, pkt packet) bool {
	headers := 28
	if pkt.source.Addr().Is6() {
		headers = 48
	}
	return p.window == nil || p.window.Take(now, cc.Bytes(len(pkt.payload)+headers))
}

// send puts a packet into the tunnel.
func (p *peer) send(pkt packet) {
	c := &p.d.count
	c.receivedPackets.Add(1)
	c.receivedBytes.Add(uint64(len(pkt.payload)))
	var err error
	if pkt.target.echo {
		binary.BigEndian.PutUint16(pkt.payload[4:], pkt.target.Port())
		err = p.d.stack.SendICMP(pkt.source.Addr(), pkt.target.Addr(), pkt.payload)
	} else {
		err = p.d.stack.SendUDP(pkt.source, pkt.target.AddrPort, pkt.payload)
	}
	if err != nil {
		c.failed.Add(1)
	}
}
