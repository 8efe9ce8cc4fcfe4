package kernel

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

// enforcer lets the kernel enforce the windows of a bounded number of legs. Its methods may be called at the same time.
type enforcer struct {
	control    *bpf.Control
	clockAhead time.Duration            // Config.Clock minus the kernel's CLOCK_MONOTONIC
	legs       []atomic.Pointer[sender] // by cell

	bound         atomic.Int64  // legs now
	refusedFull   atomic.Uint64 // legs refused since all cells were in use
	refusedFailed atomic.Uint64 // legs refused for another reason
	fallbacks     atomic.Uint64
	answerTimes   *datapath.Durations
}

// answerBounds are in seconds: from a fraction of a tick up to beyond what makes a socket fall back.
var answerBounds = []float64{
	.0001, .0002, .0003, .0005, .00075, .001, .0015, .002, .003, .005, .0075, .01, .02, .05, .1, .2, .5,
}

// newEnforcer returns an enforcer for that many legs (0: defaultCells), in at most parts parts.
func newEnforcer(cells, parts int, clock func() cc.Time) (*enforcer, error) {
	if cells <= 0 {
		cells = defaultCells
	}
	c, err := bpf.Open(bpf.Config{Cells: cells, Parts: parts})
	if err != nil {
		return nil, err
	}
	ahead, err := clockOffset(clock)
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return &enforcer{
		control: c, answerTimes: datapath.NewDurations(answerBounds), legs: make([]atomic.Pointer[sender], cells),
		clockAhead: ahead,
	}, nil
}

// clockOffset returns clock minus the kernel's clock: the least of several readings, because the thread may wait for a
// processor between reading one clock and the other.
func clockOffset(clock func() cc.Time) (least time.Duration, err error) {
	for i := range 16 {
		var ts unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
			return 0, fmt.Errorf("read CLOCK_MONOTONIC: %w", err)
		}
		if ahead := time.Duration(int64(clock()) - ts.Nano()); i == 0 || ahead < least {
			least = ahead
		}
	}
	return least, nil
}

// clockTime converts a time of the kernel's clock, in nanoseconds.
func (o *enforcer) clockTime(at uint64) cc.Time { return cc.Time(at).Add(o.clockAhead) }

// bindCell lets the kernel enforce the window of a leg, by a cell of the leg's shard. system is the congestion control
// of the socket, which it keeps after an error.
func (o *enforcer) bindCell(s *sender, shard int, accepted int64, system string) (*cellReporter, error) {
	h := &cellReporter{}
	err := s.raw.Visit(func(fd int) (err error) {
		if h.cell, err = o.control.Bind(fd, shard); err != nil {
			return err
		}
		if h.readFirst(accepted) {
			return nil
		}
		h.cell.Free()
		return errors.Join(errors.New("the socket does not answer"),
			unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, system))
	})
	switch {
	case errors.Is(err, bpf.ErrFull):
		o.refusedFull.Add(1)
		return nil, fmt.Errorf("kernel: it enforces the windows of %d legs, and of no more; "+
			"the relay keeps this one's (limits.held_legs)", len(o.legs))
	case err != nil:
		o.refusedFailed.Add(1)
		return nil, fmt.Errorf("kernel: it does not enforce this leg's window: %w", err)
	}
	o.bound.Add(1)
	o.legs[h.cell.Index()].Store(s)
	return h, nil
}

// releaseCell gives back the cell of a leg. From then on the socket runs Reno.
func (o *enforcer) releaseCell(h *cellReporter) {
	o.legs[h.cell.Index()].Store(nil)
	h.cell.Free()
	o.bound.Add(-1)
}

// visitLegsWithNews calls visit for the legs of a shard with news, about limit of them at most.
func (o *enforcer) visitLegsWithNews(shard, limit int, visit func(*sender)) {
	o.control.News(shard, limit, func(cell uint32) {
		if s := o.legs[cell].Load(); s != nil {
			visit(s)
		}
	})
}

// cellReporter turns successive readings of a cell into reports. A leg has one while the kernel enforces its window.
type cellReporter struct {
	reportCounter
	cell            *bpf.Cell
	latest          bpf.Seen // the last reading
	reported        bpf.Seen // the last reading that was reported
	lostBytes       cc.Bytes // packets, each at the MSS of the report that had it
	acceptedAtStart int64    // bytes that the socket had accepted when observation began
	confirmed       int64    // stream offset up to which all has arrived by TCP_INFO; the cell may lag behind
}

// readFirst takes the first reading of a socket that has accepted that many bytes. It reports whether there is one.
func (h *cellReporter) readFirst(accepted int64) bool {
	if !h.cell.Read(&h.latest) {
		return false
	}
	h.acceptedAtStart = accepted
	h.startCountersAt(accepted)
	return true
}

