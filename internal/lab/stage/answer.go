package stage

import "github.com/penstock-net/penstock/internal/lab/edge"

// Answer summarises the proxy's own account of the time from an acknowledgement until
// the kernel had the window computed from it, in milliseconds; quantiles are
// interpolated within the histogram's buckets.
type Answer struct {
	Count uint64  `json:"count"`
	P50   float64 `json:"p50"`
	P99   float64 `json:"p99"`
}

// answerOf reads the answer times from the proxy's metrics. It returns nil if there are none,
// as without our own congestion control in the kernel. A quantile beyond the last bound is
// reported as that bound.
func answerOf(m edge.Metrics) *Answer {
	h := m.Histogram("penstock_datapath_answer_seconds")
	if h.Count() == 0 || len(h.Bounds) == 0 {
		return nil
	}
	last := h.Bounds[len(h.Bounds)-1]
	return &Answer{
		Count: h.Count(), P50: 1e3 * min(last, edge.Quantile(h, 0.50)), P99: 1e3 * min(last, edge.Quantile(h, 0.99)),
	}
}
