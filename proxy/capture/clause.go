package capture

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// clause is a part of a rule, as nft writes it and as the kernel runs it. Both stand side by side,
// so that what is printed for review is what is installed.
type clause struct {
	// text is the clause as nft writes it.
	text string
	// exprs is the clause as the kernel runs it.
	exprs []expr.Any
}

// reg is the register that all clauses load into and compare.
const reg = unix.NFT_REG_1

// family is one of the two address families.
type family struct {
	// name is the family's in nft, and version its number in words.
	name, version string
	// af is AF_INET or AF_INET6, and proto the NFPROTO of the same.
	af, proto byte
	// source and target are the offsets of the addresses in the header, in bytes.
	source, target uint32
	// length is that of an address, in bytes.
	length uint32
	// addresses is the type of sets with the family's addresses.
	addresses nftables.SetDatatype
	// icmp is the family's ICMP in nft, and icmpNumber its protocol number.
	icmp       string
	icmpNumber byte
}

var (
	ipv4 = family{
		"ip", "4", unix.AF_INET, unix.NFPROTO_IPV4, 12, 16, 4, nftables.TypeIPAddr, "icmp", unix.IPPROTO_ICMP,
	}
	ipv6 = family{
		"ip6", "6", unix.AF_INET6, unix.NFPROTO_IPV6, 8, 24, 16, nftables.TypeIP6Addr, "icmpv6", unix.IPPROTO_ICMPV6,
	}
)

// isIPv4 reports which of the two it is.
func (f family) isIPv4() bool { return f.proto == unix.NFPROTO_IPV4 }

// equalTo compares the register with data.
func equalTo(data ...byte) expr.Any {
	return &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: data}
}

// nativeBytes returns v in this machine's byte order, as meta and ct have numbers.
func nativeBytes(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// ofFamily matches packets of a family.
func ofFamily(f family) clause {
	return clause{"meta nfproto ipv" + f.version, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg}, equalTo(f.proto),
	}}
}

// isTCP matches TCP over either family.
func isTCP() clause { return isProtocol("tcp", unix.IPPROTO_TCP) }

// isUDP matches UDP over either family.
func isUDP() clause { return isProtocol("udp", unix.IPPROTO_UDP) }

// isICMP matches the ICMP of a family.
func isICMP(f family) clause { return isProtocol(f.icmp, f.icmpNumber) }

// isProtocol matches a transport protocol.
func isProtocol(name string, number byte) clause {
	return clause{"meta l4proto " + name, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg}, equalTo(number),
	}}
}

// notTCP matches all protocols but TCP.
func notTCP() clause {
	return clause{"meta l4proto != tcp", []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: []byte{unix.IPPROTO_TCP}},
	}}
}

// hasMark matches packets with all bits of mark.
func hasMark(mark uint32) clause {
	return clause{fmt.Sprintf("meta mark & 0x%08x == 0x%08x", mark, mark), []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: nativeBytes(mark), Xor: nativeBytes(0)},
		equalTo(nativeBytes(mark)...),
	}}
}

// addMark sets the bits of mark.
func addMark(mark uint32) clause {
	return changeMark(fmt.Sprintf("| 0x%08x", mark), mark, mark)
}

// removeMark clears the bits of mark.
func removeMark(mark uint32) clause {
	return changeMark(fmt.Sprintf("& 0x%08x", ^mark), mark, 0)
}

// changeMark gives some bits of the mark a value, and keeps the other bits, which belong to other programs. text is
// what nft does to the mark.
func changeMark(text string, bits, value uint32) clause {
	return clause{"meta mark set meta mark " + text, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: nativeBytes(^bits), Xor: nativeBytes(value)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: reg},
	}}
}

// notFirst matches all packets of a connection but the client's first.
func notFirst() clause {
	return clause{"tcp flags & (syn | ack) != syn", []expr.Any{
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: tcpFlags, Len: 1},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 1, Mask: []byte{flagSYN | flagACK}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: []byte{flagSYN}},
	}}
}

