package capture

import (
	"bytes"
	"encoding/binary"
	"net/netip"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"golang.org/x/sys/unix"
)

// Flags of TCP's header (RFC 9293 §3.1).
const (
	flagSYN = 0x02
	flagACK = 0x10
)

// statusDNAT is the bit of ct status for a translated target (IPS_DST_NAT).
const statusDNAT = 1 << 5

// packet is a TCP packet as it comes to a firewall. The zero value of an interface, an address or a
// port is unknown.
type packet struct {
	family family
	// known has the bits of mark that are known.
	mark, known uint32
	// from and to are the interfaces that it comes in and leaves by.
	from, to               *iface
	source, target         netip.Addr
	sourcePort, targetPort uint16
	flags                  byte
	// state is that of connection tracking.
	state uint32
	// translated reports whether the target was translated.
	translated bool
	// reply reports whether it goes against the direction of the connection.
	reply bool
	// sourceType and targetType are the types of the addresses (RTN_…).
	sourceType, targetType uint32
}

// fields are parts of a packet in which the packets of one passage differ.
type fields uint8

const (
	interfaceFields fields = 1 << iota
	sourceFields
	targetFields
	portFields
)

// withOnly returns the packet with only those fields that were read. Two packets that are then
// equal have one fate.
func (p packet) withOnly(read fields) packet {
	if read&interfaceFields == 0 {
		p.from, p.to = nil, nil
	}
	if read&sourceFields == 0 {
		p.source = netip.Addr{}
	}
	if read&targetFields == 0 {
		p.target = netip.Addr{}
	}
	if read&portFields == 0 {
		p.sourcePort, p.targetPort = 0, 0
	}
	return p
}

// portValue returns a port; 0 is unknown.
func portValue(port uint16) value {
	if port == 0 {
		return value{}
	}
	return knownValue(binary.BigEndian.AppendUint16(nil, port))
}

// markValue returns the mark with its known bits.
func (p packet) markValue() value { return value{nativeBytes(p.mark), nativeBytes(p.known)} }

// metaValue returns a property of the packet (nft meta), and the fields that it depends on.
func (p packet) metaValue(key expr.MetaKey) (value, fields) {
	switch key {
	case expr.MetaKeyMARK:
		return p.markValue(), 0
	case expr.MetaKeyIIFNAME, expr.MetaKeyIIF, expr.MetaKeyIIFGROUP:
		return p.from.metaValue(key), interfaceFields
	case expr.MetaKeyOIFNAME, expr.MetaKeyOIF, expr.MetaKeyOIFGROUP:
		return p.to.metaValue(key), interfaceFields
	case expr.MetaKeyNFPROTO:
		return knownValue([]byte{p.family.proto}), 0
	case expr.MetaKeyL4PROTO:
		return knownValue([]byte{unix.IPPROTO_TCP}), 0
	case expr.MetaKeyPROTOCOL:
		etherType := uint16(unix.ETH_P_IP)
		if !p.family.isIPv4() {
			etherType = unix.ETH_P_IPV6
		}
		return knownValue(binary.BigEndian.AppendUint16(nil, etherType)), 0
	case expr.MetaKeyPKTTYPE:
		return knownValue([]byte{unix.PACKET_HOST}), 0
	case metaIPsec:
		return knownValue([]byte{0}), 0
	}
	return value{}, 0
}

// metaIPsec asks whether a packet came by IPsec (NFT_META_SECPATH).
const metaIPsec expr.MetaKey = 25

// Offsets in headers.
const (
	ethernetSource         = 6
	sourcePort, targetPort = 0, 2
	tcpFlags               = 13
	ports                  = 4 // bytes of both
)

// clientMAC is the hardware address of clients. No maker has it, so no rule matches it.
var clientMAC = []byte{0x0e, 0x9b, 0x51, 0xc7, 0x2d, 0x64}

