//go:build linux

package netlab

import (
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
}

func (a account) series(dir Direction, to, step time.Duration) []Point {
	zero := a.zero
	if zero == 0 || to < step {
		return nil
	}
	points := make([]Point, to/step)
	bytes := make([]cc.Bytes, len(points))
	left := make([]time.Duration, len(points))
	for e := range a.all {
		if e.dir != dir || e.drop != sim.DropNone {
			continue
		}
		if i := int(e.departs.Sub(zero) / step); i < len(points) {
			bytes[i] += cc.Bytes(e.size)
			left[i]++
			points[i].Queueing += e.departs.Sub(e.at)
		}
	}
	offers := a.offers(dir)
	for i := range points {
		pt := &points[i]
		pt.At = time.Duration(i) * step
		pt.Throughput = cc.RateOf(bytes[i], step)
		if left[i] > 0 {
			pt.Queueing /= left[i]
		}
		lo := zero.Add(pt.At)
		pt.Offered = cc.RateOf(offers(0, lo, lo.Add(step)), step)
	}
	return points
}
