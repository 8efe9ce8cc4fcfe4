// Package datapath defines a leg of a proxied connection that reports what became of its bytes.
// The packages below it implement legs over kernel TCP, over TCP in user space, and over QUIC.
//
// Every leg is a Conn. A leg that can do more implements more of these, and the relay asks for
// them:
//
//	interface     what for                                                 legs
//	ReadyReader   an idle connection holds no memory                       kernel, netstack
//	Carriage      bytes pass without a copy                                kernel
//	Receiver,     the peer's sending is held back while its queue grows    kernel; Advertiser: netstack too
//	Advertiser
//	Marker        packets keep their DSCP                                  kernel, netstack
//	Addressed     its addresses are read without an allocation             kernel, netstack
//	KeepAliver    a vanished peer is noticed                               kernel
//
// Package datapathtest checks all that Conn promises of any implementation.
package datapath

import (
	"errors"
	"io"
	"net"
	"net/netip"
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

	// Enforce chooses what the transport enforces by itself of the limits that Apply
	// brings, and returns what it does enforce. Without HoldWindow in want the
	// transport's own congestion control decides, as the system has set it. No write
	// and no observation may be underway. Enforce(0, 0) gives the
	// transport back what it had; so does Observe(nil). shard is that of the leg's
	// group (flow.Manager.Shard). A datapath of several threads has that one report
	// the leg, if it can, so that they do not wait for each other.
	Enforce(want Hold, shard int) Hold

	// Observe starts reporting what becomes of the bytes written from now on. report
	// is called from the transport's own events, never twice at a time, never after
	// Close has returned, and the first time before Observe returns. nil ends it.
	// No write may be underway during the call.
	Observe(report func(flow.Report))

	// Apply has the transport keep to a limit from now on, as far as Enforce said
	// that it does. It may be called from any goroutine at any time, also during a
	// report and with locks held: it neither blocks nor calls back. The newest limit
	// is in force within 2 ms.
	Apply(flow.Limit)

	// Info says what is in use on this leg and how the transport sees it.
	Info() Info

	// Undelivered returns how many of the bytes written the peer has not
	// acknowledged and still may; the end of the stream counts as one. Reset throws them away.
	Undelivered() (cc.Bytes, error)

	// Aborted reports whether the peer, or a timeout, has torn the connection down. Read cannot say so once a write
	// has returned the error: it then returns io.EOF, as after the peer's orderly end. Aborted is meaningful until
	// CloseWrite.
	Aborted() bool

	// InProcess reports whether the transport runs in this process. Then what it has not delivered when the process
	// ends is lost, also after Close.
	InProcess() bool
}

// Hold says which part of a flow.Limit a transport enforces by itself.
type Hold uint8

// What a transport enforces. Without HoldWindow the relay asks flow.Take before
// every write.
const (
	HoldRate   Hold = 1 << iota // the pacing rate
	HoldWindow                  // the congestion window

	HoldAll = HoldRate | HoldWindow
)

// Info is a leg as its transport sees it; zero fields are unknown.
type Info struct {
	Tier     string   // "kernel", "netstack" or "quic"
	Envelope string   // congestion control of the transport itself: "ebpf" (ours), "bbr", "cubic", …
	Holds    Hold     // what the transport enforces by itself, as Enforce returned it
	Missing  []string // what was asked for and could not be had, in words

	Cwnd          cc.Bytes // the transport's own window
	SRTT, MinRTT  time.Duration
	DeliveryRate  cc.Rate
	Delivered     cc.Bytes // bytes that the peer has acknowledged so far
	Unsent        cc.Bytes
	Retransmitted cc.Bytes
	Retransmits   uint32 // segments sent again, where the kernel's TCP counts them
	SignalErrors  uint64 // failed reads of the transport's state
	Fallbacks     uint64 // fallbacks: times the transport controlled itself, since the process did not answer it
}

// Addressed is implemented by legs that know their addresses without an allocation.
type Addressed interface {
	// LocalAddrPort is LocalAddr; invalid: the address is not known.
	LocalAddrPort() netip.AddrPort
	// RemoteAddrPort is RemoteAddr.
	RemoteAddrPort() netip.AddrPort
}

// LocalOf returns a connection's LocalAddr as PlainAddr has it.
func LocalOf(conn net.Conn) netip.AddrPort {
	if a, ok := conn.(Addressed); ok {
		return PlainAddr(a.LocalAddrPort())
	}
	return AddrPortOf(conn.LocalAddr())
}

// RemoteOf returns a connection's RemoteAddr as PlainAddr has it.
func RemoteOf(conn net.Conn) netip.AddrPort {
	if a, ok := conn.(Addressed); ok {
		return PlainAddr(a.RemoteAddrPort())
	}
	return AddrPortOf(conn.RemoteAddr())
}

// AddrPortOf returns an address of TCP as PlainAddr has it; invalid: it is another.
func AddrPortOf(addr net.Addr) netip.AddrPort {
	if tcp, ok := addr.(*net.TCPAddr); ok && tcp != nil {
		return PlainAddr(tcp.AddrPort())
	}
	return netip.AddrPort{}
}

// OpError wraps the error of an operation on a connection as package net does. nil, ErrWait and the end of the stream
// stay as they are.
func OpError(conn interface {
	LocalAddr() net.Addr
	RemoteAddr() net.Addr
}, op, network string, err error,
) error {
	if err == nil || err == io.EOF || errors.Is(err, ErrWait) { //nolint:errorlint // io.EOF is compared as callers do
		return err
	}
	return &net.OpError{Op: op, Net: network, Source: conn.LocalAddr(), Addr: conn.RemoteAddr(), Err: err}
}

// PlainAddr returns an address as packets have it: IPv4 out of IPv6, and without a zone. netip.Prefix.Contains is
// false of other forms.
func PlainAddr(at netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(at.Addr().Unmap().WithZone(""), at.Port())
}
