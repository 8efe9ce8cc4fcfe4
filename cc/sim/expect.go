package sim

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Expectation is a bound on one figure of a result.
type Expectation struct {
	Flow     string // whose figure; empty: the whole run's
	Metric   string
	From, To time.Duration // of a throughput or fairness, in whole seconds; To 0: all that counts
	Operator string        // <=, >=, <, > or ==
	Value    float64
}

// String returns the expectation as a case file writes it, without "expect".
func (e Expectation) String() string {
	s := e.Metric
	if e.Flow != "" {
		s = e.Flow + "." + s
	}
	if e.To > 0 {
		s += fmt.Sprintf(" from %v to %v", e.From, e.To)
	}
	return fmt.Sprintf("%s %s %v", s, e.Operator, e.Value)
}

// figures of a whole run, in the units their names end in.
var figures = map[string]func(Result) float64{
	"utilisation":      func(r Result) float64 { return r.Utilisation },
	"jain":             func(r Result) float64 { return r.Jain },
	"queue_packets":    func(r Result) float64 { return r.QueuePackets },
	"drops":            func(r Result) float64 { return float64(r.Drops) },
	"losses":           func(r Result) float64 { return float64(r.Losses) },
	"retransmits":      func(r Result) float64 { return float64(r.Retransmits) },
	"mean_queueing_ms": func(r Result) float64 { return millis(r.Queueing.Mean) },
	"p50_queueing_ms":  func(r Result) float64 { return millis(r.Queueing.P50) },
	"p95_queueing_ms":  func(r Result) float64 { return millis(r.Queueing.P95) },
	"p99_queueing_ms":  func(r Result) float64 { return millis(r.Queueing.P99) },
	"p95_delay_ms":     func(r Result) float64 { return millis(r.OneWay.P95) },
}

// flowFigures are those of one flow.
var flowFigures = map[string]func(Result, FlowResult) float64{
	"utilisation":      func(_ Result, f FlowResult) float64 { return f.Utilisation },
	"throughput_mbit":  func(_ Result, f FlowResult) float64 { return f.Throughput.Mbps() },
	"share":            func(r Result, f FlowResult) float64 { return f.share(r) },
	"drops":            func(_ Result, f FlowResult) float64 { return float64(f.Drops) },
	"retransmits":      func(_ Result, f FlowResult) float64 { return float64(f.Retransmits) },
	"timeouts":         func(_ Result, f FlowResult) float64 { return float64(f.Timeouts) },
	"mean_queueing_ms": func(_ Result, f FlowResult) float64 { return millis(f.Queueing.Mean) },
	"p95_queueing_ms":  func(_ Result, f FlowResult) float64 { return millis(f.Queueing.P95) },
	"p95_delay_ms":     func(_ Result, f FlowResult) float64 { return millis(f.OneWay.P95) },
	"completed_s":      func(_ Result, f FlowResult) float64 { return f.completed() },
	"sent_packets":     func(_ Result, f FlowResult) float64 { return float64(f.Packets) },
	"arrived_packets":  func(_ Result, f FlowResult) float64 { return float64(f.Arrived) },
	"objects":          func(_ Result, f FlowResult) float64 { return float64(f.completions()) },
	"fct_p50_ms":       func(_ Result, f FlowResult) float64 { return f.orForever(f.FCT.P50) },
	"fct_p95_ms":       func(_ Result, f FlowResult) float64 { return f.orForever(f.FCT.P95) },
	"fct_max_ms":       func(_ Result, f FlowResult) float64 { return f.orForever(f.FCT.Max) },
	"startup_s":        func(_ Result, f FlowResult) float64 { return f.startUp() },
	"rebuffers":        func(_ Result, f FlowResult) float64 { return float64(f.Video.Rebuffers) },
	"rebuffer_s":       func(_ Result, f FlowResult) float64 { return f.Video.Rebuffer.Seconds() },
}

// inParts are the figures that there are of a part of the run, too.
var inParts = []string{"throughput_mbit", "jain"}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// share is the flow's part of the sum of all throughputs.
func (f FlowResult) share(r Result) float64 {
	sum := cc.Rate(0)
	for _, g := range r.Flows {
		sum += g.Throughput
	}
	if sum == 0 {
		return 0
	}
	return float64(f.Throughput) / float64(sum)
}

