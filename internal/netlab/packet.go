//go:build linux

package netlab

import (
	"encoding/binary"
	"hash/fnv"
	"net/netip"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/penstock-net/penstock/cc"
)

// Packet is one TCP packet as it passed a device.
type Packet struct {
	At       time.Duration // since the sniffer started, by the kernel's own stamp; never less than the one before
	Out      bool          // left the node
	Src, Dst netip.AddrPort
	Seq, Ack uint32
	Flags    Flags
	Window   uint16   // as written in the header, unscaled
	Payload  cc.Bytes // bytes of data
	Size     cc.Bytes // of the IP packet

	sacks  [maxSACKs]SACKBlock
	sacked int
}

// SACK returns the packet's selective acknowledgements, in their order.
func (p *Packet) SACK() []SACKBlock { return p.sacks[:p.sacked] }

// SACKBlock is a run of bytes that arrived ahead of a hole, Right excluded (RFC 2018 §3).
type SACKBlock struct{ Left, Right uint32 }

// maxSACKs is what 40 bytes of options have room for.
const maxSACKs = 4

// Flags are a TCP header's control bits (RFC 9293 §3.1).
type Flags uint8

// The bits that tell packets of a connection apart.
const (
	FIN Flags = 1 << iota
	SYN
	RST
	PSH
	ACK
)

// decoder reads packets' headers; it allocates once, not for each packet.
type decoder struct {
	ip4    layers.IPv4
	ip6    layers.IPv6
	skip   layers.IPv6ExtensionSkipper
	tcp    layers.TCP
	v4, v6 *gopacket.DecodingLayerParser
	found  []gopacket.LayerType
}

func newDecoder() *decoder {
	d := &decoder{}
	d.v4 = gopacket.NewDecodingLayerParser(layers.LayerTypeIPv4, &d.ip4, &d.tcp)
	d.v6 = gopacket.NewDecodingLayerParser(layers.LayerTypeIPv6, &d.ip6, &d.skip, &d.tcp)
	d.v4.IgnoreUnsupported, d.v6.IgnoreUnsupported = true, true // the payload is not looked at
	return d
}

// decode reads the beginning b of an IP packet that is size bytes long; false
// when it is no whole TCP header, or only a fragment.
func (d *decoder) decode(b []byte, size int) (p Packet, ok bool) {
	if len(b) == 0 {
		return p, false
	}
	parser := d.v4
	if b[0]>>4 == 6 {
		parser = d.v6
	}
	if err := parser.DecodeLayers(b, &d.found); err != nil {
		return p, false
	}
	if n := len(d.found); n < 2 || d.found[n-1] != layers.LayerTypeTCP {
		return p, false
	}
	// The field itself: it is 0 in what the device will segment, and the library
	// then takes what there is of the packet for all of it.
	var total int
	if parser == d.v4 {
		p.Src, p.Dst = d.ends(d.ip4.SrcIP, d.ip4.DstIP)
		total = int(binary.BigEndian.Uint16(b[2:]))
	} else {
		p.Src, p.Dst = d.ends(d.ip6.SrcIP, d.ip6.DstIP)
		if n := int(binary.BigEndian.Uint16(b[4:])); n > 0 {
			total = len(d.ip6.Contents) + n
		}
	}
	if total == 0 {
		total = size
	}
	// What there is of the packet is headers, extension headers among them, and
	// then some of the payload.
	payload := total - (min(len(b), total) - len(d.tcp.Payload))
	if payload < 0 {
		return p, false
	}
	p.Seq, p.Ack, p.Window = d.tcp.Seq, d.tcp.Ack, d.tcp.Window
	p.Flags = Flags(d.tcp.Contents[13])
	p.Payload, p.Size = cc.Bytes(payload), cc.Bytes(total)
	d.readSACK(&p)
	return p, true
}

// addresses returns the ones that an IP packet is from and for; none where it is
// cut short.
func addresses(b []byte) (src, dst netip.Addr) {
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		return netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
	case len(b) >= 40 && b[0]>>4 == 6:
		return netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
	}
	return src, dst
}

// flowOf is a number that the packets of one flow share: a hash of addresses, protocol and
// ports (FNV-1a).
func flowOf(b []byte) uint32 {
	var parts [][]byte
	switch {
	case len(b) >= 24 && b[0]>>4 == 4:
		head := int(b[0]&0xf) * 4
		parts = [][]byte{b[9:10], b[12:20], b[min(head, len(b)-4):][:4]}
	case len(b) >= 44 && b[0]>>4 == 6:
		parts = [][]byte{b[6:7], b[8:44]}
	}
	hash := fnv.New32a()
	for _, part := range parts {
		_, _ = hash.Write(part) // never fails
	}
	return hash.Sum32()
}

func (d *decoder) ends(src, dst []byte) (from, to netip.AddrPort) {
	s, _ := netip.AddrFromSlice(src) // 4 or 16 bytes, as they come out of a header
	t, _ := netip.AddrFromSlice(dst)
	return netip.AddrPortFrom(s, uint16(d.tcp.SrcPort)), netip.AddrPortFrom(t, uint16(d.tcp.DstPort))
}

func (d *decoder) readSACK(p *Packet) {
	for _, o := range d.tcp.Options {
		if o.OptionType != layers.TCPOptionKindSACK {
			continue
		}
		for b := o.OptionData; len(b) >= 8 && p.sacked < maxSACKs; b = b[8:] {
			p.sacks[p.sacked] = SACKBlock{binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:])}
			p.sacked++
		}
	}
}
