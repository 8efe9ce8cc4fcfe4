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
	// step is the time between two points of the whole proxy, and longStep that of the history of a day.
	step = 5 * time.Second
	// hostStep and hostLongStep are the same for one host. They are longer, because there are many hosts.
	hostStep     = 15 * time.Second
	longStep     = 2 * time.Minute
	hostLongStep = 15 * time.Minute
	// maxHostHistories bounds the hosts with a history, of up to 22 kB each.
	maxHostHistories = 256
	// quietHistory is how long a host with a history has nothing to do before another one takes its place.
	quietHistory = 10 * time.Minute
)

// history has points of the last hour, and fewer points of the last day.
type history struct {
	hour, day pointRing
	// recent are not yet merged into a point of the hour, pending not yet into one of the day.
	recent, pending []Point
	// The times between two points of the hour, and of the day.
	hourStep, dayStep time.Duration
}

// newHistory returns an empty history. hourStep is a multiple of step, and dayStep one of hourStep.
func newHistory(hourStep, dayStep time.Duration) *history {
	return &history{
		hour: newPointRing(time.Hour, hourStep), day: newPointRing(24*time.Hour, dayStep),
		hourStep: hourStep, dayStep: dayStep,
	}
}

// addPoint adds the point of one step.
func (h *history) addPoint(p Point) {
	if h.recent = append(h.recent, p); len(h.recent) < int(h.hourStep/step) {
		return
	}
	p = mergePoints(h.recent)
	h.recent = h.recent[:0]
	h.hour.addPoint(p)
	if h.pending = append(h.pending, p); len(h.pending) == int(h.dayStep/h.hourStep) {
		h.day.addPoint(mergePoints(h.pending))
		h.pending = h.pending[:0]
	}
}

// pointsSince returns the points after at of the last day, or else of the last hour.
func (h *history) pointsSince(at float64, day bool) History {
	if day {
		return History{Step: h.dayStep.Seconds(), Points: h.day.pointsSince(at)}
	}
	return History{Step: h.hourStep.Seconds(), Points: h.hour.pointsSince(at)}
}

// hostHistories are the histories of hosts.
type hostHistories struct {
	at        cc.Time             // of the newest points; 0: there are none
	delivered map[string]cc.Bytes // by then, by Group.Key
	byHost    map[string]*hostHistory
}

// hostHistory is the history of one host.
type hostHistory struct {
	*history
	busy cc.Time // when it had bytes delivered last
}

// addPoints adds a point for each host, from the state of all groups. A host has a history from its first bytes on.
func (t *hostHistories) addPoints(groups []flow.Group, now cc.Time, wall float64) {
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
		if h := t.historyOf(host, p.Down+p.Up > 0, quietHistory); h != nil {
			h.addPoint(*p)
		}
	}
	for host, h := range t.byHost {
		if points[host] == nil {
			h.addPoint(Point{At: wall})
		}
	}
}

// historyOf returns the history of a host. A busy host without a history gets one, if there is a place, or if another
// host has not been busy for the time quiet. nil: it has none.
func (t *hostHistories) historyOf(host string, busy bool, quiet time.Duration) *hostHistory {
	h := t.byHost[host]
	if !busy {
		return h
	}
	if h == nil {
		if len(t.byHost) >= maxHostHistories && !t.dropQuietest(quiet) {
			return nil
		}
		if t.byHost == nil {
			t.byHost = map[string]*hostHistory{}
		}
		h = &hostHistory{history: newHistory(hostStep, hostLongStep)}
		t.byHost[host] = h
	}
	h.busy = t.at
	return h
}

// dropQuietest drops the history of the host that has not been busy for the longest time. It reports false if no host
// has been quiet for that long.
func (t *hostHistories) dropQuietest(quiet time.Duration) bool {
	quietest := ""
	for host, h := range t.byHost {
		if t.at.Sub(h.busy) >= quiet && (quietest == "" || h.busy < t.byHost[quietest].busy) {
			quietest = host
		}
	}
	delete(t.byHost, quietest)
	return quietest != ""
}

// pointRing has the newest points of a history.
type pointRing struct {
	ring []Point
	next int // where the next point goes once the ring is full
	most int // points in the ring
}

// newPointRing returns a ring of the last points that are a step apart.
func newPointRing(last, step time.Duration) pointRing { return pointRing{most: int(last / step)} }

// addPoint adds a point. If it is older than the newest one, the clock was set back, and all other points are dropped.
func (h *pointRing) addPoint(p Point) {
	if n := len(h.ring); n > 0 && p.At < h.ring[(h.next+n-1)%n].At {
		*h = pointRing{most: h.most}
	}
	if len(h.ring) < h.most {
		h.ring = append(h.ring, p)
		return
	}
	h.ring[h.next] = p
	h.next = (h.next + 1) % h.most
}

// mergePoints returns one point for several, at the time of the last: means of rates and of the median delay, the sum
// of what was refused, and the maximum of the rest.
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
func (h *pointRing) pointsSince(at float64) []Point {
	all := append(append(make([]Point, 0, len(h.ring)), h.ring[h.next:]...), h.ring[:h.next]...)
	i, _ := slices.BinarySearchFunc(all, at, func(p Point, at float64) int {
		if p.At <= at {
			return -1
		}
		return 1
	})
	return all[i:]
}

// counts are the proxy's counters at one moment.
type counts struct {
	at        cc.Time
	down, up  map[string]cc.Bytes // by listener
	refused   map[string]map[proxy.Reason]uint64
	fallbacks uint64
}

// newCounts adds up over all routes what the page draws as curves.
func newCounts(c proxy.Counters, fallbacks uint64, now cc.Time) counts {
	out := counts{
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

// refusedSince returns how many connections were refused after before. It calls addEvent for each listener and reason.
func (c counts) refusedSince(before counts, addEvent func(slog.Level, string, int)) (n uint64) {
	for listener, reasons := range c.refused {
		for reason, total := range reasons {
			if now := total - before.refused[listener][reason]; total > before.refused[listener][reason] {
				n += now
				addEvent(slog.LevelWarn, fmt.Sprintf("connections refused at %s: %s", listener, reason), int(now))
			}
		}
	}
	return n
}

// rateOf returns the rate at which a counter rose from was to is in the time d; 0: it did not rise.
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
