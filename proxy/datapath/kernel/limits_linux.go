package kernel

import (
	"math"
	"math/bits"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
)

// What the kernel may park unsent on an observed socket (TCP_NOTSENT_LOWAT):
// half a window. It wakes a writer when half of that is left, a quarter of a
// round trip's worth, which covers the writer's way to the socket; more would
// only be a queue that nobody sees. It bounds no window: sent bytes do not count.
const (
	leastUnsent = 32 << 10
	mostUnsent  = 1 << 20 // 8 ms at 1 Gbit/s, far more than a wakeup takes
)

// unlimited is SO_MAX_PACING_RATE's "not limited".
const unlimited = math.MaxUint64

// systemUnsent has the system's setting (net.ipv4.tcp_notsent_lowat) be in force.
const systemUnsent = 0

// limits keeps what a socket was last told, since telling it costs a system call.
type limits struct {
	rate   cc.Rate // 0: unlimited, as the socket was born
	unsent int     // 0: not set yet

	toldRate, toldUnsent bool // what control shall tell
	errors               uint64
	control              func(fd uintptr) // tell, made once
}

// apply has the socket pace at rate, 0: as it likes, and park no more than unsent
// bytes. It returns how many options the socket refused.
func (l *limits) apply(raw syscall.RawConn, rate cc.Rate, unsent int) (refused uint64) {
	rate = max(0, rate)
	newRate, newUnsent := rateMoved(l.rate, rate), unsentMoved(l.unsent, unsent)
	if !newRate && !newUnsent {
		return 0
	}
	if newRate {
		l.rate = rate
	}
	if newUnsent {
		l.unsent = unsent
	}
	l.toldRate, l.toldUnsent, l.errors = newRate, newUnsent, 0
	if l.control == nil {
		l.control = l.tell
	}
	if raw.Control(l.control) != nil {
		return 1
	}
	return l.errors
}

// lift gives a socket back what it was born with.
func (l *limits) lift(raw syscall.RawConn) (refused uint64) {
	refused = l.apply(raw, 0, systemUnsent)
	l.unsent = 0
	return refused
}

func (l *limits) tell(fd uintptr) {
	if l.toldRate && unix.SetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, pacingOption(l.rate)) != nil {
		l.errors++
	}
	if l.toldUnsent && unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, l.unsent) != nil {
		l.errors++
	}
}

// rateMoved says whether a pacing rate is more than 2 % off what was told:
// less than that the kernel's own pacing does not hold.
func rateMoved(told, rate cc.Rate) bool {
	if told == 0 || rate == 0 {
		return told != rate
	}
	return max(told, rate)-min(told, rate) > told/50
}

// pacingOption is SO_MAX_PACING_RATE for a rate: bytes per second, and a 32-bit
// kernel takes no more than 32 bits of it.
func pacingOption(rate cc.Rate) uint64 {
	if rate == 0 {
		return unlimited
	}
	perSecond := uint64(max(1, rate/8))
	if bits.UintSize == 32 {
		perSecond = min(perSecond, math.MaxUint32-1)
	}
	return perSecond
}

func unsentFor(cwnd cc.Bytes) int { return int(min(max(leastUnsent, cwnd/2), mostUnsent)) }

// unsentMoved says whether the window has outgrown what was told, or shrunk to
// less than half of it.
func unsentMoved(told, unsent int) bool {
	return told == 0 || unsent > told+told/2 || unsent < told/2
}
