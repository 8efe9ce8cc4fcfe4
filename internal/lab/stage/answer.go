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

// answerOf finds it in the proxy's metrics; nil where there is none, as without our own
// congestion control in the kernel. What lies beyond the last bound is known to reach it.
func answerOf(m edge.Metrics) *Answer {
	h := m.Histogram("penstock_datapath_answer_seconds")
	if h.Count() == 0 || len(h.Bounds) < 2 {
		return nil
	}
	last := h.Bounds[len(h.Bounds)-2]
	return &Answer{
		Count: h.Count(), P50: 1e3 * min(last, edge.Quantile(h, 0.50)), P99: 1e3 * min(last, edge.Quantile(h, 0.99)),
	}
}
