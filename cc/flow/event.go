package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Kind is what an Event tells of.
type Kind string

// The kinds of events an algorithm sees.
const (
	KindAck  Kind = "ack"
	KindLoss Kind = "loss"
	KindTick Kind = "tick"
)

// Event is one thing an algorithm was told, and what it answered.
type Event struct {
	Kind      Kind
	Flow      uint64 // 0: the whole group
	Group     string
	Algorithm string
	State     cc.State
	RTT       time.Duration // the acknowledgement's sample; 0: none
	Reverse   time.Duration // of it, the queue on the way back; 0: none, or not known
	Bytes     cc.Bytes      // newly acknowledged or lost
	Control   cc.Control
	Internals cc.Internals // in the order of the algorithm's Spec; all 0 for one that shows none
}