// startCountersAt sets all counters to zero at a socket that has accepted that many bytes.
func (h *cellReporter) startCountersAt(accepted int64) {
	h.reported, h.lostBytes = h.latest, 0
	h.startAt(h.positionAt(accepted-h.acceptedAtStart, false, 0, flow.Limit{}, prevWindow{}))
	h.acceptedAtStart = accepted
}

// positionAt returns where the latest reading puts a socket that has accepted wrote bytes since observation began.
// since is the age of the reading; fin: a FIN follows what was written.
//
// The kernel says where it stands when something comes back. What it has sent since then is not known but follows:
// from what it has to send, from the limit, and from the previous window for bytes accepted under it.
func (h *cellReporter) positionAt(
	wrote int64, fin bool, since time.Duration, limit flow.Limit, prev prevWindow,
) position {
	s := &h.latest
	p := position{
		una: int64(s.Acked), nxt: int64(s.Sent), end: int64(s.End),
		packets: int64(s.PacketsOut), sacked: int64(s.SackedOut), lost: int64(s.LostOut), retrans: int64(s.RetransOut),
	}
	if p.una < h.confirmed {
		p = position{una: h.confirmed, nxt: max(p.nxt, h.confirmed), end: max(p.end, h.confirmed)}
	}
	p.end = max(p.end, h.origin+wrote)
	if fin { // it takes a sequence number; all that was written is known by now
		p.end = min(p.end, h.origin+wrote)
		p.una, p.nxt = min(p.una, p.end), min(p.nxt, p.end)
	}
	room := h.releasedSince(p, since, limit)
	if prev.window > 0 {
		limit.Cwnd = prev.window
		room = max(room, min(h.releasedSince(p, since, limit), h.origin+prev.accepted-h.acceptedAtStart-p.nxt))
	}
	p.released = max(0, min(p.end-p.nxt, room))
	p.nxt += p.released
	p.unsent = p.end - p.nxt
	return p
}

// pacedBurst is how many segments leave at once before the pacing rate holds back the next.
const pacedBurst = 2

// releasedSince returns how many bytes the limit has let out since the reading, at most.
func (h *cellReporter) releasedSince(p position, since time.Duration, limit flow.Limit) int64 {
	s, mss := &h.latest, max(1, int64(h.latest.Mss))
	window := int64(s.Cwnd)
	if s.InFallback == 0 && limit.Cwnd > 0 {
		window = max(int64(limit.Cwnd)/mss, 1)
	}
	room := min(window*mss-p.pipeBytes(), int64(s.SndWnd)-p.outstandingBytes())
	if limit.PacingRate > 0 { // in fallback, too
		room = min(room, int64(limit.PacingRate.BytesIn(since))+pacedBurst*mss)
	}
	return room
}

// confirmArrival stores that all bytes that the socket has accepted have arrived.
func (h *cellReporter) confirmArrival(accepted int64) {
	h.confirmed = h.origin + accepted - h.acceptedAtStart
}

// makeReport returns the report of the latest reading, made now, of a socket that has accepted that many bytes.
// happened is when the socket wrote the reading. fin, limit and prev are positionAt's.
func (h *cellReporter) makeReport(
	accepted int64, fin bool, happened, now cc.Time, limit flow.Limit, prev prevWindow,
) flow.Report {
	s := &h.latest
	at := now
	if s.At != h.reported.At { // otherwise nothing has happened since
		at = min(happened, now)
	}
	at = max(at, h.report.At)
	mss := cc.Bytes(s.Mss)
	p := h.positionAt(accepted-h.acceptedAtStart, fin, now.Sub(happened), limit, prev)
	r := h.updateReport(p, mss, at)
	r.Newest = h.raiseNewest(min(int64(s.Newest), p.nxt))
	h.lostBytes += cc.Bytes(s.Lost-h.reported.Lost) * mss
	r.Lost = h.lostBytes
	r.Marked = min(r.Marked+cc.Bytes(s.Marked-h.reported.Marked)*mss, r.Acked)
	r.Timeouts += int(s.Timeouts - h.reported.Timeouts)
	r.RwndFull = p.unsent > 0 && p.outstandingBytes()+int64(s.Mss) > int64(s.SndWnd)
	r.RTT = 0
	if s.Samples != h.reported.Samples {
		r.RTT = time.Duration(s.RttUs) * time.Microsecond
	}
	if s.Tsval != 0 && s.Acks != h.reported.Acks && s.Timeouts == h.reported.Timeouts {
		// The kernel's round trips are by the same clock and as of the same moment.
		r.Peer = flow.PeerClock{At: happened, Value: s.Tsval}
	}
	h.reported = *s
	return *r
}