// isICMPError matches ICMP messages about an earlier packet (RFC 792, RFC 4443 §2.1). A redirect is
// none of them: it changes routes, and no socket needs it.
func isICMPError(f family) clause {
	if f.isIPv4() {
		const redirect = 5
		return clause{"icmp type != redirect", append(isICMP(f).exprs, icmpType(),
			&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: []byte{redirect}})}
	}
	const firstInformational = 128
	return clause{"icmpv6 type < 128", append(isICMP(f).exprs, icmpType(),
		&expr.Cmp{Op: expr.CmpOpLt, Register: reg, Data: []byte{firstInformational}})}
}

// icmpType loads the type of an ICMP message of either family.
func icmpType() expr.Any {
	return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 1}
}

// ofTransparentSocket matches packets for a transparent socket of this machine. An ICMP error is
// for the socket that sent the quoted packet.
func ofTransparentSocket() clause {
	return clause{"socket transparent 1", []expr.Any{
		&expr.Socket{Key: expr.SocketKeyTransparent, Register: reg}, equalTo(1),
	}}
}

// ofWildcardSocket matches packets that only fit a listener on every address. It never matches a
// half-open or closing connection, which has no full socket.
func ofWildcardSocket() clause {
	return clause{"socket wildcard 1", []expr.Any{
		&expr.Socket{Key: expr.SocketKeyWildcard, Register: reg}, equalTo(1),
	}}
}

// toThisMachine matches packets to an address of this machine.
func toThisMachine() clause {
	return clause{"fib daddr type local", []expr.Any{
		&expr.Fib{Register: reg, FlagDADDR: true, ResultADDRTYPE: true}, equalTo(nativeBytes(unix.RTN_LOCAL)...),
	}}
}

// notFromInterfaces matches packets that come in by an interface outside the set.
func notFromInterfaces(s set) clause { return metaIn(expr.MetaKeyIIFNAME, "iifname != ", s) }

// notToInterfaces matches packets that leave by other interfaces than the set's.
func notToInterfaces(s set) clause { return metaIn(expr.MetaKeyOIFNAME, "oifname != ", s) }

// toInterfaces matches packets that leave by an interface in the set.
func toInterfaces(s set) clause { return metaIn(expr.MetaKeyOIFNAME, "oifname ", s) }

// isServed matches packets of a protocol in the set.
func isServed(s set) clause { return metaIn(expr.MetaKeyL4PROTO, "meta l4proto ", s) }

// metaIn looks a property of packets up in a set. words are the property as nft writes it, and "!= " where those match
// that the set does not have.
func metaIn(key expr.MetaKey, words string, s set) clause {
	return clause{words + "@" + s.name, []expr.Any{
		&expr.Meta{Key: key, Register: reg},
		&expr.Lookup{SourceRegister: reg, SetName: s.name, Invert: strings.HasSuffix(words, "!= ")},
	}}
}

// sourceIn matches packets with a source address in the set.
func sourceIn(f family, s set) clause {
	return clause{f.name + " saddr @" + s.name, inSet(expr.PayloadBaseNetworkHeader, f.source, f.length, s)}
}

// targetIn matches packets with a target address in the set.
func targetIn(f family, s set) clause {
	return clause{f.name + " daddr @" + s.name, inSet(expr.PayloadBaseNetworkHeader, f.target, f.length, s)}
}

// portIn matches packets to a TCP port in the set.
func portIn(s set) clause {
	return clause{"tcp dport @" + s.name, inSet(expr.PayloadBaseTransportHeader, 2, 2, s)}
}

// inSet looks a part of a header up in a set.
func inSet(base expr.PayloadBase, offset, length uint32, s set) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: reg, Base: base, Offset: offset, Len: length},
		&expr.Lookup{SourceRegister: reg, SetName: s.name},
	}
}

// countPackets counts the packets that come so far.
func countPackets() clause { return clause{"counter", []expr.Any{&expr.Counter{}}} }

// toProxy hands the packet to the transparent listener on a port.
func toProxy(f family, port uint16) clause {
	return clause{fmt.Sprintf("tproxy %s to :%d", f.name, port), []expr.Any{
		&expr.Immediate{Register: reg, Data: binary.BigEndian.AppendUint16(nil, port)},
		&expr.TProxy{Family: f.proto, TableFamily: unix.NFPROTO_INET, RegPort: reg},
	}}
}

