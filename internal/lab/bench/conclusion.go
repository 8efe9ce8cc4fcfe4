package bench

import (
	"fmt"
	"strings"

	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/record"
)

// Conclusion says in one sentence how the first proxied sender of the first
// table, and there of the first probability of loss, compares with its first
// direct one; empty when either is missing.
func Conclusion(results []record.Run) string {
	all := tables(results, false)
	if len(all) == 0 {
		return ""
	}
	rows := all[0].blocks()[0]
	base := all[0].find(all[0].baseline(), all[0].losses[0])
	var ours *row
	for i := range rows {
		if w := &rows[i]; !w.kernel && !w.virtual && len(w.counted()) > 0 && ours == nil {
			ours = w
		}
	}
	if base == nil || ours == nil {
		return ""
	}
	median := func(w *row, figure func(record.Run) float64) float64 { s, _ := w.of(figure); return s.Median }
	throughput := func(r record.Run) float64 { return r.Throughput }
	p95 := func(r record.Run) float64 { return r.Queueing.P95 }
	a, b := median(ours, p95), median(base, p95)
	share := 0.0
	if t := median(base, throughput); t > 0 {
		share = median(ours, throughput) / t
	}
	who := capital(ours.sender) + " through Penstock"
	if algorithm, _, _ := strings.Cut(ours.sender, "@"); algorithm == "penstock" {
		who = "Penstock"
	}
	return fmt.Sprintf("%s has %.0f %% of %s's throughput, and 19 of 20 packets spend less than %s ms in the queue "+
		"instead of %s ms (%s).",
		who, share*100, capital(base.sender), figures.Number(a), figures.Number(b), figures.Ratio(a, b))
}

func capital(s string) string {
	if s == "" {
		return s
	}
	return strings.ToUpper(s[:1]) + s[1:]
}
