// Package kernel is the datapath over the kernel's own TCP. It makes legs, counts what is underway on them, reports
// that, and applies limits. It decides nothing and never waits for a connection.
//
// # Two tiers
//
// Where it may, it has the kernel enforce the window of a leg by our own congestion control (package bpf). Otherwise
// the relay enforces it: it asks for permission before each write. Enforce returns the tier that a leg has. Comments
// call the one an enforced leg, and the other a polled leg.
//
//	                  kernel enforces the window             relay enforces the window
//	needs             Linux 6.10, CAP_BPF and CAP_PERFMON    Linux 5.4, no privilege
//	signals           each acknowledgement, summed up in a   TCP_INFO, one system call each millisecond
//	                  cell of memory shared with the kernel
//	way back          by the peer's timestamps               by them, with CAP_NET_RAW at the start; else unknown
//	window            eBPF, packet by packet                 the relay, within bbr's, cubic's or reno's window
//	pacing            the kernel, packet by packet           the relay; SO_MAX_PACING_RATE spreads what it writes
//	a new limit       is written into the cell at once       is the relay's; socket options follow with the next tick
//	a tick            visits the cells that have news        polls every busy leg
//	process is silent the kernel falls back to Reno, no      what the relay has written drains
//	                  faster than the last rate
//
// # Ticks
//
// The legs are divided into up to eight shards. Each has a tick on a thread of its own, which reads a timerfd. A
// goroutine would wait behind those that move bytes, and a socket that is not answered for four round trips, at
// least 100 ms, falls back to Reno.
//
//	legs of a shard                              the tick comes every
//	some make progress                           1 ms
//	all that move fill no window ("bulk")        4 ms
//	none has made progress for t                 t/64, 1 ms to 64 ms
//	none has bytes unsent or unacknowledged      does not come, unless Config.OnTick asks for it
//
// # How a leg ends
//
// CloseWrite sends a FIN after what was written. Close lets the kernel deliver what is underway; the window is then
// Reno's. Reset drops it and sends a RST. Until one of them is called a socket lingers for 0 s, so that the death of
// this process resets its connections: a cut stream must not look complete.
//
// # Reading order
//
// Calls point down this list: accept, dial, datapath (start and end, tiers), splice (the carrier between two legs),
// conn (a leg), shard (the tick), sender and receiver (the two directions of a leg), limits, enforcer, report (what
// the kernel counts), peerclock (timestamps off packet sockets), memory, socket and sockopt (system calls).
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

// Tier is the name of this datapath in datapath.Info.
const Tier = "kernel"

// EBPF is the envelope that enforces our window and pacing rate by itself.
const EBPF = "ebpf"

// ErrNoPort is the error of a dial for which this host has no local port left.
var ErrNoPort = errors.New("no local port is left, for one that was used is kept for a minute: widen " +
	"net.ipv4.ip_local_port_range, or set net.ipv4.tcp_tw_reuse to 1")

// ErrNearReset is the error of a dial if DialConfig.Near was reset before the dial ended.
var ErrNearReset = errors.New("the leg that this one was for has been reset")

// Tick is the period of a shard's tick while there is progress.
const Tick = time.Millisecond

// pollsPerTick bounds what polling can cost. A poll with its report takes 1 to 2 µs, so a shard takes half a
// processor at most. A shard with more busy legs polls each every ⌈legs/256⌉ ms.
const pollsPerTick = 256

// defaultCells is the default of Config.Cells. They take 3 MiB.
const defaultCells = 16 << 10

// Config is what New starts a Datapath from.
type Config struct {
	Clock func() cc.Time // monotonic; required

	// BeforeTick is called before a tick of a shard looks at its legs, and OnTick after it has; nil: not called.
	BeforeTick func()

	// OnTick is called at every tick of a shard. It returns when it wants the next call for this shard, and an idle
	// shard wakes up for it; cc.Never: after Wake only. Shards call it at the same time. nil: not called.
	OnTick func(shard int, now cc.Time) cc.Time

	// Shards is the number of parts of the legs, each with a tick and a thread of its own; 0: half of Go's processors.
	// There are at most 8, and with EBPF at most ⌈Cells/64⌉.
	Shards int

	// Envelope is the kernel's congestion control below our window. New fails if EBPF is asked for and cannot be
	// had. Empty: EBPF, else bbr, else cubic. The others shrink below our window at the first losses.
	Envelope string

	Cells int // legs that EBPF enforces at a time; 0: 16,384

	// ReceiveBuffer has Conn.LimitReceive bound receive buffers; 0: LimitReceive does nothing. Its size is not used.
	ReceiveBuffer cc.Bytes

	Pipes    int          // pipes in use for splicing at most; 0: 128
	Attempts int          // of all dials, attempts at further addresses of a name at a time; 0: one follows another
	Lookups  int          // of all dials, lookups of a name for one address family at a time; 0: unbounded
	Log      *slog.Logger // nil: silent

	Resolver happyeyeballs.Resolver // nil: the system's
}

// DialConfig says where a leg goes and which address it comes from.
type DialConfig struct {
	Target netip.AddrPort // used if valid
	Host   string         // "name:port" to resolve, used otherwise

	// Source is the address to dial from; port 0: any port. An address that is not this host's, such as the
	// client's, needs CAP_NET_ADMIN. The zero value: the kernel chooses.
	Source netip.AddrPort

	Mark uint32 // SO_MARK, for routing and against loops; 0: none. Needs CAP_NET_ADMIN
	Hops uint8  // hop limit of its packets; 0: the system's default
	// DSCP returns the mark of packets towards an address, and whether Conn.ReceivedDSCP is to know the mark of the
	// server's packets. It is called before an address is tried; nil: no mark, and nothing is known.
	DSCP func(netip.AddrPort) (dscp uint8, keep bool)
	// Near is the leg that the new one will be relayed with; nil: none. The same loop serves both. A reset of Near
	// ends the dial, unless bytes of Near wait to be read.
	Near    datapath.Conn
	Guard   func(netip.AddrPort) error // may refuse an address, after resolution; nil: all may be dialled
	Timeout time.Duration              // for resolution and handshake; 0: unbounded
}
