// Package compare says what one rule gains over another on the traffic of a running proxy. Observations are kept by
// rule and host, since the connections of one host are not independent of each other. Compare draws whole hosts for
// its intervals. The package is pure: time is an argument.
//
// The files, from what calls to what is called: compare.go, bootstrap.go, units.go.
package compare

import (
	"math"
	"slices"
	"sync"
	"time"
)

const (
	// keep is how long an observation counts.
	keep = 24 * time.Hour
	// maxUnits bounds the units that a Recorder holds, of about 700 bytes each.
	maxUnits = 20000
	// delayBuckets are those of queueing delays, from a tenth of a millisecond on, each a tenth wider than the one
	// before: the last begins at 17 s.
	delayBuckets = 128
	firstDelay   = 1e-4
	delayGrowth  = 1.1
)

// sizeClasses are the upper bounds of the classes of downloads, in bytes; the last class has none.
var sizeClasses = [...]int64{100e3, 1e6, 10e6}

// SizeClass names the class of a download, by its bytes.
func SizeClass(bytes int64) string {
	return [...]string{"up_to_100kB", "up_to_1MB", "up_to_10MB", "larger"}[classOf(bytes)]
}

// classOf is the number of the class of a download.
func classOf(bytes int64) int {
	class, _ := slices.BinarySearch(sizeClasses[:], bytes)
	return class
}

// times sums up how long downloads of one size class took.
type times struct{ count, seconds float64 }

// mean is the mean time in seconds; NaN of none.
func (t times) mean() float64 { return t.seconds / t.count }

// Unit sums up what one host saw under one rule in one hour. The zero value is empty.
type Unit struct {
	delays  [delayBuckets]uint32 // observations of queueing delay, one for each busy second
	seconds float64              // the sum of these delays
	bytes   float64              // delivered in busy seconds
	busy    float64              // busy seconds
	took    [len(sizeClasses) + 1]times
}

// addUnit adds all of o.
func (u *Unit) addUnit(o *Unit) {
	for i, n := range o.delays {
		u.delays[i] += n
	}
	u.seconds += o.seconds
	u.bytes += o.bytes
	u.busy += o.busy
	for i, t := range o.took {
		u.took[i].count += t.count
		u.took[i].seconds += t.seconds
	}
}

// ObserveSecond adds one second in which a host was busy: its queueing delay, and the bytes that it got.
func (u *Unit) ObserveSecond(delay time.Duration, bytes float64) {
	bucket := 0
	if s := delay.Seconds(); s > firstDelay {
		bucket = min(delayBuckets-1, 1+int(math.Log(s/firstDelay)/math.Log(delayGrowth)))
	}
	u.delays[bucket]++
	u.seconds += delay.Seconds()
	u.bytes += bytes
	u.busy++
}

// ObserveDownload adds a download that is over.
func (u *Unit) ObserveDownload(bytes int64, took time.Duration) {
	t := &u.took[classOf(bytes)]
	t.count++
	t.seconds += took.Seconds()
}

// delayQuantile is the p-quantile of the queueing delays in seconds, to a tenth of itself; NaN of none.
func (u *Unit) delayQuantile(p float64) float64 {
	total := 0.0
	for _, n := range u.delays {
		total += float64(n)
	}
	if total == 0 {
		return math.NaN()
	}
	left := p * total
	for i, n := range u.delays {
		if left -= float64(n); left <= 0 {
			if i == 0 {
				return firstDelay / 2
			}
			// The rest of the bucket is interpolated, so that the quantile moves with small differences.
			part := 1 + left/max(1, float64(n))
			return firstDelay * math.Pow(delayGrowth, float64(i-1)+part)
		}
	}
	return firstDelay * math.Pow(delayGrowth, delayBuckets-1)
}

// Recorder keeps the observations of the last day. The zero value is empty. It is safe for concurrent use.
type Recorder struct {
	mu    sync.Mutex
	units map[unitKey]*Unit
}

// unitKey names a unit.
type unitKey struct {
	rule, host string
	hour       int64 // since the epoch of the caller's clock
}

// hourOf is the number of the hour of a moment.
func hourOf(now time.Time) int64 { return now.Unix() / 3600 }

// Observe calls add with the unit of a rule and a host at a moment. Beyond maxUnits the hosts that are new are left
// out, because leaving out those that are known would favour short observations.
func (r *Recorder) Observe(now time.Time, rule, host string, add func(*Unit)) {
	k := unitKey{rule, host, hourOf(now)}
	r.mu.Lock()
	defer r.mu.Unlock()
	u := r.units[k]
	if u == nil {
		r.forgetOld(k.hour)
		if len(r.units) >= maxUnits {
			return
		}
		if r.units == nil {
			r.units = map[unitKey]*Unit{}
		}
		u = &Unit{}
		r.units[k] = u
	}
	add(u)
}

// forgetOld drops the units that are older than a day. It looks at them only when they are full. The caller holds mu.
func (r *Recorder) forgetOld(hour int64) {
	if len(r.units) < maxUnits {
		return
	}
	for k := range r.units {
		if k.hour < hour-int64(keep/time.Hour) {
			delete(r.units, k)
		}
	}
}

// hostsOf returns the sums of each host of a rule over the last day, in the order of their names, so that an interval
// is the same each time.
func (r *Recorder) hostsOf(now time.Time, rule string) []Unit {
	oldest := hourOf(now.Add(-keep))
	r.mu.Lock()
	sums := map[string]*Unit{}
	for k, u := range r.units {
		if k.rule != rule || k.hour < oldest {
			continue
		}
		if sums[k.host] == nil {
			sums[k.host] = &Unit{}
		}
		sums[k.host].addUnit(u)
	}
	r.mu.Unlock()
	names := make([]string, 0, len(sums))
	for name := range sums {
		names = append(names, name)
	}
	slices.Sort(names)
	out := make([]Unit, len(names))
	for i, name := range names {
		out[i] = *sums[name]
	}
	return out
}
