package otlp

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"
)

// cumulative is the aggregation temporality of sums and histograms: since the start, as Prometheus counts.
const cumulative = 2

// The types below are messages of opentelemetry/proto/metrics/v1/metrics.proto in its JSON encoding: keys in lower
// camel case, 64-bit integers as strings. Only fields that are used are there.
type (
	request struct {
		ResourceMetrics []resourceMetrics `json:"resourceMetrics"`
	}
	resourceMetrics struct {
		Resource     resource       `json:"resource"`
		ScopeMetrics []scopeMetrics `json:"scopeMetrics"`
	}
	resource struct {
		Attributes []attribute `json:"attributes"`
	}
	scopeMetrics struct {
		Scope   scope     `json:"scope"`
		Metrics []*metric `json:"metrics"`
	}
	scope struct {
		Name    string `json:"name"`
		Version string `json:"version"`
	}
	attribute struct {
		Key   string `json:"key"`
		Value struct {
			StringValue string `json:"stringValue"`
		} `json:"value"`
	}
	// metric has one of Gauge, Sum, Histogram and Summary.
	metric struct {
		Name        string `json:"name"`
		Description string `json:"description"`
		Unit        string `json:"unit,omitempty"`
		Gauge       *data  `json:"gauge,omitempty"`
		Sum         *data  `json:"sum,omitempty"`
		Histogram   *data  `json:"histogram,omitempty"`
		Summary     *data  `json:"summary,omitempty"`
	}
	data struct {
		DataPoints             []*point `json:"dataPoints"`
		AggregationTemporality int      `json:"aggregationTemporality,omitempty"`
		IsMonotonic            bool     `json:"isMonotonic,omitempty"`
	}
	// point has AsDouble for a gauge or a sum, and the fields after it for a histogram or a summary.
	point struct {
		Attributes        []attribute `json:"attributes,omitempty"`
		StartTimeUnixNano int64       `json:"startTimeUnixNano,string"`
		TimeUnixNano      int64       `json:"timeUnixNano,string"`
		AsDouble          *float64    `json:"asDouble,omitempty"`
		Count             *count      `json:"count,omitempty"`
		Sum               *float64    `json:"sum,omitempty"`
		BucketCounts      []count     `json:"bucketCounts,omitempty"`
		ExplicitBounds    []float64   `json:"explicitBounds,omitempty"`
		QuantileValues    []quantile  `json:"quantileValues,omitempty"`
	}
	quantile struct {
		Quantile float64 `json:"quantile"`
		Value    float64 `json:"value"`
	}
	// count is a 64-bit integer, which JSON's numbers do not have room for.
	count uint64
)

// MarshalJSON implements json.Marshaler.
func (c count) MarshalJSON() ([]byte, error) {
	return strconv.AppendQuote(nil, strconv.FormatUint(uint64(c), 10)), nil
}

// attributesOf returns attributes from pairs of keys and values.
func attributesOf(pairs ...string) []attribute {
	var out []attribute
	for pair := range slices.Chunk(pairs, 2) {
		a := attribute{Key: pair[0]}
		a.Value.StringValue = pair[1]
		out = append(out, a)
	}
	return out
}

// newRequest encodes all families as of now. Counts began at start.
func newRequest(families []*dto.MetricFamily, start, now time.Time, version string, about []attribute) request {
	var metrics []*metric
	for _, f := range families {
		if m := describeFamily(f, start, now); m != nil {
			metrics = append(metrics, m)
		}
	}
	metrics = append(metrics, deriveMetrics(families, start, now)...)
	return request{[]resourceMetrics{{
		Resource: resource{about},
		ScopeMetrics: []scopeMetrics{{
			Scope:   scope{"github.com/penstock-net/penstock/telemetry", version},
			Metrics: metrics,
		}},
	}}}
}

