package userspace

import "encoding/binary"

const (
	protocolTCP = 6
	tcpHeader   = 20 // without options
	flagSYN     = 0x02

	optionEnd, optionPad, optionMSS = 0, 1, 2 // RFC 9293 §3.1
)

// synOf returns the TCP segment of an IP packet that endsOf has accepted and
// the length of its headers, if it is a whole SYN.
func synOf(p []byte) (segment []byte, header, end int) {
	header = ipv6Header
	if p[0]>>4 == 4 {
		if header = int(p[0]&0xf) * 4; header < ipv4Header || p[9] != protocolTCP ||
			binary.BigEndian.Uint16(p[6:])&0x1fff != 0 {
			return nil, 0, 0
		}
	} else if p[6] != protocolTCP {
		return nil, 0, 0
	}
	if len(p) < header+tcpHeader {
		return nil, 0, 0
	}
	segment = p[header:]
	end = int(segment[12]>>4) * 4
	if segment[13]&flagSYN == 0 || end < tcpHeader || end > len(segment) {
		return nil, 0, 0
	}
	return segment, header, end
}

// isTCP tells whether an IP packet that endsOf has accepted has TCP right behind its IP header.
func isTCP(p []byte) bool {
	if p[0]>>4 == 4 {
		return p[9] == protocolTCP
	}
	return p[6] == protocolTCP
}

func isSYN(p []byte) bool {
	segment, _, _ := synOf(p)
	return segment != nil
}

// clampMSS lowers the MSS option of a SYN to what packets of mtu bytes carry: a Packet
// Too Big costs a connection its first seconds, and some clients ignore it. p is an IP
// packet that endsOf has accepted; anything but a SYN with a larger MSS stays as it is.
func clampMSS(p []byte, mtu int) {
	segment, header, end := synOf(p)
	for at := tcpHeader; at < end; {
		switch segment[at] {
		case optionEnd:
			return
		case optionPad:
			at++
			continue
		}
		if at+1 >= end || segment[at+1] < 2 || at+int(segment[at+1]) > end {
			return
		}
		if segment[at] == optionMSS && segment[at+1] == 4 {
			lowerMSS(segment, at+2, mtu-header-tcpHeader)
			return
		}
		at += int(segment[at+1])
	}
}

// lowerMSS sets the number at offset to most, if it is more, and corrects the checksum
// of the segment (RFC 1624 §3).
func lowerMSS(segment []byte, offset, most int) {
	old := binary.BigEndian.Uint16(segment[offset:])
	if int(old) <= most || most < 1 {
		return
	}
	binary.BigEndian.PutUint16(segment[offset:], uint16(most))
	was, is := uint32(old), uint32(most)
	if offset%2 != 0 { // its bytes are in two words of the sum
		was, is = was>>8|was&0xff<<8, is>>8|is&0xff<<8
	}
	sum := uint32(^binary.BigEndian.Uint16(segment[16:])) + (^was & 0xffff) + is
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(segment[16:], ^uint16(sum))
}
