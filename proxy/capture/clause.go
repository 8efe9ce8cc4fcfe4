package capture

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// clause is a part of a rule, as nft writes it and as the kernel runs it: side
// by side, so that what is printed for review is what is installed.
type clause struct {
	text  string
	exprs []expr.Any
}

// reg is the one register that all clauses load into and compare.
const reg = unix.NFT_REG_1

// family is one of the two address families.
type family struct {
	name           string // in nft
	af, proto      byte   // AF_…, NFPROTO_…
	source, target uint32 // offsets of the addresses in the header
	length         uint32 // of an address
}

var (
	ipv4 = family{"ip", unix.AF_INET, unix.NFPROTO_IPV4, 12, 16, 4}
	ipv6 = family{"ip6", unix.AF_INET6, unix.NFPROTO_IPV6, 8, 24, 16}
)

func (f family) isIPv4() bool { return f.proto == unix.NFPROTO_IPV4 }

// setSuffix is what names of sets of the family end in.
func (f family) setSuffix() string {
	if f.isIPv4() {
		return "4"
	}
	return "6"
}

func equalTo(data ...byte) expr.Any {
	return &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: data}
}

func nativeBytes(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

func ofFamily(f family) clause {
	text := "meta nfproto ipv4"
	if !f.isIPv4() {
		text = "meta nfproto ipv6"
	}
	return clause{text, []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg}, equalTo(f.proto)}}
}

func isTCP() clause { return isProtocol("tcp", unix.IPPROTO_TCP) }

func isUDP() clause { return isProtocol("udp", unix.IPPROTO_UDP) }

func isICMP(f family) clause {
	if f.isIPv4() {
		return isProtocol("icmp", unix.IPPROTO_ICMP)
	}
	return isProtocol("icmpv6", unix.IPPROTO_ICMPV6)
}

func isProtocol(name string, number byte) clause {
	return clause{"meta l4proto " + name, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg}, equalTo(number),
	}}
}

func notTCP() clause {
	return clause{"meta l4proto != tcp", []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: []byte{unix.IPPROTO_TCP}},
	}}
}

// hasMark matches packets that bear all bits of mark.
func hasMark(mark uint32) clause {
	return clause{fmt.Sprintf("meta mark & 0x%08x == 0x%08x", mark, mark), []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: nativeBytes(mark), Xor: nativeBytes(0)},
		equalTo(nativeBytes(mark)...),
	}}
}

// addMark sets the bits of mark and keeps the others: they are not ours.
func addMark(mark uint32) clause {
	return clause{fmt.Sprintf("meta mark set meta mark | 0x%08x", mark), []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: nativeBytes(^mark), Xor: nativeBytes(mark)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: reg},
	}}
}

// notFirst matches all packets of a connection but the client's first.
func notFirst() clause {
	const syn, ack = 0x02, 0x10 // RFC 9293 §3.1, byte 13 of the header
	return clause{"tcp flags & (syn | ack) != syn", []expr.Any{
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 1, Mask: []byte{syn | ack}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: []byte{syn}},
	}}
}

// isICMPError matches the ICMP messages that tell a sender what became of its packet (RFC 792, RFC 4443 §2.1).
// A redirect is none: it changes routes, and no socket needs it.
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

// ofTransparentSocket matches what a transparent socket of this machine fits. An ICMP error fits the
// socket that sent the packet quoted in it; other ICMP fits none.
func ofTransparentSocket() clause {
	return clause{"socket transparent 1", []expr.Any{
		&expr.Socket{Key: expr.SocketKeyTransparent, Register: reg}, equalTo(1),
	}}
}

// ofWildcardSocket matches what merely fits a listener on every address. It
// never matches a half-open or closing connection: those are no full sockets.
func ofWildcardSocket() clause {
	return clause{"socket wildcard 1", []expr.Any{
		&expr.Socket{Key: expr.SocketKeyWildcard, Register: reg}, equalTo(1),
	}}
}

func toThisMachine() clause {
	return clause{"fib daddr type local", []expr.Any{
		&expr.Fib{Register: reg, FlagDADDR: true, ResultADDRTYPE: true}, equalTo(nativeBytes(unix.RTN_LOCAL)...),
	}}
}

func notFromInterfaces(s set) clause {
	return clause{"iifname != @" + s.name, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg},
		&expr.Lookup{SourceRegister: reg, SetName: s.name, Invert: true},
	}}
}

func sourceIn(f family, s set) clause {
	return clause{f.name + " saddr @" + s.name, inSet(expr.PayloadBaseNetworkHeader, f.source, f.length, s)}
}

func targetIn(f family, s set) clause {
	return clause{f.name + " daddr @" + s.name, inSet(expr.PayloadBaseNetworkHeader, f.target, f.length, s)}
}

