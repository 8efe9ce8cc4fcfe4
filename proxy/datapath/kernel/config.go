// Package kernel is the datapath over the kernel's own TCP. Where it may, it has the
// kernel enforce the windows by a congestion control of our own (package bpf).
// Otherwise, without privilege, it polls TCP_INFO of the busy connections, and the
// relay keeps the windows. It decides nothing and never waits for a connection.
package kernel

import (
	"errors"
	"log/slog"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/happyeyeballs"
)

// Tier names this datapath in datapath.Info.
const Tier = "kernel"

// ErrNoPort is the error of a dial for which this host has no local port left.
var ErrNoPort = errors.New("no local port is left, for one that was used is kept for a minute: widen " +
	"net.ipv4.ip_local_port_range, or set net.ipv4.tcp_tw_reuse to 1")

// ErrNearReset is the error of a dial whose Near was reset meanwhile.
var ErrNearReset = errors.New("the leg that this one was for has been reset")

// Tick is the period of a shared tick while there is progress.
const Tick = time.Millisecond

// defaultPollsPerTick bounds what polling can cost: at 1 to 2 µs a poll with its
// report, half a core for each shard however many flows there are. With more busy
// flows than that in a shard, each is polled every ⌈flows/256⌉ ms.
const defaultPollsPerTick = 256

// defaultCells is how many windows the kernel enforces at a time, in 3 MiB.
const defaultCells = 16 << 10

// A vanished peer is found in four minutes, and the first probe comes late enough not to
// hold a phone's radio awake.
const (
	keepAliveIdle     = 2 * time.Minute
	keepAliveInterval = 30 * time.Second
	keepAliveCount    = 4
)

// Config is what a Datapath starts from.
type Config struct {
	Clock func() cc.Time // required; monotonic

	// BeforeTick is called before a tick of a shard looks at its legs; nil: nobody is. OnTick follows.
	BeforeTick func()

	// OnTick is called on every tick of a shard and says when it wants the next call
	// for it, for which an otherwise idle shard wakes up; cc.Never: after Wake only.
	// Shards call it at the same time.
	OnTick func(shard int, now cc.Time) cc.Time

	// Shards is into how many parts the legs are divided, each with a tick and a
	// thread of its own; 0: half of GOMAXPROCS. It is at most 8, and, with EBPF, ⌈Cells/64⌉.
	Shards int

	// Envelope is the kernel's congestion control under our window. EBPF is ours,
	// which enforces the window itself; New fails where it cannot be had. Empty: EBPF,
	// else bbr, since the others shrink below our window at the first losses, else
	// cubic.
	Envelope string

	Cells int // legs whose window EBPF enforces at a time; 0: 16,384

	// ReceiveBuffer has Conn.LimitReceive bound receive buffers; 0: it does nothing.
	ReceiveBuffer cc.Bytes

	PollsPerTick int          // of each shard; 0: 256
	Pipes        int          // pipes in use for splicing at most; 0: 128
	Attempts     int          // beside others towards addresses of the same names, of all dials; 0: one follows another
	Lookups      int          // of names, for one family each, of all dials; 0: no bound
	Log          *slog.Logger // nil: silent

	Resolver happyeyeballs.Resolver // nil: the system's
}

// DialConfig says where a leg goes and as whom.
type DialConfig struct {
	Target netip.AddrPort // used when valid
	Host   string         // "name:port", resolved, otherwise

	// Source is the address to dial from, with port 0 for any. One that is not
	// this host's own, such as the client's, needs CAP_NET_ADMIN.
	Source netip.AddrPort

	Mark uint32 // SO_MARK, for routing and the loop guard; 0: none. Needs CAP_NET_ADMIN
	Hops uint8  // routers that its packets may pass; 0: the system's default
	// DSCP returns what the packets towards an address are marked with, and whether the mark of those that the server
	// sends is kept for Conn.ReceivedDSCP. It is called before the address is tried; nil: neither.
	DSCP func(netip.AddrPort) (dscp uint8, keep bool)
	// Near is the leg that it belongs to; nil: there is none. One loop serves both, and a reset of Near ends
	// the dial unless bytes of Near's wait to be read.
	Near    datapath.Conn
	Guard   func(netip.AddrPort) error // may refuse each address, after resolution; nil: all are fine
	Timeout time.Duration              // for resolution and handshake; 0: as long as it takes
}
