// Package native sends with an algorithm of Penstock's and nothing below it: over UDP,
// with an acknowledgement for each packet, retransmissions and pacing of its own. It is
// what the same algorithm over the kernel's TCP is compared with ("native" in the papers).
//
// A data packet has the size of a full TCP segment of Penstock's on the wire. All numbers
// are big endian:
//
//	token 8 | transmission 8 | segment 8 | wants 2 | zeros up to DataBytes
//
// Transmissions are counted from 1, so that a packet that is sent again has a number of
// its own (RFC 9002 §2); segments are counted from 0, and keep their number. The receiver answers each with
//
//	token 8 | transmission 8 | highest 8 | mask 8
//
// where highest is the latest transmission that has arrived, and bit i of mask tells
// whether highest-1-i has: what one lost acknowledgement told, the next ones repeat.
//
// Sprout's sender has wants above 0: it means to be silent for wants-1 ms after this packet. The receiver then sends a
// forecast in each tick (NSDI 2013 §3.4). Its counts are cumulative:
//
//	token 8 | received or lost 8 | counts 8 × 4
package native

import (
	"encoding/binary"
	"slices"

	"github.com/penstock-net/penstock/cc"
)

const (
	// DataBytes is the UDP payload of a data packet: with the headers of UDP and IPv4 it
	// is a packet of 1,500 bytes.
	DataBytes = 1500 - 28
	ackBytes  = 32
	// forecastBytes is the size of a forecast.
	forecastBytes = 16 + 8*4
	maskBits      = 64
)

// payload is what a data packet counts for: what a TCP segment of that size carries.
const payload = cc.DefaultMSS

// ack is what the receiver answers.
type ack struct {
	tx      uint64 // the transmission that is answered
	highest uint64 // the latest that has arrived
	mask    uint64 // bit i: whether highest-1-i has arrived
}

func (a ack) write(b []byte, token uint64) []byte {
	b = binary.BigEndian.AppendUint64(b, token)
	b = binary.BigEndian.AppendUint64(b, a.tx)
	b = binary.BigEndian.AppendUint64(b, a.highest)
	return binary.BigEndian.AppendUint64(b, a.mask)
}

// parseAck reads an acknowledgement of packets with that token. It is not ok if b is
// none, or one that no receiver writes.
func parseAck(b []byte, token uint64) (a ack, ok bool) {
	if len(b) != ackBytes || binary.BigEndian.Uint64(b) != token {
		return a, false
	}
	a = ack{binary.BigEndian.Uint64(b[8:]), binary.BigEndian.Uint64(b[16:]), binary.BigEndian.Uint64(b[24:])}
	return a, a.tx > 0 && a.tx <= a.highest
}

// each calls tell with every transmission that a says has arrived, the latest first.
func (a ack) each(tell func(tx uint64)) {
	tell(a.highest)
	for i := range uint64(maskBits) {
		if a.mask>>i&1 == 1 && a.highest > i+1 {
			tell(a.highest - 1 - i)
		}
	}
	if a.tx+maskBits < a.highest {
		tell(a.tx)
	}
}

// writeForecast appends a forecast to b.
func writeForecast(b []byte, token uint64, f cc.SproutForecast) []byte {
	b = binary.BigEndian.AppendUint64(b, token)
	b = binary.BigEndian.AppendUint64(b, uint64(f.ReceivedOrLost))
	for _, n := range f.Counts {
		b = binary.BigEndian.AppendUint32(b, uint32(n)) //nolint:gosec // a count of packets in 160 ms
	}
	return b
}

// parseForecast reads a forecast for the sender with that token. It is not ok if b is none.
func parseForecast(b []byte, token uint64) (f cc.SproutForecast, ok bool) {
	if len(b) != forecastBytes || binary.BigEndian.Uint64(b) != token {
		return f, false
	}
	f.ReceivedOrLost = cc.Bytes(binary.BigEndian.Uint64(b[8:])) //nolint:gosec // the flow bounds it
	for i := range f.Counts {
		f.Counts[i] = int(binary.BigEndian.Uint32(b[16+4*i:]))
	}
	return f, f.ReceivedOrLost >= 0 && slices.IsSorted(f.Counts[:])
}

// writeData puts a data packet's head into b; the rest of b stays as it is.
func writeData(b []byte, token, tx, segment uint64, wants uint16) {
	binary.BigEndian.PutUint64(b, token)
	binary.BigEndian.PutUint64(b[8:], tx)
	binary.BigEndian.PutUint64(b[16:], segment)
	binary.BigEndian.PutUint16(b[24:], wants)
}

// arrivals is what a receiver knows of one sender.
type arrivals struct {
	token   uint64
	highest uint64
	mask    uint64
	next    uint64          // all segments below have arrived
	above   map[uint64]bool // those that have arrived beyond a hole
}

// isNew notes the segment of a data packet of this sender, and reports whether it had not arrived before.
func (r *arrivals) isNew(b []byte) bool {
	n := binary.BigEndian.Uint64(b[16:])
	if n < r.next || r.above[n] {
		return false
	}
	if r.above == nil {
		r.above = map[uint64]bool{}
	}
	for r.above[n] = true; r.above[r.next]; r.next++ {
		delete(r.above, r.next)
	}
	return true
}

// take notes a data packet and returns the answer to it. ok is false for what is no
// data packet of this sender.
func (r *arrivals) take(b []byte) (a ack, ok bool) {
	if len(b) != DataBytes || binary.BigEndian.Uint64(b) != r.token {
		return a, false
	}
	tx := binary.BigEndian.Uint64(b[8:])
	switch {
	case tx == 0:
		return a, false
	case tx > r.highest:
		by := tx - r.highest
		r.mask <<= by // by more than 63 is 0, as it is to be
		if r.highest > 0 && by <= maskBits {
			r.mask |= 1 << (by - 1)
		}
		r.highest = tx
	case tx < r.highest && r.highest-tx <= maskBits:
		r.mask |= 1 << (r.highest - tx - 1)
	}
	return ack{tx: tx, highest: r.highest, mask: r.mask}, true
}
