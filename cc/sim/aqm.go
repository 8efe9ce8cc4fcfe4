package sim

import (
	"fmt"

	"github.com/penstock-net/penstock/cc"
)

// AQM is how a link's queue is managed.
type AQM uint8

// The ways to manage a queue.
const (
	DropTail AQM = iota
	CoDel        // RFC 8289, with ECN marks in place of drops where a packet allows them
	DualPI2      // RFC 9332: one queue for ECT(1) and CE, one for all else
)

// aqmNames are as a case file and a command line have them.
var aqmNames = [...]string{DropTail: "droptail", CoDel: "codel", DualPI2: "dualpi2"}

func (a AQM) String() string {
	if int(a) < len(aqmNames) {
		return aqmNames[a]
	}
	return fmt.Sprintf("AQM(%d)", uint8(a))
}

// ParseAQM reads the name of a way to manage a queue.
func ParseAQM(s string) (AQM, error) {
	for a, name := range aqmNames {
		if s == name {
			return AQM(a), nil
		}
	}
	return 0, fmt.Errorf("no management %q of a queue; use droptail, codel or dualpi2", s)
}

// aqm is the part of a ManagedLink that decides. Waiting times are the sojourn
// times of RFC 8289: from a packet's arrival until its first byte is sent.
type aqm interface {
	// lane tells in which queue a packet with that codepoint waits.
	lane(Codepoint) int
	// settle lets time pass up to now with the lanes as they are.
	settle(now cc.Time, lanes *lanes)
	// pick tells which lane to serve at now; one at least is not empty.
	pick(now cc.Time, lanes *lanes) int
	// judge tells what becomes of a packet that was taken out of a lane at now.
	judge(now cc.Time, lane int, p waitingPacket, lanes *lanes) judgement
}

type judgement uint8

const (
	passes  judgement = iota
	signals           // it is marked, or dropped where it does not allow that
	drops
)

// lanes are the queues of a ManagedLink.
type lanes [2]struct {
	ring[waitingPacket]
	bytes cc.Bytes
}

// waitingPacket is one in a lane.
type waitingPacket struct {
	at   cc.Time // it came
	size cc.Bytes
	ecn  Codepoint
}

// waited is how long the first packet of a lane has waited at now; 0: there is none.
func (l *lanes) waited(lane int, now cc.Time) float64 {
	if l[lane].n == 0 {
		return 0
	}
	return now.Sub(l[lane].first().at).Seconds()
}

func (l *lanes) packets() int    { return l[0].n + l[1].n }
func (l *lanes) bytes() cc.Bytes { return l[0].bytes + l[1].bytes }
