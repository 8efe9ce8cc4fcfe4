// Package ccp is the datapath side of a congestion control plane. An agent, which is another process,
// installs programs that fold acknowledgements into reports, and answers reports with windows and
// rates (Narayan, "The Design and Implementation of a Congestion Control Plane", MIT 2019). The
// messages and programs are those of the authors' portus and libccp, so unmodified agents drive it.
// Like all of cc it does no I/O: the caller gives an Agent a function that sends, and passes it the
// datagrams that arrive.
package ccp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"github.com/penstock-net/penstock/cc"
)

// Kind is the type of a message.
type Kind uint16

// The kinds of messages; Create, Measure and Ready go to the agent.
const (
	KindCreate Kind = iota
	KindMeasure
	KindInstall
	KindUpdate
	KindChange
	KindReady
)

var kindNames = [...]string{"create", "measure", "install", "update_fields", "change_prog", "ready"}

// String names the kind, as in logs and errors.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind %d", uint16(k))
}

const (
	// HeaderLen is how many bytes the header of every message has.
	HeaderLen = 8

	createLen      = 96
	nameLen        = 64
	instructionLen = 16
	updateLen      = 13

	// MaxToAgent is the longest message that an agent reads.
	MaxToAgent = 1024
	// MaxFromAgent is the longest message of an agent: an Install of the largest program.
	MaxFromAgent = HeaderLen + 12 + (maxEvents+maxInstructions)*instructionLen
	// MaxName is the longest name of an algorithm in a Create.
	MaxName = nameLen - 1
)

// ErrMalformed is wrapped by every error about the bytes of a message.
var ErrMalformed = errors.New("malformed message")

var le = binary.LittleEndian

// Create announces a new flow to the agent.
type Create struct {
	Flow          uint32
	InitialCwnd   uint32 // bytes
	MSS           uint32 // bytes
	Local, Remote netip.AddrPort
	Algorithm     string // up to MaxName bytes; empty: the agent's default
}

// Measure is a report of a flow; one of program 0 without fields closes it.
type Measure struct {
	Flow    uint32
	Program uint32
	Fields  []uint64
}

// Install has a program, which is not verified yet.
type Install struct {
	Program      uint32
	Events       []Event
	Instructions []Instruction
}

// Event has two ranges of instructions: a flag, and a body that runs if the flag is not 0.
type Event struct{ Flag, Flags, Body, Bodies uint32 }

// Update sets one register.
type Update struct {
	Register
	Value uint64
}

// Change sets registers of a flow, and before that its program, unless that is 0.
type Change struct {
	Flow    uint32
	Program uint32
	Updates []Update
}

// Ready announces a datapath that has started. Agents send it, too, when they start.
type Ready struct{ Datapath uint32 }

// appendHeader appends the header of a message: kind, length in bytes with the header, and flow.
func appendHeader(b []byte, k Kind, length int, flow uint32) []byte {
	b = le.AppendUint16(b, uint16(k))
	b = le.AppendUint16(b, uint16(length))
	return le.AppendUint32(b, flow)
}

// Append appends the message to b.
func (m Create) Append(b []byte) []byte {
	b = appendHeader(b, KindCreate, createLen, m.Flow)
	b = le.AppendUint32(b, m.InitialCwnd)
	b = le.AppendUint32(b, m.MSS)
	b = appendAddr(b, m.Local)
	b = appendAddr(b, m.Remote)
	var name [nameLen]byte
	copy(name[:MaxName], m.Algorithm)
	return append(b, name[:]...)
}

// appendAddr appends an IPv4 address and a port as numbers. The address is 0 for IPv6, which has no room.
func appendAddr(b []byte, a netip.AddrPort) []byte {
	var ip uint32
	if addr := a.Addr().Unmap(); addr.Is4() {
		four := addr.As4()
		ip = binary.BigEndian.Uint32(four[:])
	}
	b = le.AppendUint32(b, ip)
	return le.AppendUint32(b, uint32(a.Port()))
}

