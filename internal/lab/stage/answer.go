package stage

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// answerMetric is the proxy's own account of the time from an acknowledgement
// until the kernel had the window computed from it. Only where our congestion
// control runs there is one.
const answerMetric = "penstock_datapath_answer_seconds"

// Answer summarises that account, in milliseconds; quantiles are interpolated
// within the histogram's buckets.
type Answer struct {
	Count uint64  `json:"count"`
	P50   float64 `json:"p50"`
	P99   float64 `json:"p99"`
}

// readAnswer finds it in the proxy's metrics; nil when there is none.
func readAnswer(metrics io.Reader) (*Answer, error) {
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(metrics)
	if err != nil {
		return nil, fmt.Errorf("read the proxy's metrics: %w", err)
	}
	buckets := sumBuckets(families[answerMetric])
	if len(buckets) == 0 || buckets[len(buckets)-1].count == 0 {
		return nil, nil
	}
	return &Answer{
		Count: uint64(buckets[len(buckets)-1].count),
		P50:   quantile(buckets, 0.50) * 1e3,
		P99:   quantile(buckets, 0.99) * 1e3,
	}, nil
}

// bucket counts the observations up to a bound.
type bucket struct{ bound, count float64 }

// sumBuckets adds up a histogram's series. The last bucket has no bound.
func sumBuckets(family *dto.MetricFamily) []bucket {
	var buckets []bucket
	for _, m := range family.GetMetric() {
		h := m.GetHistogram()
		series := []bucket{{math.Inf(1), float64(h.GetSampleCount())}}
		for _, b := range h.GetBucket() {
			if !math.IsInf(b.GetUpperBound(), 1) {
				series = append(series, bucket{b.GetUpperBound(), float64(b.GetCumulativeCount())})
			}
		}
		for _, b := range series {
			i := slices.IndexFunc(buckets, func(o bucket) bool { return o.bound == b.bound })
			if i < 0 {
				buckets = append(buckets, b)
			} else {
				buckets[i].count += b.count
			}
		}
	}
	slices.SortFunc(buckets, func(a, b bucket) int { return cmp.Compare(a.bound, b.bound) })
	return buckets
}

// quantile interpolates as Prometheus does: evenly within a bucket, the first
// one beginning at 0; what lies in the last is only known to reach its beginning.
func quantile(buckets []bucket, q float64) float64 {
	rank := q * buckets[len(buckets)-1].count
	var below bucket
	for _, b := range buckets {
		if b.count >= rank && b.count > below.count {
			if math.IsInf(b.bound, 1) {
				return below.bound
			}
			return below.bound + (b.bound-below.bound)*(rank-below.count)/(b.count-below.count)
		}
		below = b
	}
	return below.bound
}
