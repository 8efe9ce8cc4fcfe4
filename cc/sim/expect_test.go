package sim

import (
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// flowOf is what came of the flow of that name.
func flowOf(r Result, name string) FlowResult {
	return r.Flows[slices.IndexFunc(r.Flows, func(f FlowResult) bool { return f.Name == name })]
}

// dropOf puts a packet of a host into a hop, and returns why it is dropped at once.
func dropOf(h Hop, now cc.Time, host int, size cc.Bytes, ecn Codepoint) Drop {
	_, v, _ := h.Enqueue(now, host, size, 0, ecn)
	return v.Dropped
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// share is the flow's part of the sum of all throughputs.
func (f FlowResult) share(r Result) float64 {
	sum := cc.Rate(0)
	for _, g := range r.Flows {
		sum += g.Throughput
	}
	return float64(f.Throughput) / float64(sum)
}

// completions counts the objects that came.
func (f FlowResult) completions() (n int) {
	for _, o := range f.Objects {
		if o.Took > 0 {
			n++
		}
	}
	return n
}

// mean is the mean throughput between two whole seconds of the run.
func mean(perSecond []cc.Rate, from, to time.Duration) cc.Rate {
	sum, n := cc.Rate(0), cc.Rate(0)
	for k := int(from / time.Second); k < int(to/time.Second) && k < len(perSecond); k++ {
		sum += perSecond[k]
		n++
	}
	return sum / max(1, n)
}

// steps is a trace of these rates.
func steps(d time.Duration, all ...Step) *Trace {
	t, err := Steps("steps", d, all...)
	if err != nil {
		panic(err) // constant
	}
	return t
}