// describeFamily returns a family under its own name; nil: it is of a kind that OTLP does not have, or has no points.
func describeFamily(f *dto.MetricFamily, start, now time.Time) *metric {
	d := &data{}
	for _, m := range f.GetMetric() {
		var pairs []string
		for _, l := range m.GetLabel() {
			pairs = append(pairs, l.GetName(), l.GetValue())
		}
		if p := describePoint(m, start, now); p != nil {
			p.Attributes = attributesOf(pairs...)
			d.DataPoints = append(d.DataPoints, p)
		}
	}
	return newMetric(f.GetName(), f.GetHelp(), unitOf(f.GetName()), f.GetType(), d)
}

// newMetric returns a metric of that kind with the points of d; nil: there are none, or OTLP does not have the kind.
func newMetric(name, description, unit string, kind dto.MetricType, d *data) *metric {
	m := &metric{Name: name, Description: description, Unit: unit}
	switch kind {
	case dto.MetricType_GAUGE:
		m.Gauge = d
	case dto.MetricType_COUNTER:
		d.AggregationTemporality, d.IsMonotonic = cumulative, true
		m.Sum = d
	case dto.MetricType_HISTOGRAM:
		d.AggregationTemporality = cumulative
		m.Histogram = d
	case dto.MetricType_SUMMARY:
		m.Summary = d
	default:
		return nil
	}
	if len(d.DataPoints) == 0 {
		return nil
	}
	return m
}

// describePoint returns a sample without its labels; nil: JSON has no number for its value.
func describePoint(m *dto.Metric, start, now time.Time) *point {
	p := &point{StartTimeUnixNano: start.UnixNano(), TimeUnixNano: now.UnixNano()}
	switch {
	case m.GetCounter() != nil:
		p.AsDouble = new(m.GetCounter().GetValue())
	case m.GetGauge() != nil:
		p.AsDouble = new(m.GetGauge().GetValue())
	case m.GetHistogram() != nil:
		h := m.GetHistogram()
		p.Count, p.Sum = new(count(h.GetSampleCount())), new(h.GetSampleSum())
		below := uint64(0)
		for _, b := range h.GetBucket() {
			if !isFinite(b.GetUpperBound()) {
				continue // implied by the count
			}
			p.ExplicitBounds = append(p.ExplicitBounds, b.GetUpperBound())
			p.BucketCounts = append(p.BucketCounts, count(b.GetCumulativeCount()-below))
			below = b.GetCumulativeCount()
		}
		p.BucketCounts = append(p.BucketCounts, count(h.GetSampleCount()-below))
	case m.GetSummary() != nil:
		p.Count, p.Sum = new(count(m.GetSummary().GetSampleCount())), new(m.GetSummary().GetSampleSum())
		for _, q := range m.GetSummary().GetQuantile() {
			if isFinite(q.GetValue()) {
				p.QuantileValues = append(p.QuantileValues, quantile{q.GetQuantile(), q.GetValue()})
			}
		}
	}
	if p.AsDouble != nil && !isFinite(*p.AsDouble) || p.Sum != nil && !isFinite(*p.Sum) {
		return nil
	}
	return p
}

// isFinite reports whether JSON has a number for v.
func isFinite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }

// unitOf returns the unit that a metric's name ends in, as UCUM has it; empty: none.
func unitOf(name string) string {
	name = strings.TrimSuffix(name, "_total")
	for _, u := range [][2]string{{"_bytes_per_second", "By/s"}, {"_seconds", "s"}, {"_bytes", "By"}} {
		if strings.HasSuffix(name, u[0]) {
			return u[1]
		}
	}
	return ""
}

// derived is a metric under the name that OpenTelemetry proposes for TCP (semantic-conventions#3682), summed up from
// families of ours.
type derived struct {
	name, unit, description string
	kind                    dto.MetricType
	from                    []source
}

// source is a family that a derived metric is summed up from.
type source struct {
	family string
	// attributes returns the attributes of a sample as pairs of keys and values. ok is false if the sample is left out.
	attributes func(label func(name string) string) (pairs []string, ok bool)
}

// roleKey is the role of the proxy in the handshake: client on legs to servers, server on legs to clients.
const roleKey = "network.tcp.handshake.role"

// withAttributes gives each sample the same attributes.
func withAttributes(pairs ...string) func(func(string) string) ([]string, bool) {
	return func(func(string) string) ([]string, bool) { return pairs, true }
}