// Append appends the message to b.
func (m Measure) Append(b []byte) []byte {
	b = appendHeader(b, KindMeasure, 16+8*len(m.Fields), m.Flow)
	b = le.AppendUint32(b, m.Program)
	b = le.AppendUint32(b, uint32(len(m.Fields)))
	for _, v := range m.Fields {
		b = le.AppendUint64(b, v)
	}
	return b
}

// Append appends the message to b.
func (m Ready) Append(b []byte) []byte {
	return le.AppendUint32(appendHeader(b, KindReady, 12, 0), m.Datapath)
}

// Append appends the message to b.
func (m Install) Append(b []byte) []byte {
	b = appendHeader(b, KindInstall, 20+instructionLen*(len(m.Events)+len(m.Instructions)), 0)
	b = le.AppendUint32(b, m.Program)
	b = le.AppendUint32(b, uint32(len(m.Events)))
	b = le.AppendUint32(b, uint32(len(m.Instructions)))
	for _, e := range m.Events {
		for _, v := range [...]uint32{e.Flag, e.Flags, e.Body, e.Bodies} {
			b = le.AppendUint32(b, v)
		}
	}
	for _, in := range m.Instructions {
		b = append(b, byte(in.Op))
		for _, r := range [...]Register{in.Result, in.Left, in.Right} {
			b = le.AppendUint32(append(b, byte(r.Class)), r.Index)
		}
	}
	return b
}

// Append appends the message to b.
func (m Change) Append(b []byte) []byte {
	if m.Program == 0 {
		b = appendHeader(b, KindUpdate, 12+updateLen*len(m.Updates), m.Flow)
	} else {
		b = appendHeader(b, KindChange, 16+updateLen*len(m.Updates), m.Flow)
		b = le.AppendUint32(b, m.Program)
	}
	b = le.AppendUint32(b, uint32(len(m.Updates)))
	for _, u := range m.Updates {
		b = le.AppendUint32(append(b, byte(u.Class)), u.Index)
		b = le.AppendUint64(b, u.Value)
	}
	return b
}

// Message is one message of a datagram: its kind, its flow (0: none) and its body.
type Message struct {
	Kind Kind
	Flow uint32
	body []byte
}

// Length returns the length in bytes of the message that begins with header, which has HeaderLen bytes.
func Length(header []byte) (int, error) {
	n := int(le.Uint16(header[2:]))
	if n < HeaderLen {
		return n, fmt.Errorf("%w: %v says that it is %d bytes long", ErrMalformed, Kind(le.Uint16(header)), n)
	}
	return n, nil
}

// Next returns the first message of a datagram, and the rest, which may have more.
func Next(b []byte) (m Message, rest []byte, err error) {
	if len(b) < HeaderLen {
		return m, nil, fmt.Errorf("%w: %d bytes are no header", ErrMalformed, len(b))
	}
	m.Kind, m.Flow = Kind(le.Uint16(b)), le.Uint32(b[4:])
	n := int(le.Uint16(b[2:]))
	if n < HeaderLen || n > len(b) {
		return m, nil, fmt.Errorf("%w: %v says that it is %d bytes long, of %d", ErrMalformed, m.Kind, n, len(b))
	}
	m.body = b[HeaderLen:n]
	return m, b[n:], nil
}

// lengthError returns the error about a body of the wrong length.
func (m Message) lengthError(want int) error {
	return fmt.Errorf("%w: a %v of %d bytes has to have %d",
		ErrMalformed, m.Kind, HeaderLen+len(m.body), HeaderLen+want)
}

// Create decodes the announcement of a flow.
func (m Message) Create() (Create, error) {
	b := m.body
	if len(b) != createLen-HeaderLen {
		return Create{}, m.lengthError(createLen - HeaderLen)
	}
	c := Create{Flow: m.Flow, InitialCwnd: le.Uint32(b), MSS: le.Uint32(b[4:])}
	c.Local, c.Remote = readAddr(b[8:]), readAddr(b[16:])
	name := b[24:]
	for i, v := range name {
		if v == 0 {
			name = name[:i]
			break
		}
	}
	if len(name) > MaxName {
		return Create{}, fmt.Errorf("%w: an algorithm's name of %d bytes; it may have %d",
			ErrMalformed, len(name), MaxName)
	}
	c.Algorithm = string(name)
	return c, nil
}

