package quic

import "github.com/penstock-net/penstock/cc"

// maxPacketsBehind is how far behind the newest acknowledged packet the number of a packet in flight
// may be. An older one is forgotten: a probe has sent its bytes again, for which quic-go logs
// neither an acknowledgement nor a loss.
const maxPacketsBehind = 1024

// span is a range of one stream's bytes in one packet.
type span struct {
	signals  *signals // nil: none
	from, to int64
	resent   bool // sent before
	fin      bool // the stream ends with it
}

// packet is a packet that carries stream bytes, or datagrams that have an AckRequest.
type packet struct {
	at    cc.Time
	first span
	more  []span // further ones, of several streams or of one
	done  bool   // acknowledged or lost

	asked     AckRequest // of the newest datagram
	datagrams int        // number of the same owner's datagrams
}

// addDatagram adds a datagram that the packet carries. Datagrams of another owner before it are forgotten, since most
// connections have one owner.
func (p *packet) addDatagram(a AckRequest) {
	if p.asked.Owner != a.Owner {
		p.datagrams = 0
	}
	p.asked = a
	p.datagrams++
}

// addSpan adds a span. Most packets have one, which needs no slice.
func (p *packet) addSpan(b span) {
	if p.first.signals == nil {
		p.first = b
		return
	}
	p.more = append(p.more, b)
}

// eachSpan is an iterator over the packet's spans.
func (p *packet) eachSpan(yield func(span) bool) {
	if p.first.signals == nil || !yield(p.first) {
		return
	}
	for _, b := range p.more {
		if !yield(b) {
			return
		}
	}
}

// flight is the packets in flight, by their numbers. Packets without spans and datagrams count as
// done.
type flight struct {
	first   int64 // number of packets[0]
	packets []packet
}

// addPacket adds packet number pn, which is higher than those before. Numbers between are packets
// that count as done.
func (f *flight) addPacket(pn int64, p packet) {
	if len(f.packets) == 0 {
		f.first = pn
	}
	for f.first+int64(len(f.packets)) < pn {
		f.packets = append(f.packets, packet{done: true})
	}
	f.packets = append(f.packets, p)
}

// takePackets marks the packets from first to last as done, and calls use with those that were not.
func (f *flight) takePackets(first, last int64, use func(*packet)) {
	from, to := max(0, first-f.first), min(int64(len(f.packets)), last-f.first+1)
	for i := from; i < to; i++ {
		if p := &f.packets[i]; !p.done {
			p.done = true
			use(p)
		}
	}
}

// forgetBefore gives up the packets before pn.
func (f *flight) forgetBefore(pn int64) {
	f.takePackets(f.first, pn-1, func(*packet) {})
	f.dropDone()
}

// dropDone drops packets that are done from the front.
func (f *flight) dropDone() {
	n := 0
	for n < len(f.packets) && f.packets[n].done {
		f.packets[n] = packet{}
		n++
	}
	f.packets = f.packets[n:]
	f.first += int64(n)
}
