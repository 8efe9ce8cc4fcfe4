package telemetry

import (
	"strconv"
	"strings"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// metric is one family of Prometheus's text format.
type metric struct {
	kind, name, help string
	labels           []string
}

// metrics are all families, in the order in which they are written.
var metrics []*metric

func newMetric(kind, name, help string, labels ...string) *metric {
	m := &metric{kind: kind, name: name, help: help, labels: labels}
	metrics = append(metrics, m)
	return m
}

func newCounter(name, help string, labels ...string) *metric {
	return newMetric("counter", "penstock_"+name, help, labels...)
}

func newGauge(name, help string, labels ...string) *metric {
	return newMetric("gauge", "penstock_"+name, help, labels...)
}

func newHistogram(name, help string, labels ...string) *metric {
	return newMetric("histogram", "penstock_"+name, help, labels...)
}

// sink has the samples of each family, one a line.
type sink map[*metric][]byte

func (s sink) putSample(m *metric, v float64, labels ...string) {
	s.addLine(m, "", v, labels, "")
}

func (s sink) putHistogram(m *metric, h datapath.Histogram, labels ...string) {
	n := uint64(0)
	for i, bound := range h.Bounds {
		n += h.Counts[i]
		s.addLine(m, "_bucket", float64(n), labels, strconv.FormatFloat(bound, 'g', -1, 64))
	}
	s.addLine(m, "_bucket", float64(h.Count()), labels, "+Inf")
	s.addLine(m, "_sum", h.Sum, labels, "")
	s.addLine(m, "_count", float64(h.Count()), labels, "")
}

// What the format wants escaped.
var (
	helpText   = strings.NewReplacer(`\`, `\\`, "\n", `\n`)
	labelValue = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)
)

// addLine adds a line; le is the upper bound of a histogram's bucket.
func (s sink) addLine(m *metric, suffix string, v float64, labels []string, le string) {
	line := append(s[m], m.name+suffix...)
	open := byte('{')
	label := func(name, value string) {
		line = append(append(line, open), name...)
		line = append(append(append(line, `="`...), labelValue.Replace(strings.ToValidUTF8(value, "\uFFFD"))...), '"')
		open = ','
	}
	for i, name := range m.labels {
		label(name, labels[i])
	}
	if le != "" {
		label("le", le)
	}
	if open == ',' {
		line = append(line, '}')
	}
	s[m] = append(strconv.AppendFloat(append(line, ' '), v, 'g', -1, 64), '\n')
}

// appendFamilies appends the families that have samples.
func (s sink) appendFamilies(text []byte) []byte {
	for _, m := range metrics {
		if samples := s[m]; samples != nil {
			text = append(text, "# HELP "+m.name+" "+helpText.Replace(m.help)+"\n# TYPE "+m.name+" "+m.kind+"\n"...)
			text = append(text, samples...)
		}
	}
	return text
}
