package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Transport is what carries a scenario's flows, and what its receivers do.
type Transport uint8

// The transports. What Kernel stands for is Penstock's own congestion control in
// Linux, and Linux's receivers.
const (
	// Relay has no window: the relay above it asks the flow for each grant. Each
	// packet is acknowledged at once.
	Relay Transport = iota
	// Kernel enforces the window, hears of it with each acknowledgement, and
	// measures each packet's round trip. Acknowledgements are delayed by DelayedAck and
	// tell the receiver's time in milliseconds.
	Kernel
	// Native is the algorithm's own, with nothing else below it: it enforces the window
	// and is acknowledged packet by packet, at once.
	Native
)

// DelayedAck is how long Linux delays the acknowledgement of a packet by itself
// (TCP_DELACK_MIN; RFC 9293 §3.8.6.3 has 500 ms at most).
const DelayedAck = 40 * time.Millisecond

// AckAtOnce is the AckDelay of receivers that acknowledge each packet at once,
// whatever the transport is.
const AckAtOnce time.Duration = -1

// NoTimestamps is the Timestamps of receivers that tell no time, whatever the transport is.
const NoTimestamps time.Duration = -1

// datapathTick is how often the datapath looks at what its legs have sent.
const datapathTick = time.Millisecond

// kernelTick is that of the timestamps of Linux (TCP_TS_HZ).
const kernelTick = time.Millisecond

// transportNames are as files and a command line have them.
var transportNames = []string{Relay: "relay", Kernel: "kernel", Native: "native"}

func (t Transport) String() string { return nameOf(transportNames, t, "Transport") }

// ParseTransport reads a transport's name.
func ParseTransport(s string) (Transport, error) {
	return valueOf[Transport](transportNames, s, "no transport %q; use kernel, relay or native")
}

// complete spells out what the scenario leaves open.
func (s Scenario) complete() Scenario {
	s = s.identify()
	s.RawRTT = s.RawRTT || s.Transport != Relay
	if s.Transport == Kernel {
		if s.AckDelay == 0 && s.AckEvery == 0 {
			s.AckDelay = DelayedAck
		}
		if s.Timestamps == 0 {
			s.Timestamps = kernelTick
		}
	}
	s.AckDelay, s.Timestamps = max(0, s.AckDelay), max(0, s.Timestamps)
	return s
}

// pumpHeld is pump within the window and at the pace that the flow named last. As
// in the kernel, what the application has beyond that waits below the flow.
func (s *sender) pumpHeld() {
	for !s.closed && !s.pending() {
		n, next := s.src.available(s.w.now)
		if n == 0 && s.wrote == s.sent {
			s.resumeAt(next)
			break
		}
		s.write(n)
		size := min(s.wrote-s.sent, cc.DefaultMSS)
		if size == 0 || s.board.Pipe+size > s.limit || s.sent+size > s.edge {
			break
		}
		if s.paced > s.w.now {
			s.resumeAt(s.paced)
			break
		}
		s.spend(size)
		s.src.taken += size
		s.extend(size, s.wrote == s.sent+size)
	}
}

// tellOfSent reports what has left with a tick of the datapath, unless an
// acknowledgement has brought a report.
func (s *sender) tellOfSent() {
	if !s.closed && s.sent > s.toldSent {
		s.tell(0)
	}
}

// write gives a transport that holds the window up to n bytes beyond what it has
// sent, as far as the flow allows and the transport's buffer has room.
func (s *sender) write(n cc.Bytes) {
	room := min(n, sendBatch) - (s.wrote - s.sent)
	if b := s.cfg.SendBuffer; b > 0 {
		room = min(room, (b-(s.wrote-s.board.Unacked()))/cc.DefaultMSS*cc.DefaultMSS)
	}
	switch {
	case room <= 0:
	case !s.flow.NeedsGrants():
		s.wrote += room
	default:
		s.wrote += s.flow.Take(s.w.now, room).Bytes
	}
}
