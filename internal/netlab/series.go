//go:build linux

package netlab

import (
	"bufio"
	"fmt"
	"io"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// Point is one step of a time series.
type Point struct {
	At         time.Duration // start of the step, since the path's start
	Throughput cc.Rate       // IP bytes that left the queue in the step
	Offered    cc.Rate       // what the link could have delivered, a cell to its first host; 0: no limit, or an outage
	Queueing   time.Duration // mean of the packets that left, their own transmission included; 0: none left
	MaxQueue   time.Duration // the longest of those
	Drops      int           // packets dropped on arrival in the step
}

// DefaultStep is the length of a series' steps when none is given.
const DefaultStep = 100 * time.Millisecond

// Series cuts the time between two moments since the start into whole steps, for
// plots; step 0 means DefaultStep.
func (p *Path) Series(dir Direction, from, to, step time.Duration) []Point {
	return p.account().series(dir, from, to, step)
}

func (a account) series(dir Direction, from, to, step time.Duration) []Point {
	if step <= 0 {
		step = DefaultStep
	}
	zero := a.zero
	if zero == 0 || to-from < step {
		return nil
	}
	points := make([]Point, (to-from)/step)
	bytes := make([]cc.Bytes, len(points))
	left := make([]time.Duration, len(points))
	index := func(t cc.Time) int {
		if t < zero.Add(from) {
			return -1
		}
		return int(t.Sub(zero.Add(from)) / step)
	}
	for e := range a.all {
		if e.dir != dir {
			continue
		}
		if e.drop != sim.DropNone {
			if i := index(e.at); i >= 0 && i < len(points) {
				points[i].Drops++
			}
			continue
		}
		if i := index(e.departs); i >= 0 && i < len(points) {
			queued := e.departs.Sub(e.at)
			bytes[i] += cc.Bytes(e.size)
			left[i]++
			points[i].Queueing += queued
			points[i].MaxQueue = max(points[i].MaxQueue, queued)
		}
	}
	offers := a.offers(dir)
	for i := range points {
		pt := &points[i]
		pt.At = from + time.Duration(i)*step
		pt.Throughput = cc.RateOf(bytes[i], step)
		if left[i] > 0 {
			pt.Queueing /= left[i]
		}
		lo := zero.Add(pt.At)
		pt.Offered = cc.RateOf(offers(0, lo, lo.Add(step)), step)
	}
	return points
}

// WriteTo writes the record, one packet a line, in order of arrival; a cell's in
// the order in which they left its queues:
//
//	direction  arrives-at-queue  bytes  leaves-queue  reaches-far-end  late
//
// with times in milliseconds since the start. A lost packet has its reason
// ("queue", "loss", "held") instead of the last three; one that was not handed
// over has "pending" or "failed" for its lateness.
func (p *Path) WriteTo(w io.Writer) (int64, error) {
	out := &counter{w: w}
	buf := bufio.NewWriterSize(out, 1<<16)
	fmt.Fprintln(buf, "# direction  queued_ms  bytes  departs_ms  arrives_ms  late_ms")
	zero := cc.Time(p.zero.Load())
	ms := func(t cc.Time) float64 { return t.Sub(zero).Seconds() * 1e3 }
	var err error
	p.record.all(func(e *entry) bool {
		_, err = fmt.Fprintf(buf, "%s %.6f %d ", e.dir, ms(e.at), e.size)
		if err != nil {
			return false
		}
		if e.drop != sim.DropNone {
			_, err = fmt.Fprintln(buf, dropName(e.drop))
			return err == nil
		}
		_, err = fmt.Fprintf(buf, "%.6f %.6f %s\n", ms(e.departs), ms(e.arrives), lateText(e))
		return err == nil
	})
	if err == nil {
		err = buf.Flush()
	}
	if err != nil {
		err = fmt.Errorf("netlab: write record: %w", err)
	}
	return out.n, err
}

func lateText(e *entry) string {
	late, ok := e.lateness()
	switch {
	case ok:
		return fmt.Sprintf("%.6f", late.Seconds()*1e3)
	case late == time.Duration(lateFailed):
		return "failed"
	default:
		return "pending"
	}
}

func dropName(d sim.Drop) string {
	switch d {
	case sim.DropQueue:
		return "queue"
	case sim.DropLoss:
		return "loss"
	default:
		return "held"
	}
}

type counter struct {
	w io.Writer
	n int64
}

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.n += int64(n)
	return n, err
}
