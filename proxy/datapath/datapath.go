// Package datapath defines a leg of a proxied connection that can say what
// became of its bytes. The implementations live below it: kernel TCP today;
// a user-space stack and QUIC fit the same interface.
package datapath

import (
	"net"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// Conn is one leg.
type Conn interface {
	net.Conn
	CloseWrite() error

	// Reset closes the connection so that the peer sees an abort (RST), not an
	// orderly end. What was written before may not arrive.
	Reset() error

	// Observe starts reporting what becomes of the bytes written from now on.
	// exchange is called from the transport's own events, never twice at a
	// time and never after Close has returned. want says which parts of the
	// limit it returns are to be held; the result is what the transport does
	// hold. Without HoldWindow in want, and while nobody observes, the
	// transport's own congestion control decides, as the system has set it.
	// A nil exchange ends it. Nobody may be writing during the call.
	Observe(exchange func(flow.Report) flow.Limit, want Hold) Hold

	// Info says what is in use on this leg and how the transport sees it.
	Info() Info
}

// Hold says which part of a flow.Limit a transport enforces by itself.
type Hold uint8

// What a transport holds. Without HoldWindow the relay asks flow.Take before
// every write.
const (
	HoldRate   Hold = 1 << iota // the pacing rate
	HoldWindow                  // the congestion window

	HoldAll = HoldRate | HoldWindow
)

// Info is a leg as its transport sees it; zero fields are unknown.
type Info struct {
	Tier     string   // "kernel"
	Envelope string   // congestion control of the transport itself: "ebpf" (ours), "bbr", "cubic", …
	Holds    Hold     // what the transport enforces by itself, as Observe settled it
	Missing  []string // what was asked for and could not be had, in words

	Cwnd          cc.Bytes // the transport's own window
	SRTT, MinRTT  time.Duration
	DeliveryRate  cc.Rate
	Unsent        cc.Bytes
	Retransmitted cc.Bytes
	SignalErrors  uint64 // failed reads of the transport's state
	Falls         uint64 // times the transport controlled itself, since nobody answered it
}
