package stage

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/lab/edge"
)

func TestReadAnswer(t *testing.T) {
	const head = "# TYPE penstock_datapath_answer_seconds histogram\n"
	for name, c := range map[string]struct {
		metrics string
		want    *Answer
	}{
		"interpolated evenly within a bucket": {
			head + `penstock_datapath_answer_seconds_bucket{le="0.001"} 50
penstock_datapath_answer_seconds_bucket{le="0.002"} 98
penstock_datapath_answer_seconds_bucket{le="0.004"} 100
penstock_datapath_answer_seconds_bucket{le="+Inf"} 100
penstock_datapath_answer_seconds_sum 0.1
penstock_datapath_answer_seconds_count 100
`, &Answer{Count: 100, P50: 1, P99: 3},
		},
		"several series are one": {
			head + `penstock_datapath_answer_seconds_bucket{leg="client",le="0.001"} 10
penstock_datapath_answer_seconds_bucket{leg="client",le="+Inf"} 10
penstock_datapath_answer_seconds_count{leg="client"} 10
penstock_datapath_answer_seconds_bucket{leg="server",le="0.001"} 30
penstock_datapath_answer_seconds_bucket{leg="server",le="+Inf"} 30
penstock_datapath_answer_seconds_count{leg="server"} 30
`, &Answer{Count: 40, P50: 0.5, P99: 0.99},
		},
		"beyond the last bound is known to reach it": {
			head + `penstock_datapath_answer_seconds_bucket{le="0.001"} 0
penstock_datapath_answer_seconds_bucket{le="0.002"} 60
penstock_datapath_answer_seconds_bucket{le="+Inf"} 100
penstock_datapath_answer_seconds_count 100
`, &Answer{Count: 100, P50: 1 + 50./60, P99: 2},
		},
		"nothing was answered": {head + `penstock_datapath_answer_seconds_bucket{le="0.001"} 0
penstock_datapath_answer_seconds_bucket{le="+Inf"} 0
penstock_datapath_answer_seconds_count 0
`, nil},
		"another envelope":  {"# TYPE penstock_draining gauge\npenstock_draining 0\n", nil},
		"no metrics at all": {"", nil},
	} {
		t.Run(name, func(t *testing.T) {
			metrics, err := edge.ReadMetrics(strings.NewReader(c.metrics))
			require.NoError(t, err)
			got := answerOf(metrics)
			if c.want == nil {
				assert.Nil(t, got)
				return
			}
			require.NotNil(t, got)
			assert.Equal(t, c.want.Count, got.Count)
			assert.InDelta(t, c.want.P50, got.P50, 1e-9)
			assert.InDelta(t, c.want.P99, got.P99, 1e-9)
		})
	}
	_, err := edge.ReadMetrics(strings.NewReader("<html>"))
	assert.ErrorContains(t, err, "read the proxy's metrics")
}
