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
	released int64
}

func (p position) outstandingBytes() int64 { return p.nxt - p.una }

// bytesOf converts packets of those outstanding at their mean size, which is the
// MSS in bulk and less where small writes went out one by one.
func (p position) bytesOf(packets int64) int64 {
	if p.packets == 0 {
		return 0
	}
	return (p.outstandingBytes() - p.released) * packets / p.packets
}

// pipeBytes is the bytes in flight: sent, and neither known to have arrived nor marked as lost.
func (p position) pipeBytes() int64 {
	return p.bytesOf(p.packets-p.sacked-p.lost+p.retrans) + p.released
}

// tally turns successive positions into reports.
type reportCounter struct {
	origin int64       // stream offset at which observation began
	report flow.Report // the last one; its counters only grow
	newest cc.Bytes    // the largest Newest so far
}

// startAt sets all counters to zero: what was written before is not reported,
// though while it is in flight it is part of the gauges.
func (t *reportCounter) startAt(p position) { *t = reportCounter{origin: p.end} }

func (t *reportCounter) countedSince(offset int64) cc.Bytes { return cc.Bytes(max(0, offset-t.origin)) }

// updateReport brings the last report up to date with p, and returns it.
func (t *reportCounter) updateReport(p position, mss cc.Bytes, at cc.Time) *flow.Report {
	r := &t.report
	r.At = at
	r.MSS = mss
	r.Unsent = cc.Bytes(p.unsent)
	r.Pipe = cc.Bytes(max(0, p.pipeBytes()))
	r.Written = max(r.Written, t.countedSince(p.end))
	r.Acked = max(r.Acked, t.countedSince(min(p.una+p.bytesOf(p.sacked), p.nxt)))
	r.Sacked = r.Acked - t.countedSince(min(p.una, p.nxt))
	return r
}

// noteArrived notes that something up to offset has arrived, holes below it
// notwithstanding, and returns how far that goes by now.
func (t *reportCounter) noteArrived(offset int64) cc.Bytes {
	t.newest = max(t.newest, t.report.Acked, t.countedSince(offset))
	return t.newest
}
