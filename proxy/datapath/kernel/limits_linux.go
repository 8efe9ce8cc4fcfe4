package kernel

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

// limits is the limit of a leg, and what the socket has of it. What the kernel
// enforces goes into the leg's cell at once; what needs a system call waits for
// settle.
type limits struct {
	optionsDue atomic.Bool // settle has something to do

	mu             sync.Mutex // a leaf: nothing else is locked under it
	enforcing      bool       // there is something to keep
	relayPaces     bool       // the relay keeps the rate, and the socket spreads what it lets out
	cell           *bpf.Cell  // nil: the kernel does not enforce the window
	limit          flow.Limit // the one applied last
	lowered        cc.Time    // when the window was lowered last
	prev           prevWindow // what was in force until then
	reportUnderway bool       // a report is underway; settle comes after it
	paced          cc.Rate    // of the socket; 0: unlimited, as it was born
	lowat          int        // TCP_NOTSENT_LOWAT of the socket; 0: the system's

	// Of a leg whose window the kernel enforces.
	mss           cc.Bytes
	srtt          time.Duration
	windowBlocked bool     // as last reported, bytes wait for the window
	inForce       cc.Bytes // the window that the socket has used already, at least
	sendNow       bool     // what it lets out is not to wait for an acknowledgement
}

// wider is a window that was in force when the socket had taken so many bytes; larger
// than what is in force now.
type prevWindow struct {
	window   cc.Bytes // 0: there was none
	accepted int64
}

// beginKeeping has limits kept from now on, of which the kernel holds some; cell is that of a leg whose
// window it enforces.
func (l *limits) beginEnforcing(cell *bpf.Cell, holds datapath.Hold) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.enforcing, l.cell, l.relayPaces = true, cell, holds&datapath.HoldRate == 0
}

// stopKeeping has no limit kept any more, and tells whether one was. There may be no limits.
func (l *limits) stopEnforcing() (kept bool) {
	if l == nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	kept = l.enforcing
	l.enforcing, l.cell, l.limit, l.prev, l.paced, l.lowat = false, nil, flow.Limit{}, prevWindow{}, 0, 0
	l.mss, l.srtt, l.windowBlocked, l.inForce, l.sendNow, l.reportUnderway = 0, 0, false, 0, false, false
	l.optionsDue.Store(false)
	return kept
}

// Apply implements datapath.Conn.
func (c *Conn) Apply(limit flow.Limit) {
	l := c.limits.Load()
	if l != nil && l.applyLimit(limit, c.dp.clock, &c.accepted) && c.onTick.Load() && c.inSettleList.CompareAndSwap(false, true) {
		c.shard.enqueueForOptions(c)
	} // an idle leg settles before it writes
}

// applyLimit puts into force what needs no system call. unsettled: settle has to do the
// rest, and no report is underway after which it will.
func (l *limits) applyLimit(limit flow.Limit, clock func() cc.Time, taken *atomic.Int64) (unsettled bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.enforcing || limit == l.limit {
		return false
	}
	l.sendNow, limit.Now = l.sendNow || limit.Now, false
	if l.cell != nil {
		l.cell.Apply(uint32(min(max(1, limit.Cwnd), math.MaxInt32)), perSecond(limit.PacingRate))
	}
	if limit.Cwnd < l.limit.Cwnd {
		l.prev = prevWindow{max(l.prev.window, l.limit.Cwnd), taken.Load()}
		l.lowered = clock()
		l.inForce = min(l.inForce, limit.Cwnd)
	}
	l.limit = limit
	if l.reportUnderway || !l.hasOptionChanges() {
		return false
	}
	l.optionsDue.Store(true)
	return true
}

// limitSince returns the limit, and what wider window has been in force since reading, when
// the socket said where it stands.
func (l *limits) limitSince(reading cc.Time) (flow.Limit, prevWindow) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if reading > l.lowered {
		l.prev = prevWindow{}
	}
	return l.limit, l.prev
}

// cwnd is the congestion window of the limit.
func (l *limits) cwnd() cc.Bytes {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.limit.Cwnd
}

// pacingRate is the pacing rate of the limit; 0: there is none.
func (l *limits) pacingRate() cc.Rate {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.limit.PacingRate
}

