package kernel

import (
	"math"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

// held is a leg whose window and pacing rate the kernel holds for us: reports
// come out of its cell, and limits go into it.
type held struct {
	tally
	cell *bpf.Cell
	seen bpf.Seen // the reading that was reported last
	next bpf.Seen // the one to be reported
	lost cc.Bytes // packets at the size they had when they were lost
	told flow.Limit
	let  cc.Bytes // the largest window told since the newest reading, or in force then
	base int64    // what the socket had taken when observation began
}

// start takes the first reading of a socket that has taken wrote bytes so far;
// false: there is none.
func (h *held) start(wrote int64) bool {
	if !h.cell.Read(&h.next) {
		return false
	}
	h.from(wrote)
	return true
}

// from has the counters start at the newest reading.
func (h *held) from(wrote int64) {
	h.seen = h.next
	h.begin(h.position(0, false, 0))
	h.base = wrote
}

// position is where the newest reading puts a socket that has taken wrote bytes
// since observation began; since is how old the reading is.
//
// The kernel tells where it stands when something comes back. What it has sent
// since then follows from what it has to send and from the limits in force.
func (h *held) position(wrote int64, fin bool, since time.Duration) position {
	s := &h.next
	p := position{
		una: int64(s.Acked), nxt: int64(s.Sent), end: int64(s.End),
		packets: int64(s.PacketsOut), sacked: int64(s.SackedOut), lost: int64(s.LostOut), retrans: int64(s.RetransOut),
	}
	p.end = max(p.end, h.origin+wrote)
	if fin { // it takes a sequence number; all that was written is known by now
		p.end = min(p.end, h.origin+wrote)
		p.una, p.nxt = min(p.una, p.end), min(p.nxt, p.end)
	}
	p.unsent = p.end - p.nxt
	if more := min(p.unsent, h.room(p, since)); more > 0 {
		p.nxt += more
		p.unsent -= more
		p.more = more
	}
	return p
}

// pacedBurst is what leaves at once before the pacing rate tells.
const pacedBurst = 2

// room is how much the limits in force have let out since the reading, at most.
func (h *held) room(p position, since time.Duration) int64 {
	s, mss := &h.next, max(1, int64(h.next.Mss))
	itself := s.Fallen != 0 || h.told.Cwnd == 0
	window := int64(s.Cwnd)
	if !itself {
		window = max(window, int64(h.let)/mss, 1)
	}
	room := min(window*mss-p.pipe(), int64(s.SndWnd)-p.outstanding())
	if h.told.PacingRate > 0 {
		room = min(room, int64(h.told.PacingRate.BytesIn(since))+pacedBurst*mss)
	}
	return room
}

// step returns the report of the newest reading, made at now; happened is when
// the socket took it.
func (h *held) step(wrote int64, fin bool, happened, now cc.Time) flow.Report {
	s := &h.next
	at := now
	if s.At != h.seen.At { // else nothing has happened since
		at = min(happened, now)
		h.let = h.told.Cwnd
	}
	at = max(at, h.report.At)
	mss := cc.Bytes(s.Mss)
	p := h.position(wrote-h.base, fin, now.Sub(happened))
	r := h.place(p, mss, at)
	r.Held = true
	r.Newest = h.arrived(min(int64(s.Newest), p.nxt))
	h.lost += cc.Bytes(s.Lost-h.seen.Lost) * mss
	r.Lost = h.lost
	r.Marked = min(r.Marked+cc.Bytes(s.Marked-h.seen.Marked)*mss, r.Acked)
	r.Timeouts += int(s.Timeouts - h.seen.Timeouts)
	r.RwndFull = p.unsent > 0 && p.outstanding()+int64(s.Mss) > int64(s.SndWnd)
	r.RTT = 0
	if s.Samples != h.seen.Samples {
		r.RTT = time.Duration(s.RttUs) * time.Microsecond
	}
	h.seen = *s
	return *r
}

// tell puts the limit into force from the next acknowledgement or transmission on.
func (h *held) tell(limit flow.Limit) {
	h.grant(limit)
	h.cell.Tell(bpf.Told{
		Cwnd:     uint32(min(max(1, limit.Cwnd), math.MaxInt32)),
		Rate:     perSecond(limit.PacingRate),
		Answers:  h.seen.At,
		Timeouts: h.seen.Timeouts,
		Marked:   h.seen.Marked,
		Each:     limit.EveryAck,
	})
}

// grant has the limit be in force as far as the books go.
func (h *held) grant(limit flow.Limit) {
	h.told = limit
	h.let = max(h.let, limit.Cwnd)
}

// perSecond is a pacing rate in bytes; only what is not paced is 0.
func perSecond(rate cc.Rate) uint64 {
	if rate <= 0 {
		return 0
	}
	return uint64(max(1, rate/8))
}

// parkedFor is how long what waits unsent in the kernel lasts at the rate the
// limit allows. The writer is woken at half of it, which covers its way to the
// socket; more would only be a queue that nobody sees.
//
// A slow flow may park leastParked segments, however long they last: woken for
// each segment by itself, a thousand flows of 500 kbit/s cost three times the
// processor time.
const (
	parkedFor   = 10 * time.Millisecond
	leastParked = 16
)

// unsent is what the kernel may park below the window (TCP_NOTSENT_LOWAT).
func (h *held) unsent() int {
	rate := h.told.PacingRate
	srtt := time.Duration(h.seen.SrttUs) * time.Microsecond
	if srtt > 0 {
		if window := cc.RateOf(min(h.told.Cwnd, cc.MaxCwnd), srtt); rate == 0 || window < rate {
			rate = window
		}
	}
	parked := h.told.Cwnd // all of it, until there is a round trip to divide by
	if rate > 0 {
		parked = rate.BytesIn(parkedFor)
	}
	return int(min(max(leastParked*cc.Bytes(h.seen.Mss), parked), mostUnsent))
}
