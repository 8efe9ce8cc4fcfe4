// Package frame is the wire format of connections with acknowledgements of their own (ALCC §4.2). Each side sends a
// hello, then records, inside a stream that keeps their order: TCP, TLS, or a stream of QUIC.
//
//	hello   magic (8 bytes) | version (1) | largest record (4, big-endian)
//	record  kind (1) | length of body (varint) | body
//
//	kind  record  body
//	1     data    bytes of the application
//	2     ack     offset | records | gap | held | clock | flags: varints
//	3     fin     none: no data follows
//
// A stream needs no sequence numbers: a byte's offset is its number. Varints are those of encoding/binary. Records of
// other kinds are passed over, so that later versions may add some that need no answer.
package frame

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"
)

// Sizes of the format.
const (
	Version    = 1
	HelloBytes = 13
	// DataBytes is the most data of one record: with its header it fills a segment of 1,448 bytes.
	DataBytes = 1445
	// MaxRecord bounds the body of a record that is received. Data beyond DataBytes is taken, for peers with larger
	// segments.
	MaxRecord = 64 << 10
)

// magic begins a hello.
const magic = "\x89ALCC\r\n\x1a"

// Kind says what a record is.
type Kind byte

// The kinds of records.
const (
	Data Kind = 1
	Ack  Kind = 2
	Fin  Kind = 3
)

// Errors of a stream. ErrNoHello is one of a peer that speaks something else.
var (
	ErrNoHello = errors.New("the peer does not speak this framing: both ends must use it, or none")
	ErrFormat  = errors.New("malformed record")
)

// VersionError is that of a peer with another version.
type VersionError struct{ Peer byte }

// Error implements error.
func (e VersionError) Error() string {
	return fmt.Sprintf("the peer speaks version %d of the framing, this end version %d: update the older one", e.Peer, Version)
}

// AppendHello appends what each side sends first.
func AppendHello(b []byte) []byte {
	b = append(append(b, magic...), Version)
	return binary.BigEndian.AppendUint32(b, MaxRecord)
}

// ParseHello reads the peer's hello, and returns the largest record that the peer takes.
func ParseHello(b []byte) (largest int, err error) {
	switch {
	case len(b) < HelloBytes || string(b[:len(magic)]) != magic:
		return 0, ErrNoHello
	case b[len(magic)] != Version:
		return 0, VersionError{b[len(magic)]}
	}
	largest = int(min(binary.BigEndian.Uint32(b[len(magic)+1:]), MaxRecord))
	if largest < DataBytes {
		return 0, fmt.Errorf("%w: the peer takes records of %d bytes only", ErrFormat, largest)
	}
	return largest, nil
}

// Acknowledgement is what a receiver says of the data that it has read from the stream.
type Acknowledgement struct {
	Offset  uint64        // bytes of data read so far
	Records uint64        // data records read since the acknowledgement before
	Gap     time.Duration // between the newest arrivals of the acknowledgement before and of this one
	Held    time.Duration // between the newest arrival and this acknowledgement
	Clock   uint64        // the receiver's, in milliseconds from its start, when it sent this
	// Full: the receiver's buffer has no room, so that it reads no further. Its application holds the flow back.
	Full bool
	// Repaired: the newest records came together, behind a hole that TCP has repaired. Their age is not the path's.
	Repaired bool
	// Fin: the receiver has read the end of the data.
	Fin bool
}

// The flags of an acknowledgement.
const (
	flagFull = 1 << iota
	flagRepaired
	flagFin
)

// flags returns the flags as a number.
func (a *Acknowledgement) flags() (f uint64) {
	for i, is := range [...]bool{a.Full, a.Repaired, a.Fin} {
		if is {
			f |= 1 << i
		}
	}
	return f
}

// AppendData appends a data record.
func AppendData(b, data []byte) []byte {
	b = binary.AppendUvarint(append(b, byte(Data)), uint64(len(data)))
	return append(b, data...)
}

// AppendAck appends an acknowledgement. Times are rounded down to microseconds.
func AppendAck(b []byte, a Acknowledgement) []byte {
	var body [6 * binary.MaxVarintLen64]byte
	end := body[:0]
	for _, v := range [...]uint64{
		a.Offset, a.Records, uint64(a.Gap.Microseconds()), uint64(a.Held.Microseconds()), a.Clock, a.flags(),
	} {
		end = binary.AppendUvarint(end, v)
	}
	b = binary.AppendUvarint(append(b, byte(Ack)), uint64(len(end)))
	return append(b, end...)
}

// AppendFin appends the record that ends the data.
func AppendFin(b []byte) []byte { return append(b, byte(Fin), 0) }

// Parse returns the first record of b, and how many bytes it takes with its header. 0: b does not hold all of it.
// body is a part of b.
func Parse(b []byte) (kind Kind, body []byte, size int, err error) {
	if len(b) < 2 {
		return 0, nil, 0, nil
	}
	length, n := binary.Uvarint(b[1:])
	switch {
	case n == 0:
		return 0, nil, 0, nil
	case n < 0 || length > MaxRecord:
		return 0, nil, 0, fmt.Errorf("%w: longer than %d bytes", ErrFormat, MaxRecord)
	}
	size = 1 + n + int(length)
	if len(b) < size {
		return 0, nil, 0, nil
	}
	return Kind(b[0]), b[1+n : size], size, nil
}

// maxTime bounds the times of an acknowledgement.
const maxTime = uint64(time.Hour / time.Microsecond)

// ParseAck reads the body of an acknowledgement. Further numbers of later versions are passed over.
func ParseAck(body []byte) (a Acknowledgement, err error) {
	var v [6]uint64
	for i := range v {
		number, n := binary.Uvarint(body)
		if n <= 0 {
			return a, fmt.Errorf("%w: an acknowledgement ends early", ErrFormat)
		}
		v[i], body = number, body[n:]
	}
	if v[2] > maxTime || v[3] > maxTime {
		return a, fmt.Errorf("%w: an acknowledgement with a time above an hour", ErrFormat)
	}
	return Acknowledgement{
		Offset: v[0], Records: v[1], Clock: v[4],
		Gap: time.Duration(v[2]) * time.Microsecond, Held: time.Duration(v[3]) * time.Microsecond,
		Full: v[5]&flagFull != 0, Repaired: v[5]&flagRepaired != 0, Fin: v[5]&flagFin != 0,
	}, nil
}
