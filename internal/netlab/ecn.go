//go:build linux

package netlab

import (
	"encoding/binary"

	"github.com/penstock-net/penstock/cc/sim"
)

// codepoint reads the ECN field of an IP packet; sim.NotECT where there is none.
func codepoint(b []byte) sim.Codepoint {
	switch {
	case len(b) < 2:
		return sim.NotECT
	case b[0]>>4 == 6:
		return sim.Codepoint(b[1] >> 4 & 3)
	}
	return sim.Codepoint(b[1] & 3)
}

// mark sets CE in an IP packet that allows it (RFC 3168 §5).
func mark(b []byte) {
	switch {
	case codepoint(b) == sim.NotECT:
	case b[0]>>4 == 6:
		b[1] |= byte(sim.CE) << 4
	case len(b) >= 20:
		before := binary.BigEndian.Uint16(b)
		b[1] |= byte(sim.CE)
		sum := uint32(^binary.BigEndian.Uint16(b[10:])) + uint32(^before) + uint32(binary.BigEndian.Uint16(b))
		sum = sum&0xffff + sum>>16
		sum = sum&0xffff + sum>>16
		binary.BigEndian.PutUint16(b[10:], ^uint16(sum)) // RFC 1624, equation 3
	}
}
