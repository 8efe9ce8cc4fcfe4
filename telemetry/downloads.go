package telemetry

import (
	"maps"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/telemetry/compare"
)

const (
	// maxDownloadRules bounds the rules with histograms of their own. Each has 3 for each of 4 size classes: 12 series
	// where they are scraped as native histograms, and about 150 as text.
	maxDownloadRules = 256
	// otherRules counts the rules beyond the bound, together.
	otherRules = "(others)"
	// maxObservedHosts bounds the hosts with a known base round trip.
	maxObservedHosts = 20000
)

// Downloads counts connections that are over. Downloads are counted by rule and size: how long they took, how fast
// they were, and how long their last bytes were queued. Unmanaged connections count too, so that rules can be
// compared. It is safe for concurrent use.
type Downloads struct {
	mu    sync.Mutex
	bases hostBases
	rules map[string]bool // those that have series

	took, rate, queueing *prometheus.HistogramVec
	rtt                  *prometheus.HistogramVec // of all connections, by leg
	retransmits          map[string]uint64        // segments sent again, by leg
}

// newDownloadVec returns the histograms of a family. Each native bucket is a tenth wider than the one before, and
// there are at most 100. There are few classic buckets, because the text format makes a series of each.
func newDownloadVec(f *family, classic ...float64) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: f.name, Help: f.help, Buckets: classic,
		NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 100, NativeHistogramMinResetDuration: time.Hour,
	}, f.labels)
}

// NewDownloads returns one that has counted nothing.
func NewDownloads() *Downloads {
	return &Downloads{
		rules:       map[string]bool{},
		retransmits: map[string]uint64{"client": 0, "server": 0},
		rtt:         newDownloadVec(lastRTT, .001, .003, .01, .03, .1, .3, 1, 3),
		took:        newDownloadVec(downloadTook, .1, .3, 1, 3, 10, 30, 100, 300, 1000),
		rate:        newDownloadVec(downloadRate, 1e4, 3e4, 1e5, 3e5, 1e6, 3e6, 1e7, 3e7, 1e8),
		queueing:    newDownloadVec(downloadQueueing, .005, .01, .02, .05, .1, .2, .5, 1, 3),
	}
}

// ObserveClosed counts a connection that is over.
func (d *Downloads) ObserveClosed(now time.Time, f *proxy.FlowInfo) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.countLeg("client", &f.Client)
	d.countLeg("server", &f.Server)
	took := (f.Age - f.Idle).Seconds()
	if f.Down.Written == 0 || took <= 0 {
		return
	}
	rule, size := f.Rule, compare.SizeClass(int64(f.Down.Written))
	if !d.rules[rule] && len(d.rules) >= maxDownloadRules {
		rule = otherRules
	}
	d.rules[rule] = true
	d.took.WithLabelValues(rule, size).Observe(took)
	d.rate.WithLabelValues(rule, size).Observe(float64(f.Down.Written) / took)
	if f.Client.SRTT > 0 {
		base := d.bases.updateBase(now, f.ClientHost(), f.Client.MinRTT)
		d.queueing.WithLabelValues(rule, size).Observe(max(0, f.Client.SRTT-base).Seconds())
	}
	d.bases.dropOldHosts(now)
}

// countLeg counts a leg that is over. The caller holds mu.
func (d *Downloads) countLeg(name string, leg *datapath.Info) {
	if leg.SRTT > 0 {
		d.rtt.WithLabelValues(name).Observe(leg.SRTT.Seconds())
	}
	d.retransmits[name] += uint64(leg.Retransmits)
}

// dropOldRules drops the series of rules without a route. Such a rule is no longer in force, because a rule in force
// has a route from its first connection on.
func (d *Downloads) dropOldRules(routes []proxy.RouteCounters) {
	inForce := map[string]bool{otherRules: true}
	for _, r := range routes {
		inForce[r.Rule] = true
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for rule := range d.rules {
		if !inForce[rule] {
			delete(d.rules, rule)
			for _, vec := range []*prometheus.HistogramVec{d.took, d.rate, d.queueing} {
				vec.DeletePartialMatch(prometheus.Labels{"rule": rule})
			}
		}
	}
}

// writeMetrics writes all histograms.
func (d *Downloads) writeMetrics(out sink) {
	for _, vec := range []*prometheus.HistogramVec{d.took, d.rate, d.queueing, d.rtt} {
		vec.Collect(out)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for leg, n := range d.retransmits {
		out.putSample(retransmits, float64(n), leg)
	}
}

// hostBases has the least round trip of each host, over all of its connections. One connection does not see it where
// another one fills the queue. The zero value is empty.
type hostBases map[string]*hostState

// hostState is what is known of one host.
type hostState struct {
	base   time.Duration // the least round trip that any of its legs has seen; 0: unknown
	seenAt time.Time     // the time of the last update
}

// updateBase lowers the base of a host to the least round trip of one of its legs, and returns the base. 0: unknown.
func (b *hostBases) updateBase(now time.Time, host string, least time.Duration) time.Duration {
	if *b == nil {
		*b = hostBases{}
	}
	h := (*b)[host]
	if h == nil {
		h = &hostState{base: least}
		(*b)[host] = h
	}
	h.seenAt = now
	if least > 0 && (least < h.base || h.base == 0) {
		h.base = least
	}
	return h.base
}

// dropOldHosts drops hosts without an update for an hour, once there are too many. If too many are left it drops any
// of them, down to half of the bound, so that this happens rarely.
func (b hostBases) dropOldHosts(now time.Time) {
	if len(b) <= maxObservedHosts {
		return
	}
	maps.DeleteFunc(b, func(_ string, h *hostState) bool { return now.Sub(h.seenAt) > time.Hour })
	if len(b) <= maxObservedHosts {
		return
	}
	for host := range b {
		if delete(b, host); len(b) <= maxObservedHosts/2 {
			return
		}
	}
}
