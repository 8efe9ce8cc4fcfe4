package kernel

import (
	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// position is where a socket stands in its stream, and what the kernel counts of
// what is underway.
type position struct {
	una, nxt, end int64 // offsets: acknowledged up to, sent up to, accepted up to
	unsent        int64

	packets               int64 // on the wire or lost
	sacked, lost, retrans int64 // of those

	// Bytes below nxt that no packet counts: they have left since the packets were
	// counted, by what the limit lets out.
	more int64
}

func (p position) outstanding() int64 { return p.nxt - p.una }

// bytes converts packets of those outstanding at their mean size, which is the
// MSS in bulk and less where small writes went out one by one.
func (p position) bytes(packets int64) int64 {
	if p.packets == 0 {
		return 0
	}
	return (p.outstanding() - p.more) * packets / p.packets
}

// pipe is the bytes in flight: sent, and neither known to have arrived nor marked as lost.
func (p position) pipe() int64 { return p.bytes(p.packets-p.sacked-p.lost+p.retrans) + p.more }

// tally turns successive positions into reports.
type tally struct {
	origin int64       // stream offset at which observation began
	report flow.Report // the last one; its counters only grow
	newest cc.Bytes    // the largest Newest so far
}

// begin sets all counters to zero: what was written before is not reported,
// though while it is in flight it is part of the gauges.
func (t *tally) begin(p position) { *t = tally{origin: p.end} }

func (t *tally) since(offset int64) cc.Bytes { return cc.Bytes(max(0, offset-t.origin)) }

// place brings the last report up to date with p, and returns it.
func (t *tally) place(p position, mss cc.Bytes, at cc.Time) *flow.Report {
	r := &t.report
	r.At = at
	r.MSS = mss
	r.Unsent = cc.Bytes(p.unsent)
	r.Pipe = cc.Bytes(max(0, p.pipe()))
	r.Written = max(r.Written, t.since(p.end))
	r.Acked = max(r.Acked, t.since(min(p.una+p.bytes(p.sacked), p.nxt)))
	r.Sacked = r.Acked - t.since(min(p.una, p.nxt))
	return r
}

// arrived notes that something up to offset has arrived, holes below it
// notwithstanding, and returns how far that goes by now.
func (t *tally) arrived(offset int64) cc.Bytes {
	t.newest = max(t.newest, t.report.Acked, t.since(offset))
	return t.newest
}