// completed is infinite for a flow that has not.
func (f FlowResult) completed() float64 {
	if f.Completed == 0 {
		return math.Inf(1)
	}
	return f.Completed.Seconds()
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

// orForever is a figure of the objects that came, in milliseconds; infinite where none did.
func (f FlowResult) orForever(d time.Duration) float64 {
	if f.completions() == 0 {
		return math.Inf(1)
	}
	return millis(d)
}

// startUp is infinite for a video that has not begun.
func (f FlowResult) startUp() float64 {
	if f.Video.StartUp == 0 {
		return math.Inf(1)
	}
	return f.Video.StartUp.Seconds()
}

var operators = map[string]func(got, want float64) bool{
	"<=": func(got, want float64) bool { return got <= want },
	">=": func(got, want float64) bool { return got >= want },
	"<":  func(got, want float64) bool { return got < want },
	">":  func(got, want float64) bool { return got > want },
	"==": func(got, want float64) bool { return got == want },
}

// Check returns the figure in question and whether it is as expected.
func (e Expectation) Check(r Result) (got float64, ok bool) {
	if e.Flow == "" {
		got = figures[e.Metric](r)
		if e.To > 0 {
			got = leastJain(r.Flows, e.From, e.To)
		}
		return got, operators[e.Operator](got, e.Value)
	}
	i := slices.IndexFunc(r.Flows, func(f FlowResult) bool { return f.Name == e.Flow })
	if i < 0 {
		return 0, false
	}
	got = flowFigures[e.Metric](r, r.Flows[i])
	if e.To > 0 {
		got = mean(r.Flows[i].PerSecond, e.From, e.To).Mbps()
	}
	return got, operators[e.Operator](got, e.Value)
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

// leastJain is the least fairness of any second between two whole ones of the
// run, among the flows that are open in all of it. One flow alone is fair.
func leastJain(flows []FlowResult, from, to time.Duration) float64 {
	least := 1.0
	for at := from; at < to; at += time.Second {
		var open []float64
		for _, f := range flows {
			if k := int(at / time.Second); f.From <= at && f.To >= at+time.Second && k < len(f.PerSecond) {
				open = append(open, float64(f.PerSecond[k]))
			}
		}
		if len(open) > 0 {
			least = min(least, Jain(open...))
		}
	}
	return least
}

// parseExpectation reads "[FLOW.]METRIC [from 10s to 20s] OPERATOR VALUE".
func parseExpectation(words []string) (e Expectation, err error) {
	const form = "write expect [FLOW.]METRIC [from 10s to 20s] >= VALUE"
	if len(words) != 3 && len(words) != 7 {
		return e, fmt.Errorf("an expectation has three words, or seven; %s", form)
	}
	e.Metric = words[0]
	if i := strings.LastIndexByte(words[0], '.'); i >= 0 {
		e.Flow, e.Metric = words[0][:i], words[0][i+1:]
		if e.Flow == "" {
			return e, fmt.Errorf("%q lacks the name of its flow; %s", words[0], form)
		}
		if flowFigures[e.Metric] == nil {
			return e, fmt.Errorf("a flow has no %q; it has %s", e.Metric, sortedKeys(flowFigures))
		}
	} else if figures[e.Metric] == nil {
		return e, fmt.Errorf("a run has no %q; it has %s; a flow (FLOW.METRIC) has %s", e.Metric, sortedKeys(figures),
			sortedKeys(flowFigures))
	}
	if len(words) == 7 {
		if words[1] != "from" || words[3] != "to" || !slices.Contains(inParts, e.Metric) {
			return e, fmt.Errorf("only throughput_mbit and jain can be asked for a part of the run; %s", form)
		}
		if e.From, err = parseSpan(words[2]); err != nil {
			return e, err
		}
		if e.To, err = parseSpan(words[4]); err != nil {
			return e, err
		}
		if e.From%time.Second != 0 || e.To%time.Second != 0 || e.To <= e.From {
			return e, fmt.Errorf("from %v to %v: it must be whole seconds, and go forwards", e.From, e.To)
		}
	}
	words = words[len(words)-2:]
	e.Operator = words[0]
	if operators[e.Operator] == nil {
		return e, fmt.Errorf("%q is no comparison; there are %s", e.Operator, sortedKeys(operators))
	}
	if e.Value, err = strconv.ParseFloat(words[1], 64); err != nil || math.IsNaN(e.Value) {
		return e, fmt.Errorf("%q is not a number", words[1])
	}
	return e, nil
}

func sortedKeys[V any](m map[string]V) string {
	return strings.Join(slices.Sorted(maps.Keys(m)), ", ")
}
