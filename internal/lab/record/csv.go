package record

import (
	"encoding/csv"
	"io"
	"strconv"
	"strings"
)

// columns are those of CSV, with their units, and what stands in them.
var columns = []struct {
	title string
	of    func(Run) any
}{
	{"experiment", func(r Run) any { return r.Experiment }},
	{"run", func(r Run) any { return r.Name }},
	{"path", func(r Run) any { return r.Path() }},
	{"virtual", func(r Run) any { return strconv.FormatBool(r.Virtual) }},
	{"seed", func(r Run) any { return strconv.FormatUint(r.Seed, 10) }},
	{"number", func(r Run) any { return float64(r.Number) }},
	{"throughput_mbit", func(r Run) any { return r.Throughput }},
	{"utilisation", func(r Run) any { return r.Utilisation }},
	{"queueing_p50_ms", func(r Run) any { return r.Queueing.P50 }},
	{"queueing_p95_ms", func(r Run) any { return r.Queueing.P95 }},
	{"queueing_p99_ms", func(r Run) any { return r.Queueing.P99 }},
	{"one_way_p50_ms", func(r Run) any { return r.OneWay.P50 }},
	{"one_way_p95_ms", func(r Run) any { return r.OneWay.P95 }},
	{"dropped", func(r Run) any { return r.DropShare() }},
	{"retransmitted", func(r Run) any { return r.Retransmitted }},
	{"jain", func(r Run) any { return r.Jain }},
	{"lateness_p99_ms", func(r Run) any { return r.Lateness.P99 }},
	{"discarded", func(r Run) any { return r.Discarded }},
	{"version", func(r Run) any { return r.Version }},
	{"throughput_mbit_per_second", func(r Run) any {
		return listed(r, func(s *Series) []float64 { return s.Throughput })
	}},
	{"queueing_ms_per_second", func(r Run) any { return listed(r, func(s *Series) []float64 { return s.Queueing }) }},
}

// listed are the values of a series in one cell, with blanks between them.
func listed(r Run, of func(*Series) []float64) string {
	if r.Series == nil {
		return ""
	}
	var all []string
	for _, v := range of(r.Series) {
		all = append(all, strconv.FormatFloat(v, 'g', -1, 64))
	}
	return strings.Join(all, " ")
}

// WriteCSV writes a table of runs, a line each below one of titles.
func WriteCSV(w io.Writer, runs []Run) error {
	out := csv.NewWriter(w)
	var line []string
	for _, c := range columns {
		line = append(line, c.title)
	}
	err := out.Write(line)
	for _, r := range runs {
		for i, c := range columns {
			switch v := c.of(r).(type) {
			case float64:
				line[i] = strconv.FormatFloat(v, 'f', -1, 64)
			case string:
				line[i] = v
			}
		}
		if err == nil {
			err = out.Write(line)
		}
	}
	out.Flush()
	if err != nil {
		return err
	}
	return out.Error()
}
