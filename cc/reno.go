package cc

// NewReno as it applies above a transport that retransmits by itself: RFC 5681
// with byte counting (RFC 3465), one cut per round trip (RFC 6582).

func init() {
	Register(Spec{
		Name:   "reno",
		About:  "NewReno: one packet more per round trip, half the window at a loss.",
		Source: "RFC 5681, RFC 6582, RFC 3465",
		New:    func(cfg Config) Algorithm { return &reno{lossWindow: newLossWindow(cfg)} },

		Needs:     []Signal{NeedsLoss},
		Marks:     MarksAreLosses,
		Internals: []Internal{showSsthresh},
	})
}

const (
	renoBeta      = 0.5 // RFC 5681 §3.1, equation 4
	minLossWindow = 2.0 // packets left by a cut; RFC 5681 §3.1, equation 4
	timeoutWindow = 1.0 // packets left by a timeout; RFC 5681 §3.1, "loss window"
)

// lossWindow is what the loss-based algorithms have in common.
type lossWindow struct {
	segments
	cwnd, ssthresh float64 // packets
	first          float64 // ssthresh before any congestion
	epoch          epoch
	recovering     bool // bytes that left before the last cut are still being acknowledged
	timedOut       bool // and that cut was a timeout's
}

func newLossWindow(cfg Config) lossWindow {
	w := lossWindow{segments: segments{cfg.MSS}, ssthresh: infinite}
	if cfg.Ssthresh > 0 {
		w.ssthresh = max(w.toPackets(cfg.Ssthresh), minLossWindow)
	}
	w.first = w.ssthresh
	w.cwnd = w.clampWindow(w.toPackets(cfg.InitialCwnd), timeoutWindow)
	return w
}

// growthCredit returns how many acknowledged packets may grow the window. One event
// never counts for more than a window: that is what a round trip can bring.
func (w *lossWindow) growthCredit(a Ack) float64 {
	w.setMSS(a.MSS)
	w.recovering = w.epoch.covers(a.sentTime())
	if !w.recovering {
		w.timedOut = false
	}
	n := min(w.toPackets(a.Acked), w.cwnd)
	switch {
	case !a.CwndLimited:
		return 0
	case w.recovering && w.timedOut:
		return min(n, 1) // much of it had arrived before the timeout (RFC 3465 §2.3)
	case w.recovering:
		return 0
	}
	return n
}

// showSsthresh is the one value that all of them show.
var showSsthresh = Internal{Name: "ssthresh_packets", About: "window at which slow start ends; 0: no congestion yet"}

func (w *lossWindow) inSlowStart() bool { return w.cwnd < w.ssthresh }

// growInSlowStart grows the window by n packets up to ssthresh and returns how many
// of n are left for congestion avoidance. There is no limit of two segments per
// acknowledgement (RFC 3465 §2.2): an event may stand for many of them.
func (w *lossWindow) growInSlowStart(n float64) (left float64) {
	step := min(n, w.ssthresh-w.cwnd)
	w.cwnd = w.clampWindow(w.cwnd+step, timeoutWindow)
	return n - step
}

// growLinearly is congestion avoidance: one packet per window acknowledged.
func (w *lossWindow) growLinearly(n float64) { w.cwnd = w.clampWindow(w.cwnd+n/w.cwnd, timeoutWindow) }

// growWindow is slow start followed by congestion avoidance.
func (w *lossWindow) growWindow(n float64) {
	if w.inSlowStart() {
		n = w.growInSlowStart(n)
	}
	if n > 0 {
		w.growLinearly(n)
	}
}

// cutWindow applies a loss or a timeout with the factor beta and reports whether it
// opened a new congestion event. The cut is taken from the window instead of
// the flight size: an event may have acknowledged much of the flight, and the
// window does not grow while it is not used (RFC 9438 §4.6 allows it then).
func (w *lossWindow) cutWindow(l Loss, beta float64) (fresh bool) {
	w.setMSS(l.MSS)
	fresh = w.epoch.beginEpoch(l)
	if fresh {
		w.ssthresh = max(w.cwnd*beta, minLossWindow)
		w.cwnd = min(w.cwnd, w.ssthresh)
		w.timedOut = false
	}
	if l.Timeout {
		// A timeout within an event does not lower ssthresh again, but what
		// left until now belongs to it.
		w.epoch.reacted = l.Now
		w.cwnd = timeoutWindow
		w.timedOut = true
	}
	w.recovering = true
	return fresh
}

func (w *lossWindow) phaseName() string {
	switch {
	case w.inSlowStart():
		return "slow_start"
	case w.recovering:
		return "recovery"
	}
	return "congestion_avoidance"
}

type reno struct {
	NoTick
	lossWindow
}

func (r *reno) OnAck(a Ack)   { r.growWindow(r.growthCredit(a)) }
func (r *reno) OnLoss(l Loss) { r.cutWindow(l, renoBeta) }

// Inspect shows the slow-start threshold.
func (r *reno) Inspect() Internals { return Internals{finiteOrZero(r.ssthresh)} }

func (r *reno) Control() Control { return Control{Cwnd: r.toBytes(r.cwnd), Phase: r.phaseName()} }
