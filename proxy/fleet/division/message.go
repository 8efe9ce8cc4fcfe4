package division

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/penstock-net/penstock/cc"
)

// Message is sent by each edge to each other one every Period.
type Message struct {
	At      cc.Time // when it was sent, by the sender's clock; it grows from message to message, also after a restart
	Heard   cc.Time // At of the receiver's newest message, with the reports that Grants answer; 0: none came
	View    uint32  // a hash of the names of the members that the sender hears
	Reports []Report
	Grants  []Grant
}

// Report is an edge's use of a limit, for the limit's owner.
type Report struct {
	Key
	Demand  cc.Rate // rate that the flows want
	Sent    cc.Rate // rate that they send
	Weight  int     // of the flows that send
	Rate    cc.Rate // the part in force at the edge
	GrantAt cc.Time // Message.At of the grant in force, if it is this owner's; 0: it is not
}

// Grant is the part of a limit that the receiver may use, for Lease from Message.Heard.
type Grant struct {
	Key
	Rate cc.Rate
}

// Bounds of a message.
const (
	MaxPacket = 1200 // bytes: with what encryption adds, a packet stays whole on every path of 1280
	maxGroup  = 255  // bytes of a group's name; longer ones are not shared
	maxWeight = math.MaxInt32
)

// Kinds of entries.
const (
	kindReport = 1
	kindGrant  = 2
)

// AppendPackets appends the packets of m to out: several if one has no room for all. Each begins with the header, and
// is a complete message. Entries with too long a group name are left out.
func (m *Message) AppendPackets(out [][]byte) [][]byte {
	header := binary.AppendUvarint(nil, uint64(m.At))
	header = binary.BigEndian.AppendUint32(binary.AppendUvarint(header, uint64(m.Heard)), m.View)
	packet := header[:len(header):len(header)]
	add := func(entry []byte, group string) {
		if len(group) > maxGroup {
			return
		}
		if len(packet)+len(entry) > MaxPacket {
			out = append(out, packet)
			packet = header[:len(header):len(header)]
		}
		packet = append(packet, entry...)
	}
	for _, r := range m.Reports {
		e := appendKey([]byte{kindReport}, r.Key)
		for _, v := range []int64{int64(r.Demand), int64(r.Sent), int64(r.Weight), int64(r.Rate), int64(r.GrantAt)} {
			e = binary.AppendUvarint(e, uint64(v))
		}
		add(e, r.Group)
	}
	for _, g := range m.Grants {
		add(binary.AppendUvarint(appendKey([]byte{kindGrant}, g.Key), uint64(g.Rate)), g.Group)
	}
	return append(out, packet)
}

// appendKey appends k to an entry.
func appendKey(e []byte, k Key) []byte {
	e = append(binary.AppendUvarint(e, uint64(len(k.Group))), k.Group...)
	return binary.AppendUvarint(e, uint64(k.Max))
}

// errMessage is the error about a malformed message.
var errMessage = errors.New("division: a message is cut off or has a number out of bounds")

// ParsePacket reads a packet of AppendPackets.
func ParsePacket(packet []byte) (*Message, error) {
	if len(packet) > MaxPacket {
		return nil, fmt.Errorf("division: a message of %d bytes; at most %d", len(packet), MaxPacket)
	}
	p := parser{rest: packet}
	m := &Message{At: cc.Time(p.number()), Heard: cc.Time(p.number()), View: p.hash()}
	for len(p.rest) > 0 && !p.failed {
		kind := p.rest[0]
		p.rest = p.rest[1:]
		k := Key{Group: p.text(), Max: cc.Rate(p.number())}
		p.failed = p.failed || k.Max == 0
		switch kind {
		case kindReport:
			r := Report{
				Key: k, Demand: cc.Rate(p.number()), Sent: cc.Rate(p.number()), Weight: int(min(p.number(), maxWeight)),
				Rate: cc.Rate(p.number()), GrantAt: cc.Time(p.number()),
			}
			m.Reports = append(m.Reports, r)
		case kindGrant:
			m.Grants = append(m.Grants, Grant{k, cc.Rate(p.number())})
		default:
			p.failed = true
		}
	}
	if p.failed {
		return nil, errMessage
	}
	return m, nil
}

// parser reads values from the front of rest. After a failure all values are zero.
type parser struct {
	rest   []byte
	failed bool
}

// number returns the next number, which is not negative.
func (p *parser) number() int64 {
	v, n := binary.Uvarint(p.rest)
	if p.failed || n <= 0 || v > math.MaxInt64 {
		p.failed = true
		return 0
	}
	p.rest = p.rest[n:]
	return int64(v)
}

// hash returns the next 32 bits.
func (p *parser) hash() uint32 {
	if p.failed = p.failed || len(p.rest) < 4; p.failed {
		return 0
	}
	v := binary.BigEndian.Uint32(p.rest)
	p.rest = p.rest[4:]
	return v
}

// text returns the next name.
func (p *parser) text() string {
	n := p.number()
	if p.failed || n > maxGroup || n > int64(len(p.rest)) {
		p.failed = true
		return ""
	}
	s := string(p.rest[:n])
	p.rest = p.rest[n:]
	return s
}