// payloadValue returns a part of a header, and the fields that it depends on.
func (p packet) payloadValue(base expr.PayloadBase, offset, length uint32) (is value, read fields) {
	var h value
	put := func(at uint32, data ...byte) {
		copy(h.data[at:], data)
		copy(h.known[at:], bytes.Repeat([]byte{0xff}, len(data)))
	}
	begin := func(n int) { h = value{make([]byte, n), make([]byte, n)} }
	switch base {
	case expr.PayloadBaseLLHeader:
		begin(14)
		put(ethernetSource, clientMAC...)
	case expr.PayloadBaseNetworkHeader:
		if p.family.isIPv4() {
			begin(20)
			put(0, 0x45, 0) // neither options nor a class of service
			put(6, 0x40, 0) // not to be fragmented
			put(8, initialTTL, unix.IPPROTO_TCP)
		} else {
			begin(40)
			put(0, 0x60, 0, 0, 0)
			put(6, unix.IPPROTO_TCP, initialTTL)
		}
		source := p.family.target - p.family.length
		put(source, p.source.AsSlice()...)
		put(p.family.target, p.target.AsSlice()...)
		if offset < p.family.target && offset+length > source {
			read |= sourceFields
		}
		if offset+length > p.family.target {
			read |= targetFields
		}
	case expr.PayloadBaseTransportHeader:
		begin(20)
		put(sourcePort, portValue(p.sourcePort).data...)
		put(targetPort, portValue(p.targetPort).data...)
		put(tcpFlags, p.flags)
		if offset < ports {
			read = portFields
		}
	}
	if end := uint64(offset) + uint64(length); end <= uint64(len(h.data)) {
		is = value{h.data[offset:end], h.known[offset:end]}
	}
	return is, read
}

// initialTTL is the hop limit that clients and servers begin with.
const initialTTL = 64

// ctValue returns a property of connection tracking (nft ct).
func (p packet) ctValue(key expr.CtKey) value {
	switch key {
	case expr.CtKeySTATE:
		return nativeNumber(p.state)
	case expr.CtKeySTATUS:
		status := value{nativeBytes(0), nativeBytes(statusDNAT)}
		if p.translated {
			status.data = nativeBytes(statusDNAT)
		}
		return status
	case expr.CtKeyDIRECTION:
		if p.reply {
			return knownValue([]byte{1})
		}
		return knownValue([]byte{0})
	}
	return value{}
}

// fibValue returns the type of an address (nft fib).
func (p packet) fibValue(x *expr.Fib) value {
	switch {
	case !x.ResultADDRTYPE || x.FlagPRESENT:
	case x.FlagDADDR:
		return nativeNumber(p.targetType)
	case x.FlagSADDR:
		return nativeNumber(p.sourceType)
	}
	return value{}
}

// answerPacket returns the answer to the first packet of a connection. Its mark is unknown, because
// answers of servers have ours with keep_client.
func (p packet) answerPacket() packet {
	p.from, p.to = p.to, p.from
	p.source, p.target = p.target, p.source
	p.sourcePort, p.targetPort = p.targetPort, p.sourcePort
	p.sourceType, p.targetType = p.targetType, p.sourceType
	p.flags, p.state, p.reply = flagSYN|flagACK, expr.CtStateBitESTABLISHED, true
	p.mark, p.known = 0, 0
	return p
}

