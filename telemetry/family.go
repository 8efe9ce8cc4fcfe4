package telemetry

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// family is one metric with its labels. Every family is a value of a package variable, so the list of all families is
// complete before main begins.
type family struct {
	name   string   // with the prefix penstock_
	help   string   // docs/metrics.md repeats it
	labels []string // putSample takes their values in this order
	kind   prometheus.ValueType
	desc   *prometheus.Desc
}

// families has every family that newFamily made. The collector describes them, and the tests of the dashboard read
// them.
var families []*family

// newFamily adds a family to families.
func newFamily(kind prometheus.ValueType, name, help string, labels []string) *family {
	name = "penstock_" + name
	desc := prometheus.NewDesc(name, help, labels, nil)
	f := &family{name: name, help: help, labels: labels, kind: kind, desc: desc}
	families = append(families, f)
	return f
}

// newCounter returns a family of values that never go back while the process lives.
func newCounter(name, help string, labels ...string) *family {
	return newFamily(prometheus.CounterValue, name, help, labels)
}

// newGauge returns a family of values as they are now.
func newGauge(name, help string, labels ...string) *family {
	return newFamily(prometheus.GaugeValue, name, help, labels)
}

// newHistogram returns a family of distributions. Its samples are histogramSample.
func newHistogram(name, help string, labels ...string) *family {
	return newFamily(prometheus.UntypedValue, name, help, labels)
}

// sink takes the samples of one scrape.
type sink chan<- prometheus.Metric

// putSample sends one value with its labels. Bytes that are not UTF-8 are replaced, because the format forbids them.
func (s sink) putSample(f *family, v float64, labels ...string) {
	s <- prometheus.MustNewConstMetric(f.desc, f.kind, v, validLabels(labels)...)
}

// putHistogram sends the histogram h with its labels. The caller must not change h until the scrape ends.
func (s sink) putHistogram(f *family, h datapath.Histogram, labels ...string) {
	s <- histogramSample{f.desc, h, prometheus.MakeLabelPairs(f.desc, validLabels(labels))}
}

// validLabels replaces in place what is not UTF-8.
func validLabels(labels []string) []string {
	for i, value := range labels {
		labels[i] = strings.ToValidUTF8(value, "\uFFFD")
	}
	return labels
}

// histogramSample implements prometheus.Metric. prometheus.NewConstHistogram wants the buckets in a map and sorts them
// again, which takes most of the time of a scrape.
type histogramSample struct {
	desc   *prometheus.Desc
	values datapath.Histogram
	labels []*dto.LabelPair
}

// Desc implements prometheus.Metric.
func (h histogramSample) Desc() *prometheus.Desc { return h.desc }

// Write implements prometheus.Metric. Prometheus wants cumulative buckets, and takes the count for the last one, which
// has no bound.
func (h histogramSample) Write(out *dto.Metric) error {
	count, buckets := uint64(0), make([]*dto.Bucket, len(h.values.Bounds))
	for i := range h.values.Bounds {
		count += h.values.Counts[i]
		buckets[i] = &dto.Bucket{UpperBound: &h.values.Bounds[i], CumulativeCount: new(count)}
	}
	out.Label = h.labels
	out.Histogram = &dto.Histogram{SampleCount: new(h.values.Count()), SampleSum: &h.values.Sum, Bucket: buckets}
	return nil
}
