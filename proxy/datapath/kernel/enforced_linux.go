package kernel

import (
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

// enforced is a leg whose window and pacing rate the kernel enforces: its cell says
// what is reported of it.
type cellReporter struct {
	reportCounter
	cell            *bpf.Cell
	reported        bpf.Seen // what was reported last
	latest          bpf.Seen // what is to be reported
	lostBytes       cc.Bytes // packets at the size they had when they were lost
	acceptedAtStart int64    // what the socket had taken when observation began
	confirmed       int64    // stream offset up to which all has arrived, though the cell may not say so
}

// readFirst takes the first reading of a socket that has taken wrote bytes so far;
// false: there is none.
func (h *cellReporter) readFirst(wrote int64) bool {
	if !h.cell.Read(&h.latest) {
		return false
	}
	h.acceptedAtStart = wrote
	h.startCountersAt(wrote)
	return true
}

// startCountersAt has the counters start at a socket that has taken wrote bytes.
func (h *cellReporter) startCountersAt(wrote int64) {
	h.reported, h.lostBytes = h.latest, 0
	h.startAt(h.positionAt(wrote-h.acceptedAtStart, false, 0, flow.Limit{}, prevWindow{}))
	h.acceptedAtStart = wrote
}

// positionAt is where the newest reading puts a socket that has taken wrote bytes
// since observation began; since is how old the reading is.
//
// The kernel says where it stands when something comes back. What it has sent since
// then follows from what it has to send, from the limit, and from the wider window that
// was in force for what had been written by then.
func (h *cellReporter) positionAt(wrote int64, fin bool, since time.Duration, limit flow.Limit, before prevWindow) position {
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
	if before.window > 0 {
		limit.Cwnd = before.window
		room = max(room, min(h.releasedSince(p, since, limit), h.origin+before.accepted-h.acceptedAtStart-p.nxt))
	}
	p.released = max(0, min(p.end-p.nxt, room))
	p.nxt += p.released
	p.unsent = p.end - p.nxt
	return p
}

// confirmArrival notes that all that the socket has taken, wrote bytes, has arrived.
func (h *cellReporter) confirmArrival(wrote int64) {
	h.confirmed = h.origin + wrote - h.acceptedAtStart
}

// pacedBurst is how many segments leave at once before the pacing rate holds them.
const pacedBurst = 2

// releasedSince is how much the limit has let out since the reading, at most.
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

// makeReport returns the report of the newest reading, made at now; happened is when the
// socket said it, limit and before are for position.
func (h *cellReporter) makeReport(
	wrote int64, fin bool, happened, now cc.Time, limit flow.Limit, before prevWindow,
) flow.Report {
	s := &h.latest
	at := now
	if s.At != h.reported.At { // else nothing has happened since
		at = min(happened, now)
	}
	at = max(at, h.report.At)
	mss := cc.Bytes(s.Mss)
	p := h.positionAt(wrote-h.acceptedAtStart, fin, now.Sub(happened), limit, before)
	r := h.updateReport(p, mss, at)
	r.Newest = h.noteArrived(min(int64(s.Newest), p.nxt))
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
		// Round trips are the kernel's, by the same clock and as of the same moment.
		r.Peer = flow.PeerClock{At: happened, Value: s.Tsval}
	}
	h.reported = *s
	return *r
}
