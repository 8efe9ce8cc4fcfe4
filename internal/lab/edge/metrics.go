package edge

import (
	"bytes"
	"context"
	"fmt"
	"math"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// Metrics holds metric families by name.
type Metrics map[string]*dto.MetricFamily

// Metrics fetches and parses the proxy's /metrics page.
func (p *Proxy) Metrics(ctx context.Context) (Metrics, error) {
	page, err := p.Get(ctx, "/metrics")
	if err != nil {
		return nil, err
	}
	return ReadMetrics(page)
}

// ReadMetrics parses the Prometheus text format.
func ReadMetrics(page []byte) (Metrics, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	m, err := parser.TextToMetricFamilies(bytes.NewReader(page))
	if err != nil {
		err = fmt.Errorf("read the proxy's metrics: %w", err)
	}
	return m, err
}

// Count returns the sum of a counter's series, 0 if there is no such counter.
func (m Metrics) Count(name string) (n int) {
	for _, series := range m[name].GetMetric() {
		n += int(series.GetCounter().GetValue())
	}
	return n
}

// Histogram returns the sum of a histogram's series, which must have the same bounds. It is
// empty if there is no such histogram.
func (m Metrics) Histogram(name string) (sum datapath.Histogram) {
	for _, series := range m[name].GetMetric() {
		h, below := series.GetHistogram(), uint64(0)
		sum.Sum += h.GetSampleSum()
		for i, b := range h.GetBucket() {
			if len(sum.Counts) == i {
				sum.Counts = append(sum.Counts, 0)
				if bound := b.GetUpperBound(); !math.IsInf(bound, 1) {
					sum.Bounds = append(sum.Bounds, bound)
				}
			}
			sum.Counts[i] += b.GetCumulativeCount() - below
			below = b.GetCumulativeCount()
		}
	}
	return sum
}

// Quantile returns the given quantile (part: 0 to 1) of a histogram in seconds, interpolated
// linearly within a bucket. It is infinite in the bucket without an upper bound, and NaN if the
// histogram is empty.
func Quantile(h datapath.Histogram, part float64) float64 {
	left := part * float64(h.Count())
	for i, n := range h.Counts {
		if float64(n) < left || n == 0 {
			left -= float64(n)
			continue
		}
		low, high := 0.0, math.Inf(1)
		if i > 0 {
			low = h.Bounds[i-1]
		}
		if i < len(h.Bounds) {
			high = h.Bounds[i]
		}
		return low + (high-low)*left/float64(n)
	}
	return math.NaN()
}