func portIn(s set) clause {
	return clause{"tcp dport @" + s.name, inSet(expr.PayloadBaseTransportHeader, 2, 2, s)}
}

func inSet(base expr.PayloadBase, offset, length uint32, s set) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: reg, Base: base, Offset: offset, Len: length},
		&expr.Lookup{SourceRegister: reg, SetName: s.name},
	}
}

func countPackets() clause { return clause{"counter", []expr.Any{&expr.Counter{}}} }

func toProxy(f family, port uint16) clause {
	return clause{fmt.Sprintf("tproxy %s to :%d", f.name, port), []expr.Any{
		&expr.Immediate{Register: reg, Data: binary.BigEndian.AppendUint16(nil, port)},
		&expr.TProxy{Family: f.proto, TableFamily: unix.NFPROTO_INET, RegPort: reg},
	}}
}

func redirectTo(port uint16) clause {
	return clause{fmt.Sprintf("redirect to :%d", port), []expr.Any{
		&expr.Immediate{Register: reg, Data: binary.BigEndian.AppendUint16(nil, port)},
		&expr.Redir{RegisterProtoMin: reg},
	}}
}

func acceptPacket() clause {
	return clause{"accept", []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}}
}

func returnToCaller() clause {
	return clause{"return", []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}}
}

const dnsPort = 53

func familyOf(a netip.Addr) family {
	if a.Is4() {
		return ipv4
	}
	return ipv6
}

// addressType is the kind of sets of the family's addresses.
func (f family) addressType() nftables.SetDatatype {
	if f.isIPv4() {
		return nftables.TypeIPAddr
	}
	return nftables.TypeIP6Addr
}

func interfaceIs(key expr.MetaKey, word, op string, name string) clause {
	data := make([]byte, unix.IFNAMSIZ)
	copy(data, name)
	compare := &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: data}
	if op != "" {
		compare.Op = expr.CmpOpNeq
	}
	return clause{fmt.Sprintf("%s %s%q", word, op, name), []expr.Any{&expr.Meta{Key: key, Register: reg}, compare}}
}

func fromInterface(name string) clause { return interfaceIs(expr.MetaKeyIIFNAME, "iifname", "", name) }

func notFromInterface(name string) clause {
	return interfaceIs(expr.MetaKeyIIFNAME, "iifname", "!= ", name)
}

func toInterface(name string) clause { return interfaceIs(expr.MetaKeyOIFNAME, "oifname", "", name) }

// isEcho matches echo requests.
func isEcho(f family) clause {
	text, kind := "icmp type echo-request", byte(8)
	if !f.isIPv4() {
		text, kind = "icmpv6 type echo-request", 128
	}
	return clause{text, append(isICMP(f).exprs, icmpType(), equalTo(kind))}
}

func targetIs(f family, a netip.Addr) clause {
	return clause{f.name + " daddr " + a.String(), []expr.Any{
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: f.target, Len: f.length},
		equalTo(a.AsSlice()...),
	}}
}

func toPort(port uint16) clause {
	return clause{fmt.Sprintf("th dport %d", port), []expr.Any{
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		equalTo(binary.BigEndian.AppendUint16(nil, port)...),
	}}
}

// matchTracked matches connections by bits that the connection tracking knows.
func matchTracked(key expr.CtKey, bits uint32, text string) clause {
	return clause{text, []expr.Any{
		&expr.Ct{Key: key, Register: reg},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: nativeBytes(bits), Xor: nativeBytes(0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: nativeBytes(0)},
	}}
}

// isAnswer matches what belongs to a connection that there is.
func isAnswer() clause {
	return matchTracked(expr.CtKeySTATE, expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED,
		"ct state established,related")
}

// ofTranslated matches what has been sent elsewhere than it was meant to.
func ofTranslated() clause {
	const destination = 1 << 5 // IPS_DST_NAT
	return matchTracked(expr.CtKeySTATUS, destination, "ct status dnat")
}

func translateTo(f family, to netip.AddrPort) clause {
	const port = unix.NFT_REG_2
	return clause{fmt.Sprintf("dnat %s to %v", f.name, to), []expr.Any{
		&expr.Immediate{Register: reg, Data: to.Addr().AsSlice()},
		&expr.Immediate{Register: port, Data: binary.BigEndian.AppendUint16(nil, to.Port())},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(f.proto), RegAddrMin: reg, RegProtoMin: port},
	}}
}

func masqueradeSource() clause { return clause{"masquerade", []expr.Any{&expr.Masq{}}} }

func rejectWithReset() clause {
	return clause{"reject with tcp reset", []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}}}
}

func rejectPacket() clause {
	return clause{"reject with icmpx admin-prohibited", []expr.Any{
		&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED},
	}}
}
