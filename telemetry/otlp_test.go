package telemetry

import (
	"compress/gzip"
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	service "go.opentelemetry.io/proto/slim/otlp/collector/metrics/v1"
	metrics "go.opentelemetry.io/proto/slim/otlp/metrics/v1"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/penstock-net/penstock/telemetry/otlp"
)

// exported has a collector receive all metrics of busyProxy over TLS, and returns them by name. Its decoder, of the
// protocol's own schema, refuses fields that there are not.
func exported(t *testing.T, o Options) map[string]*metrics.Metric {
	t.Helper()
	out := map[string]*metrics.Metric{}
	server := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		assert.Equal(t, "POST /v1/metrics", r.Method+" "+r.URL.Path)
		assert.Equal(t, "application/json", r.Header.Get("Content-Type"))
		assert.Equal(t, "Bearer secret", r.Header.Get("Authorization"))
		z, err := gzip.NewReader(r.Body)
		if !assert.NoError(t, err) {
			return
		}
		body, err := io.ReadAll(z)
		assert.NoError(t, err)
		var request service.ExportMetricsServiceRequest
		if assert.NoError(t, protojson.Unmarshal(body, &request), string(body)) {
			for _, m := range request.GetResourceMetrics()[0].GetScopeMetrics()[0].GetMetrics() {
				out[m.GetName()] = m
			}
		}
	}))
	defer server.Close()
	e := &otlp.Exporter{
		Endpoint: server.URL + "/v1/metrics", Interval: time.Hour, Metrics: NewRegistry(busyProxy(), o), Version: "v1",
		Start: time.Unix(1.7e9, 0), Wall: time.Now, Transport: server.Client().Transport, Log: slog.New(slog.DiscardHandler),
	}
	e.SetHeaders(map[string]string{"Authorization": "Bearer secret"})
	ended, cancel := context.WithCancel(t.Context())
	cancel() // what is there is sent at the end
	e.ExportMetrics(ended)
	sent, _, _ := e.Counts()
	require.EqualValues(t, 1, sent)
	return out
}

func TestExportsHaveEveryFamilyAndTheNamesOfOpenTelemetry(t *testing.T) {
	got := exported(t, busyOptions(&handClock{t: 1}))
	for name, f := range gather(t, NewRegistry(busyProxy(), busyOptions(&handClock{t: 1}))) {
		m := got[name]
		require.NotNil(t, m, name)
		first := f.GetMetric()[0]
		switch f.GetType() {
		case dto.MetricType_COUNTER:
			assert.True(t, m.GetSum().GetIsMonotonic(), name)
			assert.Equal(t, metrics.AggregationTemporality_AGGREGATION_TEMPORALITY_CUMULATIVE,
				m.GetSum().GetAggregationTemporality(), name)
			assert.Len(t, m.GetSum().GetDataPoints(), len(f.GetMetric()), name)
		case dto.MetricType_GAUGE:
			assert.Len(t, m.GetGauge().GetDataPoints(), len(f.GetMetric()), name)
		case dto.MetricType_HISTOGRAM:
			p := m.GetHistogram().GetDataPoints()[0]
			assert.Equal(t, first.GetHistogram().GetSampleCount(), p.GetCount(), name)
			total := uint64(0)
			for _, n := range p.GetBucketCounts() {
				total += n
			}
			assert.Equal(t, p.GetCount(), total, name)
			assert.Len(t, p.GetBucketCounts(), len(p.GetExplicitBounds())+1, name)
		}
	}
	assert.Equal(t, "s", got["penstock_flow_dial_seconds"].GetUnit())

	values := map[string]float64{}
	for _, name := range []string{"connections", "retransmits", "resets"} {
		for _, p := range got["system.network.tcp."+name].GetSum().GetDataPoints() {
			for _, a := range p.GetAttributes() {
				name += " " + a.GetValue().GetStringValue()
			}
			values[name], name = p.GetAsDouble(), "connections"
		}
	}
	assert.Equal(t, map[string]float64{
		"connections server": 12, "connections client": 6, "connections refused client": 5, "retransmits": 7,
		"resets receive": 4,
	}, values)
	rtt := got["system.network.tcp.rtt"].GetHistogram().GetDataPoints()
	require.Len(t, rtt, 1)
	assert.EqualValues(t, 1, rtt[0].GetCount())
	assert.EqualValues(t, 6, got["system.network.tcp.connection.duration"].GetHistogram().GetDataPoints()[0].GetCount())
}
