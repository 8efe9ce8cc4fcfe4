package capture

import (
	"encoding/binary"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
)

// matches evaluates a match of iptables over nftables.
func (p packet) matches(m *expr.Match) truth {
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
			is := p.markValue().bitwise(&expr.Bitwise{Len: 4, Mask: b[4:8], Xor: make([]byte, 4)}).compare(expr.CmpOpEq, b[:4])
			if b[8] != 0 {
				is = is.not()
			}
			return is
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

func (p packet) matchesTCP(t *xt.Tcp) truth {
	ports := func(v value, bounds [2]uint16, invert bool) truth {
		is := v.between(bounds[0], bounds[1])
		if invert {
			is = is.not()
		}
		return is
	}
	flags := yes
	if t.FlagsMask != 0 {
		flags = truthOf(p.flags&t.FlagsMask == t.FlagsCmp)
		if t.InvFlags&xt.TcpInvFlags != 0 {
			flags = flags.not()
		}
	}
	if t.Option != 0 {
		flags = flags.and(maybe)
	}
	return ports(portValue(p.sourcePort), t.SrcPorts, t.InvFlags&xt.TcpInvSrcPorts != 0).
		and(ports(portValue(p.targetPort), t.DstPorts, t.InvFlags&xt.TcpInvDestPorts != 0)).and(flags)
}

// matchesPorts evaluates xt_multiport_v1: which ports, how many, the ports, which of them begin a range, invert.
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
			is = is.or(v.between(first, last))
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
	if b[invert] != 0 {
		is = is.not()
	}
	return is
}

// Of xt_conntrack: that it asks for the state, and the state of what was sent elsewhere than it was meant to.
const (
	conntrackState = 1 << 0
	conntrackDNAT  = 1 << 7
)

func (p packet) matchesState(asks, inverts, states uint16) truth {
	if asks&conntrackState == 0 {
		return maybe
	}
	has := uint16(p.state)
	if p.translated {
		has |= conntrackDNAT
	}
	is := truthOf(has&states != 0)
	if inverts&conntrackState != 0 {
		is = is.not()
	}
	if asks != conntrackState {
		is = is.and(maybe)
	}
	return is
}

func hasAddressType(is uint32, of uint16, invert bool) truth {
	if of == 0 {
		return yes
	}
	return truthOf((of&(1<<is) != 0) != invert)
}