// mostUnsent is what may wait unsent in the socket; 0: as much as the system lets. There may be no limits.
func (l *limits) maxUnsent() int {
	if l == nil {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lowat
}

// noteReport notes that a report is underway.
func (l *limits) noteReport() {
	l.mu.Lock()
	l.reportUnderway = true
	l.mu.Unlock()
}

// noteReading notes what a report says of a leg whose window the kernel enforces. fresh:
// s has not been reported before.
func (l *limits) noteReading(r *flow.Report, s *bpf.Seen, fresh bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mss, l.srtt = r.MSS, time.Duration(s.SrttUs)*time.Microsecond
	if fresh {
		l.inForce = min(cc.Bytes(s.Cwnd)*r.MSS, l.limit.Cwnd)
	}
	// What waits for the pacing rate leaves by the kernel's timer. The kernel may keep
	// the last third of a window for later.
	filled := r.Pipe+r.MSS >= l.inForce*2/3
	l.windowBlocked = filled && r.Unsent > 0 && !r.RwndFull && s.InFallback == 0
}

// wantsSend tells whether bytes wait that the kernel is to send now: it takes up a larger
// window by itself only when it next sends or hears from its peer.
func (l *limits) wantsSend() bool {
	return l.sendNow && l.windowBlocked && l.limit.Cwnd >= l.inForce+l.mss
}

// Where the relay keeps the pacing rate, the socket's own rate is spreading times as high: it only
// spreads what the relay writes at once. A socket with the same rate would hold bytes back, because
// the kernel applies a higher rate with the next acknowledgement. Such bytes look as if the
// kernel's window were full, and then our window would not grow.
const pacingHeadroom = 2

// socketOptions returns the pacing rate and TCP_NOTSENT_LOWAT that the socket is to have.
func (l *limits) socketOptions() (rate cc.Rate, unsent int) {
	if l.cell != nil {
		return 0, unsentBelow(l.limit, l.srtt, l.mss)
	}
	rate = max(0, l.limit.PacingRate)
	if l.relayPaces {
		rate *= pacingHeadroom
	}
	return rate, unsentFor(l.limit.Cwnd)
}

// needsSettling tells whether settle has anything to do.
func (l *limits) hasOptionChanges() bool {
	rate, unsent := l.socketOptions()
	return rateMoved(l.paced, rate) || unsentMoved(l.lowat, unsent) || l.wantsSend()
}

// setChangedOptions sets the socket options that the newest limit has changed, and reports whether that may
// have made the socket send. c.mu is held.
func (c *Conn) setChangedOptions() (sent bool) {
	l := c.limits.Load()
	l.mu.Lock()
	l.reportUnderway = false
	l.optionsDue.Store(false)
	if !l.enforcing || l.limit == (flow.Limit{}) {
		l.mu.Unlock()
		return false
	}
	rate, unsent := l.socketOptions()
	do := sockopts{rate: unchanged, unsent: unchanged, send: l.wantsSend()}
	if rateMoved(l.paced, rate) {
		l.paced, do.rate = rate, int64(rate)
	}
	if unsentMoved(l.lowat, unsent) {
		l.lowat, do.unsent = unsent, int64(unsent)
	}
	if do.send {
		l.inForce = l.limit.Cwnd
	}
	l.sendNow = false
	cell := l.cell
	l.mu.Unlock()

	if cell != nil {
		c.roomStep.Store(int64(unsent))
	}
	c.errors += do.setOptions(c.raw)
	if do.send {
		cell.Mark() // more has left than was reported
	}
	return do.send
}

// sockopts are options to be set in one visit to a socket.
type sockopts struct {
	rate, unsent int64 // unchanged: left as it is
	send         bool  // the kernel is to try to send what waits
}

// born are the options that a socket has before any is set.
var defaultSockopts = sockopts{unsent: systemUnsent}

const unchanged = -1

// setOptions returns how many options the socket refused.
func (o sockopts) setOptions(raw *eventloop.Socket) (refused uint64) {
	if o.rate == unchanged && o.unsent == unchanged && !o.send {
		return 0
	}
	if raw.Control(func(fd uintptr) { refused = o.applyToFD(fd) }) != nil {
		return 1
	}
	return refused
}

func (o sockopts) applyToFD(fd uintptr) (refused uint64) {
	if o.rate != unchanged {
		value := pacingOption(cc.Rate(o.rate))
		refused += setOption(fd, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, unsafe.Pointer(&value), unsafe.Sizeof(value))
	}
	if o.unsent != unchanged {
		value := int32(o.unsent)
		refused += setOption(fd, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, unsafe.Pointer(&value), unsafe.Sizeof(value))
	}
	if o.send { // it is set already; setting it has the kernel try to send, as far as the window goes
		value := int32(1)
		refused += setOption(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, unsafe.Pointer(&value), unsafe.Sizeof(value))
	}
	return refused
}

// setOption sets one. The system call does not go through Go's scheduler: a tick that comes
// back from one that does waits behind all goroutines that move bytes, and with it all
// sockets that it serves. It takes as long as another thread works on the socket at most.
func setOption(fd uintptr, level, name int, value unsafe.Pointer, size uintptr) (refused uint64) {
	_, _, errno := unix.RawSyscall6(unix.SYS_SETSOCKOPT, fd, uintptr(level), uintptr(name), uintptr(value), size, 0)
	if errno != 0 {
		refused = 1
	}
	return refused
}

// What may wait unsent in a socket whose window the relay keeps (TCP_NOTSENT_LOWAT):
// half a window. The kernel wakes a writer when half of that is left, a quarter of a
// round trip's worth, which covers the writer's way to the socket; more would only be
// a queue that nobody sees. It bounds no window: sent bytes do not count.
const (
	minUnsent = 32 << 10
	maxUnsent = 1 << 20 // 8 ms at 1 Gbit/s, far more than a wakeup takes
)

func unsentFor(cwnd cc.Bytes) int { return int(min(max(minUnsent, cwnd/2), maxUnsent)) }

// Where the kernel enforces the window, what waits unsent lasts unsentLasts at the rate
// that the limit allows. The kernel wakes the writer at half of that.
//
// On a slow flow leastSegments may wait, however long they last: if its writer were
// woken for each segment, a thousand flows of 500 kbit/s would cost three times the
// processor time.
const (
	unsentLasts = 10 * time.Millisecond
	minSegments = 16
)

// unsentBelow is what may wait unsent below a window that the kernel enforces.
func unsentBelow(limit flow.Limit, srtt time.Duration, mss cc.Bytes) int {
	rate := limit.PacingRate
	if srtt > 0 {
		if window := cc.RateOf(min(limit.Cwnd, cc.MaxCwnd), srtt); rate == 0 || window < rate {
			rate = window
		}
	}
	unsent := limit.Cwnd // all of it, until there is a round trip to divide by
	if rate > 0 {
		unsent = rate.BytesIn(unsentLasts)
	}
	return int(min(max(minSegments*mss, unsent), maxUnsent))
}

// unlimited is SO_MAX_PACING_RATE's "not limited".
const unlimited = math.MaxUint

// systemUnsent has the system's setting (net.ipv4.tcp_notsent_lowat) be in force.
const systemUnsent = 0

// rateMoved says whether a pacing rate is more than 2 % off what the socket has:
// less than that the kernel's own pacing does not hold.
func rateMoved(has, rate cc.Rate) bool {
	if has == 0 || rate == 0 {
		return has != rate
	}
	return max(has, rate)-min(has, rate) > has/50
}

// pacingOption is SO_MAX_PACING_RATE for a rate: bytes per second, in as many bits as the
// kernel's unsigned long has. A 32-bit kernel looks at the first 32 bits that it is given,
// which would be the upper half of a longer number where that comes first.
func pacingOption(rate cc.Rate) uint {
	if rate == 0 {
		return unlimited
	}
	return uint(min(perSecond(rate), unlimited-1))
}

// perSecond is a pacing rate in bytes; only what is not paced is 0.
func perSecond(rate cc.Rate) uint64 {
	if rate <= 0 {
		return 0
	}
	return uint64(max(1, rate/8))
}

// unsentMoved says whether the window has outgrown what the socket has, or shrunk to
// less than half of it.
func unsentMoved(has, unsent int) bool {
	return has == 0 || unsent > has+has/2 || unsent < has/2
}
