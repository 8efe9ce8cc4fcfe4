package sim

import (
	"math/rand/v2"

	"github.com/penstock-net/penstock/cc"
)

// AQM is how a link's queue is managed.
type AQM uint8

// The ways to manage a queue.
const (
	DropTail AQM = iota
	CoDel        // RFC 8289, with ECN marks in place of drops where a packet allows them
	DualPI2      // RFC 9332: one queue for ECT(1) and CE, one for all else
	PIE          // RFC 8033, with ECN marks
	FQCoDel      // RFC 8290: CoDel for each flow, which take turns
)

// aqmNames are as files and a command line have them.
var aqmNames = []string{DropTail: "droptail", CoDel: "codel", DualPI2: "dualpi2", PIE: "pie", FQCoDel: "fq_codel"}

func (a AQM) String() string { return nameOf(aqmNames, a, "AQM") }

// ParseAQM reads the name of a way to manage a queue.
func ParseAQM(s string) (AQM, error) {
	return valueOf[AQM](aqmNames, s, "no management %q of a queue; use droptail, codel, dualpi2, pie or fq_codel")
}

// aqm is the part of a ManagedLink that decides. Waiting times are the sojourn
// times of RFC 8289: from a packet's arrival until its first byte is sent.
type aqm interface {
	// lane tells in which queue a packet of that flow with that codepoint waits.
	lane(flow uint32, ecn Codepoint) int
	// admit tells what becomes of a packet that is to wait, when it comes.
	admit(now cc.Time, lane int, p waitingPacket, lanes *lanes) judgement
	// settle lets time pass up to now with the lanes as they are.
	settle(now cc.Time, lanes *lanes)
	// pick tells which lane to serve at now; one at least is not empty.
	pick(now cc.Time, lanes *lanes) int
	// judge tells what becomes of a packet that was taken out of a lane at now.
	judge(now cc.Time, lane int, p waitingPacket, lanes *lanes) judgement
}

// passive is an aqm that does nothing. Others embed it for the events that they do not use.
type passive struct{}

func (passive) lane(uint32, Codepoint) int                          { return 0 }
func (passive) admit(cc.Time, int, waitingPacket, *lanes) judgement { return passes }
func (passive) settle(cc.Time, *lanes)                              {}
func (passive) pick(cc.Time, *lanes) int                            { return 0 }
func (passive) judge(cc.Time, int, waitingPacket, *lanes) judgement { return passes }

// newAQM returns how the queue is managed, and in how many lanes.
func newAQM(kind AQM, rng *rand.Rand) (aqm, int) {
	switch kind {
	case DualPI2:
		return &dualPI2{rng: rng}, 2
	case PIE:
		return &pie{rng: rng}, 1
	case FQCoDel:
		return newFQCoDel(), MaxLanes
	}
	return newCoDel(), 1
}

// MaxLanes is how many lanes a ManagedLink has at most (RFC 8290 §4.1.3).
const MaxLanes = 1024

type judgement uint8

const (
	passes  judgement = iota
	signals           // it is marked, or dropped where it does not allow that
	drops
)

// lanes are the queues of a ManagedLink.
type lanes struct {
	each  []lane
	n     int      // packets in all
	total cc.Bytes // in all
}

type lane struct {
	Ring[waitingPacket]
	bytes cc.Bytes
}

func newLanes(n int) lanes { return lanes{each: make([]lane, n)} }

func (l *lanes) push(lane int, p waitingPacket) {
	l.each[lane].Push(p)
	l.each[lane].bytes += p.size
	l.n++
	l.total += p.size
}

func (l *lanes) pop(lane int) waitingPacket {
	p := l.each[lane].Pop()
	l.each[lane].bytes -= p.size
	l.n--
	l.total -= p.size
	return p
}

// waitingPacket is one in a lane.
type waitingPacket struct {
	at     cc.Time // it came
	size   cc.Bytes
	ecn    Codepoint
	marked bool // when it came
}

// waited is how long the first packet of a lane has waited at now, in seconds; 0: there is none.
func (l *lanes) waited(lane int, now cc.Time) float64 {
	if l.each[lane].Len() == 0 {
		return 0
	}
	return now.Sub(l.each[lane].At(0).at).Seconds()
}
