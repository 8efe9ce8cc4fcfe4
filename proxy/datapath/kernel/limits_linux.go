package kernel

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

// limits are the limit of a leg, and what its socket has of it. A window that the kernel enforces goes into the leg's
// cell at once. What needs a system call waits until sender.setChangedOptions.
//
// Apply may be called from any goroutine, also while a report is underway, in which sender.mu is held. So limits has
// a mutex of its own, under which nothing else is locked. Writers look at optionsDue without it.
type limits struct {
	optionsDue atomic.Bool // set by Apply, cleared by setChangedOptions

	mu             sync.Mutex
	enforcing      bool       // Enforce was called: limits are applied
	relayPaces     bool       // the relay enforces the rate, and the socket spreads what the relay writes
	cell           *bpf.Cell  // nil: the kernel does not enforce the window
	limit          flow.Limit // the one applied last
	cutAt          cc.Time    // when the window was cut last
	prev           prevWindow // in force until then
	reportUnderway bool       // setChangedOptions comes after it
	socketRate     cc.Rate    // SO_MAX_PACING_RATE of the socket; 0: unlimited
	socketLowat    int        // TCP_NOTSENT_LOWAT of the socket, bytes; 0: the system's

	// Of an enforced leg, as last reported.
	mss           cc.Bytes
	srtt          time.Duration
	windowBlocked bool     // bytes wait for the window
	inForce       cc.Bytes // a window that the socket has used already
	sendNow       bool     // the kernel is to send at once what the newest limit allows
}

// prevWindow is the window before the last cut. The socket may still hold bytes that it accepted under it.
type prevWindow struct {
	window   cc.Bytes // 0: there was none
	accepted int64    // bytes that the socket had accepted when the window was cut
}

// beginEnforcing makes applyLimit apply limits from now on. cell is nil unless the kernel enforces the window.
func (l *limits) beginEnforcing(cell *bpf.Cell, enforces datapath.Hold) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.enforcing, l.cell, l.relayPaces = true, cell, enforces&datapath.HoldRate == 0
}

// stopEnforcing makes applyLimit apply no more limits. It reports whether that is a change. l may be nil.
func (l *limits) stopEnforcing() (changed bool) {
	if l == nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	changed = l.enforcing
	l.enforcing, l.cell, l.limit, l.prev, l.socketRate, l.socketLowat = false, nil, flow.Limit{}, prevWindow{}, 0, 0
	l.mss, l.srtt, l.windowBlocked, l.inForce, l.sendNow, l.reportUnderway = 0, 0, false, 0, false, false
	l.optionsDue.Store(false)
	return changed
}

// applyLimit puts into force what needs no system call. It reports whether the caller must have socket options set. It
// need not during a report, which sets them at its end. accepted counts the bytes that the socket has accepted.
func (l *limits) applyLimit(limit flow.Limit, clock func() cc.Time, accepted *atomic.Int64) (optionsDue bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.enforcing || limit == l.limit {
		return false
	}
	l.sendNow, limit.Now = l.sendNow || limit.Now, false
	if l.cell != nil {
		l.cell.Apply(uint32(min(max(1, limit.Cwnd), math.MaxInt32)), bytesPerSecond(limit.PacingRate))
	}
	if limit.Cwnd < l.limit.Cwnd {
		l.prev = prevWindow{max(l.prev.window, l.limit.Cwnd), accepted.Load()}
		l.cutAt = clock()
		l.inForce = min(l.inForce, limit.Cwnd)
	}
	l.limit = limit
	if l.reportUnderway || !l.hasOptionChanges() {
		return false
	}
	l.optionsDue.Store(true)
	return true
}

// limitSince returns the limit, and the larger window that has been in force since a reading of the socket's state.
func (l *limits) limitSince(reading cc.Time) (flow.Limit, prevWindow) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if reading > l.cutAt {
		l.prev = prevWindow{}
	}
	return l.limit, l.prev
}

// currentLimit returns the limit.
func (l *limits) currentLimit() flow.Limit {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.limit
}