// redirectTo translates the target to a port of this machine.
func redirectTo(port uint16) clause {
	return clause{fmt.Sprintf("redirect to :%d", port), []expr.Any{
		&expr.Immediate{Register: reg, Data: binary.BigEndian.AppendUint16(nil, port)},
		&expr.Redir{RegisterProtoMin: reg},
	}}
}

// acceptPacket ends the chain: the packet passes.
func acceptPacket() clause {
	return clause{"accept", []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}}
}

// returnToCaller ends the chain without a decision: other chains of the hook still have theirs.
func returnToCaller() clause {
	return clause{"return", []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}}
}

const dnsPort = 53

// familyOf returns the family of an address.
func familyOf(a netip.Addr) family {
	if a.Is4() {
		return ipv4
	}
	return ipv6
}

// interfaceIs compares the name of an interface. op is empty for equal, or "!= ".
func interfaceIs(key expr.MetaKey, word, op string, name string) clause {
	data := make([]byte, unix.IFNAMSIZ)
	copy(data, name)
	compare := &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: data}
	if op != "" {
		compare.Op = expr.CmpOpNeq
	}
	return clause{fmt.Sprintf("%s %s%q", word, op, name), []expr.Any{&expr.Meta{Key: key, Register: reg}, compare}}
}

// fromInterface matches packets that come in by an interface.
func fromInterface(name string) clause { return interfaceIs(expr.MetaKeyIIFNAME, "iifname", "", name) }

// notFromInterface matches packets that come in by any other interface.
func notFromInterface(name string) clause {
	return interfaceIs(expr.MetaKeyIIFNAME, "iifname", "!= ", name)
}

// toInterface matches packets that leave by an interface.
func toInterface(name string) clause { return interfaceIs(expr.MetaKeyOIFNAME, "oifname", "", name) }

// isEcho matches echo requests.
func isEcho(f family) clause {
	kind := byte(8)
	if !f.isIPv4() {
		kind = 128
	}
	return clause{f.icmp + " type echo-request", append(isICMP(f).exprs, icmpType(), equalTo(kind))}
}

// targetIs matches packets to one address.
func targetIs(f family, a netip.Addr) clause {
	return clause{f.name + " daddr " + a.String(), []expr.Any{
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: f.target, Len: f.length},
		equalTo(a.AsSlice()...),
	}}
}

// toPort matches packets to a port, of UDP or TCP.
func toPort(port uint16) clause {
	return clause{fmt.Sprintf("th dport %d", port), []expr.Any{
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		equalTo(binary.BigEndian.AppendUint16(nil, port)...),
	}}
}

// matchTracked matches packets by bits of connection tracking.
func matchTracked(key expr.CtKey, bits uint32, text string) clause {
	return clause{text, []expr.Any{
		&expr.Ct{Key: key, Register: reg},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: nativeBytes(bits), Xor: nativeBytes(0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: nativeBytes(0)},
	}}
}

// isAnswer matches packets of an open connection, and related ones.
func isAnswer() clause {
	return matchTracked(expr.CtKeySTATE, expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED,
		"ct state established,related")
}

// ofTranslated matches packets with a translated target.
func ofTranslated() clause {
	return matchTracked(expr.CtKeySTATUS, statusDNAT, "ct status dnat")
}

// translateTo translates the target of packets.
func translateTo(f family, to netip.AddrPort) clause {
	const port = unix.NFT_REG_2
	return clause{fmt.Sprintf("dnat %s to %v", f.name, to), []expr.Any{
		&expr.Immediate{Register: reg, Data: to.Addr().AsSlice()},
		&expr.Immediate{Register: port, Data: binary.BigEndian.AppendUint16(nil, to.Port())},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(f.proto), RegAddrMin: reg, RegProtoMin: port},
	}}
}

// masqueradeSource replaces the source by this machine's address.
func masqueradeSource() clause { return clause{"masquerade", []expr.Any{&expr.Masq{}}} }

// rejectWithReset drops a TCP packet, and resets its connection.
func rejectWithReset() clause {
	return clause{"reject with tcp reset", []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}}}
}

// rejectPacket drops a packet, and reports that to its sender by ICMP.
func rejectPacket() clause {
	return clause{"reject with icmpx admin-prohibited", []expr.Any{
		&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED},
	}}
}