// matchesIptables evaluates a match of iptables over nftables.
func (p packet) matchesIptables(m *expr.Match) truth {
	switch info := m.Info.(type) {
	case *xt.Comment:
		return yes
	case *xt.Udp:
		return no
	case *xt.Tcp:
		return p.matchesTCP(info)
	case *xt.AddrTypeV1:
		const invertSource, invertTarget = 1, 2
		return hasAddressType(p.sourceType, info.Source, info.Flags&invertSource != 0).
			and(hasAddressType(p.targetType, info.Dest, info.Flags&invertTarget != 0))
	case *xt.ConntrackMtinfo1:
		return p.matchesState(info.MatchFlags, info.InvertFlags, uint16(info.StateMask))
	case *xt.ConntrackMtinfo2:
		return p.matchesState(info.MatchFlags, info.InvertFlags, info.StateMask)
	case *xt.ConntrackMtinfo3:
		return p.matchesState(info.MatchFlags, info.InvertFlags, info.StateMask)
	case *xt.Unknown:
		switch b := []byte(*info); {
		case m.Name == "mark" && len(b) >= 9: // mark, mask, invert
			masked := p.markValue().bitwise(&expr.Bitwise{Len: 4, Mask: b[4:8], Xor: make([]byte, 4)})
			return masked.compare(expr.CmpOpEq, b[:4]).notIf(b[8] != 0)
		case m.Name == "state" && len(b) >= 4:
			return p.matchesState(conntrackState, 0, uint16(binary.NativeEndian.Uint32(b)))
		case m.Name == "multiport":
			return p.matchesPorts(b)
		case m.Name == "mac" && len(b) >= 12: // the address, padding, invert
			return truthOf(binary.NativeEndian.Uint32(b[8:]) != 0)
		case m.Name == "icmp", m.Name == "icmp6":
			return no
		}
	}
	return maybe
}

// matchesTCP evaluates xt_tcp: ports, flags and options.
func (p packet) matchesTCP(t *xt.Tcp) truth {
	flags := yes
	if t.FlagsMask != 0 {
		flags = truthOf(p.flags&t.FlagsMask == t.FlagsCmp).notIf(t.InvFlags&xt.TcpInvFlags != 0)
	}
	if t.Option != 0 {
		flags = flags.and(maybe)
	}
	source := portValue(p.sourcePort).isBetween(t.SrcPorts[0], t.SrcPorts[1]).notIf(t.InvFlags&xt.TcpInvSrcPorts != 0)
	target := portValue(p.targetPort).isBetween(t.DstPorts[0], t.DstPorts[1]).notIf(t.InvFlags&xt.TcpInvDestPorts != 0)
	return source.and(target).and(flags)
}

// matchesPorts evaluates xt_multiport_v1. Its bytes are: which ports, their number, the ports,
// flags for those that begin a range, and whether to invert.
func (p packet) matchesPorts(b []byte) truth {
	const most, ports, ranges, invert = 15, 2, 2 + 2*15, 2 + 3*15
	if len(b) <= invert || b[1] > most {
		return maybe
	}
	in := func(v value) truth {
		is := no
		for i := 0; i < int(b[1]); i++ {
			first := binary.NativeEndian.Uint16(b[ports+2*i:])
			last := first
			if b[ranges+i] != 0 && i+1 < int(b[1]) {
				i++
				last = binary.NativeEndian.Uint16(b[ports+2*i:])
			}
			is = is.or(v.isBetween(first, last))
		}
		return is
	}
	is := maybe
	switch b[0] {
	case 0:
		is = in(portValue(p.sourcePort))
	case 1:
		is = in(portValue(p.targetPort))
	case 2:
		is = in(portValue(p.sourcePort)).or(in(portValue(p.targetPort)))
	}
	return is.notIf(b[invert] != 0)
}

// Of xt_conntrack: that it asks for the state, and the state of what was sent elsewhere than it was meant to.
const (
	conntrackState = 1 << 0
	conntrackDNAT  = 1 << 7
)

// matchesState evaluates xt_conntrack and xt_state.
func (p packet) matchesState(asks, inverts, states uint16) truth {
	if asks&conntrackState == 0 {
		return maybe
	}
	has := uint16(p.state)
	if p.translated {
		has |= conntrackDNAT
	}
	is := truthOf(has&states != 0).notIf(inverts&conntrackState != 0)
	if asks != conntrackState {
		is = is.and(maybe)
	}
	return is
}

// hasAddressType evaluates a mask of address types; 0 matches all.
func hasAddressType(is uint32, of uint16, invert bool) truth {
	if of == 0 {
		return yes
	}
	return truthOf(of&(1<<is) != 0).notIf(invert)
}
