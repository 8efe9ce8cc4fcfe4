//go:build linux

package e2e

import (
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Sending is one direction of one TCP connection as the sender's device saw it:
// data going out, acknowledgements coming in. Only what the wire shows is known;
// what the sender believed in between is not.
type Sending struct {
	MSS   cc.Bytes // the largest payload of a packet
	Steps []Step   // one for each packet with data and each acknowledgement
}

// Step is one packet, and what was in flight once it had passed.
type Step struct {
	At       time.Duration
	Payload  cc.Bytes // sent; 0: an acknowledgement
	Size     cc.Bytes // of the IP packet
	Again    bool     // some of the payload had been sent before
	Acked    cc.Bytes // acknowledged so far, from the first packet of the record on, holes excluded
	Inflight cc.Bytes // highest sent − acknowledged − SACKed
	// Pipe is RFC 6675's (§4): of the bytes in flight those not lost, by
	// DupThresh blocks or more than DupThresh−1 segments SACKed above them, and
	// those sent again once more. What only a timer tells to be lost stays in.
	Pipe cc.Bytes
}

// dupThresh is how many SACKed segments above a byte tell that it is lost
// (RFC 6675 §2).
const dupThresh = 3

// SendingTo picks what the node sent to remote out of a record; local without an
// address or without a port is that of the first packet that carries data.
func SendingTo(packets []Packet, local, remote netip.AddrPort) Sending {
	board := scoreboard{}
	var s Sending
	for i := range packets {
		p := &packets[i]
		if p.Out && p.Dst == remote && p.Payload > 0 && (!local.IsValid() || local.Port() == 0) {
			local = p.Src
		}
		if p.Out && p.Src == local && p.Dst == remote {
			s.MSS = max(s.MSS, p.Payload)
		}
	}
	board.mss = int64(s.MSS)
	for i := range packets {
		p := &packets[i]
		step := Step{At: p.At, Size: p.Size}
		switch {
		case p.Out && p.Src == local && p.Dst == remote && p.Payload > 0:
			step.Payload = p.Payload
			step.Again = board.send(p)
		case !p.Out && p.Src == remote && p.Dst == local && p.Acks && board.started:
			board.acknowledge(p)
		default:
			continue
		}
		step.Acked = cc.Bytes(board.una)
		step.Inflight, step.Pipe = board.inflight(), board.pipe()
		s.Steps = append(s.Steps, step)
	}
	return s
}

// scoreboard follows a stream; offsets count from the first byte that was seen
// to leave.
type scoreboard struct {
	started       bool
	base          uint32 // sequence number of offset 0
	mss, una, nxt int64
	sacked, again spans // above una
}

// offset is where a sequence number lies, being within 2 GiB of what was sent last.
func (b *scoreboard) offset(seq uint32) int64 {
	return b.nxt + int64(int32(seq-b.base-uint32(b.nxt)))
}

// send notes a packet with data, and reports whether it was sent before.
func (b *scoreboard) send(p *Packet) (again bool) {
	if !b.started {
		b.started, b.base = true, p.Seq
	}
	lo := b.offset(p.Seq)
	hi := lo + int64(p.Payload)
	if again = lo < b.nxt; again {
		b.again.add(span{max(lo, b.una), min(hi, b.nxt)})
	}
	b.nxt = max(b.nxt, hi)
	return again
}

func (b *scoreboard) acknowledge(p *Packet) {
	b.una = max(b.una, min(b.offset(p.Ack), b.nxt)) // a FIN takes a number and is no byte
	for _, s := range p.SACK {
		b.sacked.add(span{max(b.offset(s.Left), b.una), min(b.offset(s.Right), b.nxt)})
	}
	b.sacked.trim(b.una)
	b.again.trim(b.una)
}

func (b *scoreboard) inflight() cc.Bytes { return cc.Bytes(b.nxt - b.una - b.sacked.size()) }

func (b *scoreboard) pipe() cc.Bytes {
	hole := span{b.una, b.nxt} // what lies between two SACKed runs, from above
	pipe, above := int64(0), int64(0)
	for i := len(b.sacked) - 1; i >= -1; i-- {
		hole.lo = b.una
		if i >= 0 {
			hole.lo = b.sacked[i].hi
		}
		lost := len(b.sacked)-1-i >= dupThresh || above > (dupThresh-1)*b.mss
		if !lost {
			pipe += hole.hi - hole.lo
		}
		pipe += b.again.within(hole)
		if i >= 0 {
			above += b.sacked[i].hi - b.sacked[i].lo
			hole.hi = b.sacked[i].lo
		}
	}
	return cc.Bytes(pipe)
}

// Between is what happened from one moment up to another, the later excluded.
func (s Sending) Between(from, to time.Duration) Sending {
	at := func(t time.Duration) int {
		i, _ := slices.BinarySearchFunc(s.Steps, t, func(p Step, t time.Duration) int { return int(p.At - t) })
		return i
	}
	lo, hi := at(from), at(to)
	return Sending{MSS: s.MSS, Steps: s.Steps[lo:max(lo, hi)]}
}

// First is when data left for the first time; false: never.
func (s Sending) First() (time.Duration, bool) {
	i := slices.IndexFunc(s.Steps, func(p Step) bool { return p.Payload > 0 })
	if i < 0 {
		return 0, false
	}
	return s.Steps[i].At, true
}

// Again returns the packets that had been sent before.
func (s Sending) Again() []Step {
	var again []Step
	for _, p := range s.Steps {
		if p.Again {
			again = append(again, p)
		}
	}
	return again
}

// Gap is the time between two packets with data that left one after the other.
type Gap struct {
	At            time.Duration // of the second
	Length        time.Duration
	Payload, Size cc.Bytes // of the first: what a pacer waits for
}

// Gaps returns the times between consecutive packets with data.
func (s Sending) Gaps() []Gap {
	var gaps []Gap
	var last *Step
	for i := range s.Steps {
		p := &s.Steps[i]
		if p.Payload == 0 {
			continue
		}
		if last != nil {
			gaps = append(gaps, Gap{At: p.At, Length: p.At - last.At, Payload: last.Payload, Size: last.Size})
		}
		last = p
	}
	return gaps
}

// Against is the gap as a multiple of the one that a rate asks for after n bytes:
// Payload where the rate counts what is delivered, Size where it counts what is
// on the wire. Without a rate it is 0.
func (g Gap) Against(rate cc.Rate, n cc.Bytes) float64 {
	if rate <= 0 || n <= 0 {
		return 0
	}
	return g.Length.Seconds() * float64(rate) / (8 * float64(n))
}

// Level is a quantity of bytes over time.
type Level struct {
	P50, P95 cc.Bytes // by the time it lasted: below or at it for half of the time, for 19 of 20 parts
	Max      cc.Bytes
}

// Levels summarises what was in flight from the first step to the last.
func (s Sending) Levels() (inflight, pipe Level) {
	return level(s.Steps, func(p Step) cc.Bytes { return p.Inflight }), level(s.Steps, func(p Step) cc.Bytes { return p.Pipe })
}

func level(steps []Step, of func(Step) cc.Bytes) (l Level) {
	type lasted struct {
		bytes cc.Bytes
		time  time.Duration
	}
	var all []lasted
	var total time.Duration
	for i, p := range steps {
		l.Max = max(l.Max, of(p))
		if i+1 < len(steps) {
			d := steps[i+1].At - p.At
			all = append(all, lasted{of(p), d})
			total += d
		}
	}
	slices.SortFunc(all, func(a, b lasted) int { return int(a.bytes - b.bytes) })
	rank := func(share float64) cc.Bytes {
		until := time.Duration(math.Ceil(share * float64(total)))
		for _, a := range all {
			if until -= a.time; until <= 0 {
				return a.bytes
			}
		}
		return l.Max
	}
	l.P50, l.P95 = rank(0.50), rank(0.95)
	return l
}