// maxUnsent returns how many bytes may wait unsent in the socket; 0: as many as the system allows. l may be nil.
func (l *limits) maxUnsent() int {
	if l == nil {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.socketLowat
}

// beginReport is called before a report. takeOptions ends it.
func (l *limits) beginReport() {
	l.mu.Lock()
	l.reportUnderway = true
	l.mu.Unlock()
}

// updateFromReport takes in what a report says of an enforced leg. fresh: s was not reported before.
func (l *limits) updateFromReport(r *flow.Report, s *bpf.Seen, fresh bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mss, l.srtt = r.MSS, microseconds(s.SrttUs)
	if fresh {
		l.inForce = min(cc.Bytes(s.Cwnd)*r.MSS, l.limit.Cwnd)
	}
	// What waits for the pacing rate leaves by the kernel's timer. The kernel may leave the last third of a window
	// unused for a while (tcp_tso_should_defer).
	filled := r.Pipe+r.MSS >= l.inForce*2/3
	l.windowBlocked = filled && r.Unsent > 0 && !r.RwndFull && s.InFallback == 0
}

// wantsSend reports whether the kernel has to be asked to send bytes that wait. By itself it uses a larger window only
// when it next sends or hears from its peer. mu is held.
func (l *limits) wantsSend() bool {
	return l.sendNow && l.windowBlocked && l.limit.Cwnd >= l.inForce+l.mss
}

// pacingHeadroom is the socket's own rate divided by the relay's, where the relay paces. The socket only spreads what
// the relay writes at once. With the same rate it would hold bytes back, because the kernel applies a higher rate with
// the next acknowledgement. Such bytes look as if the kernel's window were full, and then our window would not grow.
const pacingHeadroom = 2

// socketOptions returns the pacing rate and TCP_NOTSENT_LOWAT that the socket should have. mu is held.
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

// hasOptionChanges reports whether takeOptions would return anything. mu is held.
func (l *limits) hasOptionChanges() bool {
	rate, unsent := l.socketOptions()
	return rateMoved(l.socketRate, rate) || unsentMoved(l.socketLowat, unsent) || l.wantsSend()
}

// takeOptions ends a report. It returns the socket options that the newest limit has changed, which the caller sets at
// once. cell is nil unless the kernel enforces the window; unsent is what may then wait unsent. ok: there is a limit.
func (l *limits) takeOptions() (do sockopts, cell *bpf.Cell, unsent int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reportUnderway = false
	l.optionsDue.Store(false)
	if !l.enforcing || l.limit == (flow.Limit{}) {
		return do, nil, 0, false
	}
	rate, unsent := l.socketOptions()
	do = sockopts{rate: unchanged, unsent: unchanged, send: l.wantsSend()}
	if rateMoved(l.socketRate, rate) {
		l.socketRate, do.rate = rate, int64(rate)
	}
	if unsentMoved(l.socketLowat, unsent) {
		l.socketLowat, do.unsent = unsent, int64(unsent)
	}
	if do.send {
		l.inForce = l.limit.Cwnd
	}
	l.sendNow = false
	return do, l.cell, unsent, true
}

// What may wait unsent in the socket of a polled leg is half a window. The kernel wakes a writer when
// half of that is left: a quarter of a round trip's worth, which covers the writer's way to the socket. More would be
// a queue that no algorithm sees. It bounds no window, since sent bytes do not count.
const (
	minUnsent = 32 << 10
	maxUnsent = 1 << 20 // 8 ms at 1 Gbit/s, far more than a wakeup takes
)

// unsentFor returns what may wait unsent in the socket of a polled leg, in bytes.
func unsentFor(cwnd cc.Bytes) int { return int(min(max(minUnsent, cwnd/2), maxUnsent)) }

// Where the kernel enforces the window, what waits unsent lasts unsentLasts at the rate that the limit allows. The
// kernel wakes the writer at half of that.
//
// On a slow flow minSegments may wait, however long they last. If the writer were woken for each segment, a thousand
// flows of 500 kbit/s would cost three times the processor time.
const (
	unsentLasts = 10 * time.Millisecond
	minSegments = 16
)

// unsentBelow returns what may wait unsent below a window that the kernel enforces, in bytes.
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

// rateMoved reports whether a pacing rate differs from the socket's by more than 2 %. The kernel's pacing is not more
// exact.
func rateMoved(has, rate cc.Rate) bool {
	if has == 0 || rate == 0 {
		return has != rate
	}
	return max(has, rate)-min(has, rate) > has/50
}

// unsentMoved reports whether what should wait unsent is more than 1.5 times, or less than half, of what the socket
// has; 0: the socket has the system's setting.
func unsentMoved(has, unsent int) bool {
	return has == 0 || unsent > has+has/2 || unsent < has/2
}
