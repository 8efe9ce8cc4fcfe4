package page

import (
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy"
)

const (
	// step is the time between two points of the last hour.
	step = 5 * time.Second
	// longStep is the time between two points of the last day.
	longStep = 2 * time.Minute
)

// history is a ring of points.
type history struct {
	ring []Point
	next int // where the next point goes once the ring is full
	most int // points in the ring
}

// newHistory returns one of points that are a step apart.
func newHistory(last, step time.Duration) history { return history{most: int(last / step)} }

// addPoint adds a point. One that is older than the newest shows that the clock was set back: then the points
// before it are forgotten.
func (h *history) addPoint(p Point) {
	if n := len(h.ring); n > 0 && p.At < h.ring[(h.next+n-1)%n].At {
		*h = history{most: h.most}
	}
	if len(h.ring) < h.most {
		h.ring = append(h.ring, p)
		return
	}
	h.ring[h.next] = p
	h.next = (h.next + 1) % h.most
}

// mergePoints returns one point for several: means of rates and of the median delay, and the worst of the rest. It is
// at the time of the last.
func mergePoints(several []Point) (out Point) {
	out = several[len(several)-1]
	out.Down, out.Up, out.Refused, out.Queue50, out.Queue95 = 0, 0, 0, nil, nil
	medians, n := 0.0, 0
	for _, p := range several {
		out.Down += p.Down
		out.Up += p.Up
		out.Refused += p.Refused
		out.Connections = max(out.Connections, p.Connections)
		if p.Queue50 != nil {
			medians, n = medians+*p.Queue50, n+1
		}
		if p.Queue95 != nil && (out.Queue95 == nil || *p.Queue95 > *out.Queue95) {
			out.Queue95 = p.Queue95
		}
	}
	out.Down, out.Up = out.Down/cc.Rate(len(several)), out.Up/cc.Rate(len(several))
	if n > 0 {
		out.Queue50 = new(medians / float64(n))
	}
	return out
}

// pointsSince returns the points after at, oldest first; never nil.
func (h *history) pointsSince(at float64) []Point {
	all := append(append(make([]Point, 0, len(h.ring)), h.ring[h.next:]...), h.ring[:h.next]...)
	i, _ := slices.BinarySearchFunc(all, at, func(p Point, at float64) int {
		if p.At <= at {
			return -1
		}
		return 1
	})
	return all[i:]
}

// counted is what counters said at one moment.
type counted struct {
	at        cc.Time
	down, up  map[string]cc.Bytes // by listener
	refused   map[string]map[proxy.Reason]uint64
	fallbacks uint64
}

// countAll adds up over all routes what the page draws as curves.
func countAll(c proxy.Counters, fallbacks uint64, now cc.Time) counted {
	out := counted{
		at: now, down: map[string]cc.Bytes{}, up: map[string]cc.Bytes{},
		refused: map[string]map[proxy.Reason]uint64{}, fallbacks: fallbacks,
	}
	for _, r := range c.Routes {
		out.down[r.Listener] += r.Down.Written
		out.up[r.Listener] += r.Up.Written
	}
	for _, l := range c.Listeners {
		out.refused[l.Listener] = l.Rejected
	}
	return out
}

// refusedSince counts what was refused after before, and tells events of it.
func (c counted) refusedSince(before counted, tell func(slog.Level, string, int)) (n uint64) {
	for listener, reasons := range c.refused {
		for reason, total := range reasons {
			if now := total - before.refused[listener][reason]; total > before.refused[listener][reason] {
				n += now
				tell(slog.LevelWarn, fmt.Sprintf("connections refused at %s: %s", listener, reason), int(now))
			}
		}
	}
	return n
}

// rateOf is the rate at which a counter rose from was to is in d; 0 where it did not.
func rateOf(was, is cc.Bytes, d time.Duration) cc.Rate {
	if is <= was || d <= 0 {
		return 0
	}
	return cc.RateOf(is-was, d)
}

// medianAndP95 returns the median and the 95th percentile of delays, which it sorts;
// nil where there are none.
func medianAndP95(delays []time.Duration) (p50, p95 *float64) {
	if len(delays) == 0 {
		return nil, nil
	}
	slices.Sort(delays)
	at := func(q float64) *float64 {
		return new(delays[min(len(delays)-1, int(q*float64(len(delays))))].Seconds())
	}
	return at(.5), at(.95)
}
