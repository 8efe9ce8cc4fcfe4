package recipe

import (
	"fmt"
	"math"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// cpu is the processor time, in seconds, for each GB that the applications read: of the proxy and of the agents that
// were started for the run, or of native senders. NaN where there are neither, as in virtual time.
func (r Run) cpu() float64 {
	read := cc.Bytes(0)
	for _, a := range r.Record.Actors {
		read += total(a.Bytes)
	}
	if r.Record.CPU == 0 || read == 0 {
		return math.NaN()
	}
	return (r.Record.CPU + r.Record.Decided.CPU).Seconds() / (float64(read) / 1e9)
}

// within are the percentiles, in ms, of a histogram in seconds, interpolated in its buckets; NaN of an empty one.
func within(h datapath.Histogram) record.Percentiles {
	at := func(part float64) float64 { return 1e3 * edge.Quantile(h, part) }
	return record.Percentiles{
		Mean: 1e3 * h.Sum / float64(h.Count()), P50: at(0.5), P95: at(0.95), P99: at(0.99), Max: at(1),
	}
}

// each are the rates, in Mbit/s, at which IP bytes left the last hop after the warm-up, in steps of so
// many seconds.
func (r Run) each(step any) (all []float64, err error) {
	length, err := r.moment(step)
	if err != nil {
		return nil, err
	}
	n := int(length / stage.FineStep)
	if n < 1 || length%stage.FineStep != 0 {
		return nil, fmt.Errorf("each(%v): steps are of %v or a multiple", step, stage.FineStep.Seconds())
	}
	left := r.Record.Left[min(len(r.Record.Left), int(r.Stage.Warmup/stage.FineStep)):]
	for ; len(left) >= n; left = left[n:] {
		all = append(all, cc.RateOf(total(left[:n]), time.Duration(n)*stage.FineStep).Mbps())
	}
	return all, nil
}