// readAddr reads what appendAddr has written.
func readAddr(b []byte) netip.AddrPort {
	var four [4]byte
	binary.BigEndian.PutUint32(four[:], le.Uint32(b))
	return netip.AddrPortFrom(netip.AddrFrom4(four), uint16(le.Uint32(b[4:])))
}

// Measure decodes a report.
func (m Message) Measure() (Measure, error) {
	b := m.body
	if len(b) < 8 {
		return Measure{}, m.lengthError(8)
	}
	n := uint64(le.Uint32(b[4:]))
	if uint64(len(b)) != 8+8*n {
		return Measure{}, fmt.Errorf("%w: a measure of %d bytes says that it has %d fields",
			ErrMalformed, HeaderLen+len(b), n)
	}
	out := Measure{Flow: m.Flow, Program: le.Uint32(b), Fields: make([]uint64, n)}
	for i := range out.Fields {
		out.Fields[i] = le.Uint64(b[8+8*i:])
	}
	return out, nil
}

// Ready decodes the message that a datapath starts with.
func (m Message) Ready() (Ready, error) {
	if len(m.body) != 4 {
		return Ready{}, m.lengthError(4)
	}
	return Ready{le.Uint32(m.body)}, nil
}

// Install decodes a program.
func (m Message) Install() (Install, error) {
	b := m.body
	if len(b) < 12 {
		return Install{}, m.lengthError(12)
	}
	events, instructions := le.Uint32(b[4:]), le.Uint32(b[8:])
	if events > maxEvents || instructions > maxInstructions {
		return Install{}, fmt.Errorf("%w: %w: one of %d events and %d instructions; it may have %d of each",
			ErrMalformed, ErrProgram, events, instructions, maxEvents)
	}
	if want := 12 + instructionLen*int(events+instructions); len(b) != want {
		return Install{}, m.lengthError(want)
	}
	out := Install{
		Program: le.Uint32(b), Events: make([]Event, events), Instructions: make([]Instruction, instructions),
	}
	b = b[12:]
	for i := range out.Events {
		out.Events[i] = Event{le.Uint32(b), le.Uint32(b[4:]), le.Uint32(b[8:]), le.Uint32(b[12:])}
		b = b[instructionLen:]
	}
	for i := range out.Instructions {
		out.Instructions[i] = Instruction{Op(b[0]), readRegister(b[1:]), readRegister(b[6:]), readRegister(b[11:])}
		b = b[instructionLen:]
	}
	return out, nil
}

// readRegister reads five bytes: the class and the number.
func readRegister(b []byte) Register { return Register{Class(b[0]), le.Uint32(b[1:])} }

// Change decodes a KindChange or a KindUpdate. The number of updates follows from the length, since
// portus may send only its low eight bits.
func (m Message) Change() (Change, error) {
	b, out := m.body, Change{Flow: m.Flow}
	least := 4
	if m.Kind == KindChange {
		least = 8
	}
	if len(b) < least {
		return out, m.lengthError(least)
	}
	if m.Kind == KindChange {
		if out.Program, b = le.Uint32(b), b[4:]; out.Program == 0 {
			return out, fmt.Errorf("%w: a change_prog to program 0, which there is none of", ErrMalformed)
		}
	}
	n, room := le.Uint32(b), len(b)-4
	if room%updateLen != 0 || n&0xff != uint32(room/updateLen)&0xff || room/updateLen > maxUpdates {
		return out, fmt.Errorf("%w: a %v of %d bytes says that it has %d updates, and may have %d",
			ErrMalformed, m.Kind, HeaderLen+len(m.body), n, maxUpdates)
	}
	out.Updates = make([]Update, room/updateLen)
	for i := range out.Updates {
		u := b[4+updateLen*i:]
		out.Updates[i] = Update{readRegister(u), le.Uint64(u[5:])}
	}
	return out, nil
}

// clampToUint32 returns a size, or the nearest that 32 bits can hold.
func clampToUint32(b cc.Bytes) uint32 { return uint32(min(max(b, 0), 1<<32-1)) }