// byLeg gives a sample the role of the proxy on its leg.
func byLeg(label func(string) string) ([]string, bool) {
	if label("leg") == "client" {
		return []string{roleKey, "server"}, true
	}
	return []string{roleKey, "client"}, true
}

// dialErrors has the value of error.type for each reason why a server was not reached.
var dialErrors = map[string]string{
	"dial_refused": "refused", "dial_timeout": "timed_out", "dial_unreachable": "host_unreachable",
	"dial_error": "_OTHER",
}

// allDerived are all derived metrics. The duration of handshakes is left out, because the time of a dial includes the
// look-up of a name.
var allDerived = []derived{
	{
		"system.network.tcp.rtt", "s", "Smoothed round-trip time of a connection, recorded at its end.",
		dto.MetricType_HISTOGRAM,
		[]source{{"penstock_tcp_last_rtt_seconds", byLeg}},
	},
	{
		"system.network.tcp.connections", "{connection}",
		"Connections that were established, and with error.type those that were not.",
		dto.MetricType_COUNTER,
		[]source{
			{"penstock_connections_accepted_total", withAttributes(roleKey, "server")},
			{"penstock_flow_dial_seconds", withAttributes(roleKey, "client")},
			{"penstock_flow_rejections_total", func(label func(string) string) ([]string, bool) {
				kind, ok := dialErrors[label("reason")]
				return []string{"error.type", kind, roleKey, "client"}, ok
			}},
		},
	},
	{
		"system.network.tcp.connection.duration", "s", "Time from establishment to close, recorded at close.",
		dto.MetricType_HISTOGRAM,
		[]source{{"penstock_flow_duration_seconds", withAttributes(roleKey, "server")}},
	},
	{
		"system.network.tcp.retransmits", "{segment}", "Segments retransmitted, recorded at close.",
		dto.MetricType_COUNTER,
		[]source{{"penstock_tcp_retransmitted_segments_total", withAttributes()}},
	},
	{
		"system.network.tcp.resets", "{segment}", "Established connections that a reset ended.",
		dto.MetricType_COUNTER,
		[]source{{"penstock_flow_closes_total", func(label func(string) string) ([]string, bool) {
			return []string{"network.io.direction", "receive"}, label("reason") == "reset"
		}}},
	},
}

// deriveMetrics returns all derived metrics that have samples.
func deriveMetrics(families []*dto.MetricFamily, start, now time.Time) (out []*metric) {
	byName := map[string]*dto.MetricFamily{}
	for _, f := range families {
		byName[f.GetName()] = f
	}
	for _, d := range allDerived {
		sums := &data{}
		for _, from := range d.from {
			for _, m := range byName[from.family].GetMetric() {
				pairs, ok := from.attributes(func(name string) string { return labelOf(m, name) })
				if p := describePoint(m, start, now); ok && p != nil {
					p.Attributes = attributesOf(pairs...)
					if d.kind == dto.MetricType_COUNTER && p.Count != nil {
						p = &point{
							Attributes: p.Attributes, StartTimeUnixNano: p.StartTimeUnixNano, TimeUnixNano: p.TimeUnixNano,
							AsDouble: new(float64(*p.Count)),
						}
					}
					sums.addPoint(p)
				}
			}
		}
		if m := newMetric(d.name, d.description, d.unit, d.kind, sums); m != nil {
			out = append(out, m)
		}
	}
	return out
}

// labelOf returns the value of a label.
func labelOf(m *dto.Metric, name string) string {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

// addPoint adds p to the point that has the same attributes. Histograms of a family have the same bounds.
func (d *data) addPoint(p *point) {
	at := slices.IndexFunc(d.DataPoints, func(q *point) bool { return slices.Equal(q.Attributes, p.Attributes) })
	if at < 0 {
		d.DataPoints = append(d.DataPoints, p)
		return
	}
	sum := d.DataPoints[at]
	if p.AsDouble != nil {
		*sum.AsDouble += *p.AsDouble
		return
	}
	*sum.Count += *p.Count
	*sum.Sum += *p.Sum
	for i, n := range p.BucketCounts {
		sum.BucketCounts[i] += n
	}
}
