package telemetry

import (
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// sampleEvery is the least time between two samples, so that a second scraper
// does not count everything twice.
const sampleEvery = time.Second

// sampler has the distributions of what does not add up over flows. At each scrape, every leg that has moved bytes
// since the last scrape adds one observation. A mean would hide a single bad leg, and a series for each flow would be
// too many for a database. Idle connections add nothing, because their last values are old. The counts never go back,
// so rates and quantiles over time work as for any histogram.
type sampler struct {
	mu      sync.Mutex // held from beginSample to endSample
	last    cc.Time    // when the last sample began; 0: there was none
	seen    []moved    // at the last sample, by flow
	client  legDistributions
	server  legDistributions
	control map[controlKey]*distribution // queueing delays
}

// legDistributions are those of the legs of one side.
type legDistributions struct{ rtt, minRTT, queueing, delivery distribution }

// distribution is a histogram that grows by single values. The zero value is empty.
type distribution struct{ datapath.Histogram }

// observeValue counts v in one of the buckets with these bounds, which are the same in each call.
func (d *distribution) observeValue(bounds []float64, v float64) {
	if d.Counts == nil {
		d.Bounds, d.Counts = bounds, make([]uint64, len(bounds)+1)
	}
	d.Counts[sort.SearchFloat64s(bounds, v)]++
	d.Sum += v
}

// writeMetric sends a copy, because the next sample may change d before the scrape has read it. An empty one is left
// out.
func (d *distribution) writeMetric(out sink, f *family, labels ...string) {
	if d.Counts != nil {
		out.putHistogram(f, datapath.Histogram{Bounds: d.Bounds, Counts: slices.Clone(d.Counts), Sum: d.Sum}, labels...)
	}
}

// moved is how many bytes each direction of a flow had written at a sample. A flow is busy if it has written more
// since.
type moved struct {
	flow     uint64
	down, up cc.Bytes
}

// delayBuckets are seconds, from a local network to a bloated cellular buffer.
var delayBuckets = []float64{.0005, .001, .002, .005, .01, .02, .03, .05, .075, .1, .15, .2, .3, .5, .75, 1, 2, 5, 10}

// rateBuckets are bytes per second, from 80 kbit/s to 8 Gbit/s, four a decade.
var rateBuckets = []float64{
	1e4, 1.8e4, 3.2e4, 5.6e4, 1e5, 1.8e5, 3.2e5, 5.6e5, 1e6, 1.8e6, 3.2e6, 5.6e6,
	1e7, 1.8e7, 3.2e7, 5.6e7, 1e8, 1.8e8, 3.2e8, 5.6e8, 1e9,
}

// newSampler returns one that has seen nothing.
func newSampler() *sampler { return &sampler{control: map[controlKey]*distribution{}} }

// writeMetrics writes all distributions that have values.
func (s *sampler) writeMetrics(out sink) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, leg := range map[string]*legDistributions{"client": &s.client, "server": &s.server} {
		leg.rtt.writeMetric(out, rtt, name)
		leg.minRTT.writeMetric(out, minRTT, name)
		leg.queueing.writeMetric(out, queueing, name)
		leg.delivery.writeMetric(out, delivery, name)
	}
	for k, d := range s.control {
		d.writeMetric(out, ccDelay, k.algorithm, k.direction)
	}
}

// sample is the part of one scrape in the distributions. All methods do nothing on nil.
type sample struct {
	*sampler
	before []moved // what addFlow has not passed yet of the flows in the last sample
	now    []moved
}

// beginSample locks s until endSample. It returns nil within sampleEvery of the last sample.
func (s *sampler) beginSample(now cc.Time) *sample {
	s.mu.Lock()
	if s.last != 0 && now.Sub(s.last) < sampleEvery {
		s.mu.Unlock()
		return nil
	}
	s.last = now
	return &sample{s, s.seen, make([]moved, 0, len(s.seen))}
}

// endSample stores what the flows have moved, for the next sample, and unlocks the sampler.
func (s *sample) endSample() {
	if s != nil {
		s.seen = s.now
		s.mu.Unlock()
	}
}

// addFlow adds one observation for each busy leg. Flows come in the order of their numbers.
func (s *sample) addFlow(f *proxy.FlowInfo) {
	if s == nil || !f.Relayed() {
		return
	}
	for len(s.before) > 0 && s.before[0].flow < f.ID {
		s.before = s.before[1:]
	}
	before, now := moved{}, moved{f.ID, f.Down.Written, f.Up.Written}
	if len(s.before) > 0 && s.before[0].flow == f.ID {
		before = s.before[0]
	}
	s.now = append(s.now, now)
	downBusy, upBusy := now.down > before.down, now.up > before.up
	if downBusy {
		s.client.observeLeg(&f.Client)
	}
	if upBusy {
		s.server.observeLeg(&f.Server)
	}
	for k, c := range controlledWindows(f) {
		busy := upBusy
		if k.direction == "down" || k.direction == "from_server" {
			busy = downBusy
		}
		if busy && c.LatestRTT > 0 {
			d := s.control[k]
			if d == nil {
				d = &distribution{}
				s.control[k] = d
			}
			d.observeValue(delayBuckets, c.QueueingDelay.Seconds())
		}
	}
}

// observeLeg adds what the leg's transport knows so far; 0: unknown.
func (d *legDistributions) observeLeg(i *datapath.Info) {
	if i.SRTT > 0 {
		d.rtt.observeValue(delayBuckets, i.SRTT.Seconds())
	}
	if i.MinRTT > 0 {
		d.minRTT.observeValue(delayBuckets, i.MinRTT.Seconds())
		d.queueing.observeValue(delayBuckets, max(0, i.SRTT-i.MinRTT).Seconds())
	}
	if i.DeliveryRate > 0 {
		d.delivery.observeValue(rateBuckets, float64(i.DeliveryRate)/8)
	}
}
