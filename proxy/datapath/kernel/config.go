// Package kernel is the datapath over the kernel's own TCP. Where it may, it has
// the kernel hold the windows by a congestion control of our own (package bpf);
// otherwise, without privilege, it reads TCP_INFO of all busy connections on one
// shared tick and leaves the window to the relay. It decides nothing and never
// waits for a connection.
package kernel

import (
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Tier names this datapath in datapath.Info.
const Tier = "kernel"

// Tick is the period of the shared tick.
const Tick = time.Millisecond

// DefaultPollsPerTick bounds what polling can cost: at 1 to 2 µs a poll with its
// report, half a core however many flows there are. With more busy flows than
// that, each is polled every ⌈flows/256⌉ ms: 10,000 of them every 40 ms.
const DefaultPollsPerTick = 256

// DefaultCells is how many windows the kernel holds at a time, in 3 MiB.
const DefaultCells = 16 << 10

// DefaultKeepAlive finds a vanished peer in four minutes, and its first probe
// comes late enough not to hold a phone's radio awake.
var DefaultKeepAlive = net.KeepAliveConfig{
	Enable:   true,
	Idle:     2 * time.Minute,
	Interval: 30 * time.Second,
	Count:    4,
}

// Config is what a Datapath starts from.
type Config struct {
	Clock func() cc.Time // required; monotonic

	// OnTick is called on every tick and says when it wants the next call, for
	// which an otherwise idle datapath wakes up; cc.Never: after Wake only.
	OnTick func(now cc.Time) cc.Time

	// Envelope is the kernel's congestion control under our window. EBPF is
	// ours, which holds the window itself; New fails where it cannot be had.
	// Empty: EBPF, else bbr, since the others shrink below our window at the
	// first losses, else cubic.
	Envelope string

	Cells int // legs whose window EBPF holds at a time; 0: DefaultCells

	// ReceiveBuffer bounds what a new socket takes in before it is read; see
	// Conn.LimitReceive. 0: as the kernel likes.
	ReceiveBuffer cc.Bytes

	KeepAlive    net.KeepAliveConfig // zero: DefaultKeepAlive; Enable false with anything else set: off
	PollsPerTick int                 // 0: DefaultPollsPerTick
	Pipes        int                 // pipes in use for splicing at most; 0: 128
	Log          *slog.Logger        // nil: silent
}

// DialConfig says where a leg goes and as whom.
type DialConfig struct {
	Target netip.AddrPort // used when valid
	Host   string         // "name:port", resolved, otherwise

	// Source is the address to dial from, with port 0 for any. One that is not
	// this host's own, such as the client's, needs CAP_NET_ADMIN.
	Source netip.AddrPort

	Mark    uint32                     // SO_MARK, for routing and the loop guard; 0: none. Needs CAP_NET_ADMIN
	Hops    uint8                      // routers that its packets may pass; 0: the system's default
	Guard   func(netip.AddrPort) error // may refuse each address, after resolution; nil: all are fine
	Timeout time.Duration              // for resolution and handshake; 0: the context's alone
}
