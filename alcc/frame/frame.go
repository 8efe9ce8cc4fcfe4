// Package frame is the wire format of connections with acknowledgements of their own (ALCC §4.2). Each side sends a
// hello, then records, inside a stream that keeps their order: TCP, TLS, or a stream of QUIC.
//
//	hello   magic (8 bytes) | version (1) | flags (1) | largest record (4, big-endian)
//	record  kind (1) | length of body (varint) | body
//
//	kind  record    body
//	1     data      bytes of the application
//	2     ack       offset | records | gap | held | clock | flags: varints
//	3     fin       none: no data follows
//	4     forecast  received | 8 counts, each as what it has more than the one before: varints
//	5     idle      pause in milliseconds, a varint: the sender means to send no data for so long
//
// Forecasts answer a hello with the flag forecasts (1). They and idle are Sprout's (NSDI 2013 §3.2 to 3.5).
//
// A stream needs no sequence numbers: a byte's offset is its number. Varints are those of encoding/binary. Records of
// other kinds are passed over, so that later versions may add some that need no answer.
package frame

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Sizes of the format.
const (
	Version    = 1
	HelloBytes = 14
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
	Data     Kind = 1
	Ack      Kind = 2
	Fin      Kind = 3
	Forecast Kind = 4
	Idle     Kind = 5
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
	return fmt.Sprintf("the peer speaks version %d of the framing, this end version %d: update the older one", e.Peer,
		Version)
}

// Hello is what each side says of itself first.
type Hello struct {
	Forecasts bool // it wants forecasts of what it sends
	Largest   int  // body of a record that it takes, in bytes; ParseHello bounds it by MaxRecord
}

// wantsForecasts is the flag of Hello.Forecasts.
const wantsForecasts = 1

// AppendHello appends a hello of this end, which takes records of up to MaxRecord.
func AppendHello(b []byte, forecasts bool) []byte {
	flags := byte(0)
	if forecasts {
		flags = wantsForecasts
	}
	b = append(append(b, magic...), Version, flags)
	return binary.BigEndian.AppendUint32(b, MaxRecord)
}

// ParseHello reads the peer's hello.
func ParseHello(b []byte) (h Hello, err error) {
	switch {
	case len(b) < HelloBytes || string(b[:len(magic)]) != magic:
		return h, ErrNoHello
	case b[len(magic)] != Version:
		return h, VersionError{b[len(magic)]}
	}
	h.Forecasts = b[len(magic)+1]&wantsForecasts != 0
	h.Largest = int(min(binary.BigEndian.Uint32(b[len(magic)+2:]), MaxRecord))
	if h.Largest < DataBytes {
		return h, fmt.Errorf("%w: the peer takes records of %d bytes only", ErrFormat, h.Largest)
	}
	return h, nil
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

// AppendIdle appends the record that says that there will be no data for a time.
func AppendIdle(b []byte, pause time.Duration) []byte {
	var body [binary.MaxVarintLen64]byte
	end := binary.AppendUvarint(body[:0], uint64(pause.Milliseconds()))
	return append(append(b, byte(Idle), byte(len(end))), end...)
}

// ParseIdle reads the body of an idle record.
func ParseIdle(body []byte) (pause time.Duration, err error) {
	var v [1]uint64
	if err := readVarints(body, v[:]); err != nil {
		return 0, err
	}
	return time.Duration(min(v[0], uint64(time.Hour.Milliseconds()))) * time.Millisecond, nil
}

// AppendForecast appends a forecast. Its counts are of cc.SproutForecast: they never fall.
func AppendForecast(b []byte, f cc.SproutForecast) []byte {
	var body [(1 + len(f.Counts)) * binary.MaxVarintLen64]byte
	end := binary.AppendUvarint(body[:0], uint64(f.ReceivedOrLost))
	before := 0
	for _, n := range f.Counts {
		end = binary.AppendUvarint(end, uint64(n-before))
		before = n
	}
	b = binary.AppendUvarint(append(b, byte(Forecast)), uint64(len(end)))
	return append(b, end...)
}

// maxCount bounds the units that a forecast may have in one tick.
const maxCount = 1 << 20

// ParseForecast reads the body of a forecast.
func ParseForecast(body []byte) (f cc.SproutForecast, err error) {
	var v [1 + len(f.Counts)]uint64
	if err := readVarints(body, v[:]); err != nil {
		return f, err
	}
	if v[0] > math.MaxInt64 {
		return f, fmt.Errorf("%w: a forecast of %d bytes", ErrFormat, v[0])
	}
	f.ReceivedOrLost = cc.Bytes(v[0])
	sum := 0
	for i, n := range v[1:] {
		if n > maxCount {
			return f, fmt.Errorf("%w: a forecast of %d units in a tick", ErrFormat, n)
		}
		sum += int(n)
		f.Counts[i] = sum
	}
	return f, nil
}

// readVarints reads as many numbers as out has room for. Further ones, of later versions, are passed over.
func readVarints(body []byte, out []uint64) error {
	for i := range out {
		number, n := binary.Uvarint(body)
		if n <= 0 {
			return fmt.Errorf("%w: a record ends early", ErrFormat)
		}
		out[i], body = number, body[n:]
	}
	return nil
}

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

// ParseAck reads the body of an acknowledgement.
func ParseAck(body []byte) (a Acknowledgement, err error) {
	var v [6]uint64
	if err := readVarints(body, v[:]); err != nil {
		return a, err
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
