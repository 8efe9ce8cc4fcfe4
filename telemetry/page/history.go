package page

import (
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy"
)

const (
	// step is the time between two points.
	step = 5 * time.Second
	// hostStep and hostLongStep are longer than those of the whole proxy, since there are many hosts.
	hostStep     = 15 * time.Second
	longStep     = 2 * time.Minute
	hostLongStep = 15 * time.Minute
	// maxTrails bounds the hosts with a history, of up to 22 kB each.
	maxTrails = 256
	// quietTrail is how long a host with a history has nothing to do before another one takes its place.
	quietTrail = 10 * time.Minute
)

// trail is a history of the last hour, and one of the last day with fewer points.
type trail struct {
	hour, day history
	// recent are not yet in a point of the hour, pending not yet in one of the day.
	recent, pending []Point
	// The times between two points.
	step, longStep time.Duration
}

// newTrail returns a trail of points that are so far apart: multiples of step.
func newTrail(each, eachOfDay time.Duration) *trail {
	return &trail{
		hour: newHistory(time.Hour, each), day: newHistory(24*time.Hour, eachOfDay),
		step: each, longStep: eachOfDay,
	}
}

// addPoint adds what one step came to.
func (t *trail) addPoint(p Point) {
	if t.recent = append(t.recent, p); len(t.recent) < int(t.step/step) {
		return
	}
	p = mergePoints(t.recent)
	t.recent = t.recent[:0]
	t.hour.addPoint(p)
	if t.pending = append(t.pending, p); len(t.pending) == int(t.longStep/t.step) {
		t.day.addPoint(mergePoints(t.pending))
		t.pending = t.pending[:0]
	}
}

// since returns the points after at of the last day, or else of the last hour.
func (t *trail) since(at float64, day bool) History {
	if day {
		return History{Step: t.longStep.Seconds(), Points: t.day.pointsSince(at)}
	}
	return History{Step: t.step.Seconds(), Points: t.hour.pointsSince(at)}
}

// trails are the histories of hosts.
type trails struct {
	at        cc.Time             // of the newest points; 0: there are none
	delivered map[string]cc.Bytes // by then, by Group.Key
	byHost    map[string]*hostTrail
}

// hostTrail is the history of one host.
type hostTrail struct {
	*trail
	busy cc.Time // when it had bytes delivered last
}

// addPoints adds a point for each host, by the state of all groups. A host is known from its first bytes on.
func (t *trails) addPoints(groups []flow.Group, now cc.Time, wall float64) {
	before, was := t.at, t.delivered
	t.at, t.delivered = now, make(map[string]cc.Bytes, len(groups))
	points := map[string]*Point{}
	for i := range groups {
		g := &groups[i]
		t.delivered[g.Key] = g.Delivered
		name := parseGroupName(g.Name)
		if before == 0 || name.host == "" {
			continue
		}
		p := points[name.host]
		if p == nil {
			p = &Point{At: wall}
			points[name.host] = p
		}
		p.Connections += g.Members
		rate := rateOf(was[g.Key], g.Delivered, now.Sub(before))
		if name.sends() {
			p.Up += rate
		} else {
			p.Down += rate
		}
		if delay := g.QueueingDelay.Seconds(); rate > 0 && g.SRTT > 0 && (p.Queue95 == nil || delay > *p.Queue95) {
			p.Queue50, p.Queue95 = &delay, &delay
		}
	}
	for host, p := range points {
		if h := t.trailOf(host, p.Down+p.Up > 0, quietTrail); h != nil {
			h.addPoint(*p)
		}
	}
	for host, h := range t.byHost {
		if points[host] == nil {
			h.addPoint(Point{At: wall})
		}
	}
}

// trailOf returns the history of a host. A busy one without gets one, if there is a place or another host has had
// nothing to do for so long. nil: it has none.
func (t *trails) trailOf(host string, busy bool, quiet time.Duration) *hostTrail {
	h := t.byHost[host]
	if !busy {
		return h
	}
	if h == nil {
		if len(t.byHost) >= maxTrails && !t.dropQuietest(quiet) {
			return nil
		}
		if t.byHost == nil {
			t.byHost = map[string]*hostTrail{}
		}
		h = &hostTrail{trail: newTrail(hostStep, hostLongStep)}
		t.byHost[host] = h
	}
	h.busy = t.at
	return h
}

// dropQuietest drops the history of the host that had nothing to do for the longest time. It reports whether there
// was one that had nothing to do for so long.
func (t *trails) dropQuietest(quiet time.Duration) bool {
	quietest := ""
	for host, h := range t.byHost {
		if t.at.Sub(h.busy) >= quiet && (quietest == "" || h.busy < t.byHost[quietest].busy) {
			quietest = host
		}
	}
	delete(t.byHost, quietest)
	return quietest != ""
}

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
