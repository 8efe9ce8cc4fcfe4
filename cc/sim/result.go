package sim

import (
	"math"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// Result is what a run came to. Everything but the series counts from the end
// of the warm-up. What is about the bottleneck is about the way down, unless
// all flows are uploads.
type Result struct {
	Flows []FlowResult
	// what the bottleneck could have carried; a cell: to the hosts that it served, in the same parts
	Offered      cc.Bytes
	Carried      cc.Bytes // what it did, with headers and retransmissions
	Utilisation  float64  // Carried over Offered
	Queueing     Delays   // of all flows' packets, in the queue
	OneWay       Delays   // of all flows' packets, from sender to receiver
	QueuePackets float64  // mean over time
	Drops        int      // by the full queue
	Losses       int      // at random
	Retransmits  int
	Jain         float64 // fairness of the throughputs of the flows that have an algorithm and were there
}

// FlowResult is one flow's part of it, counted while the flow was open.
type FlowResult struct {
	Name, Algorithm  string
	From, To         time.Duration // of the time that counts, from the run's start
	Throughput       cc.Rate       // payload that arrived for the first time
	Utilisation      float64       // of what the bottleneck offered in that time
	Queueing, OneWay Delays
	Packets          int // sent, retransmissions included
	Arrived          int // of them, those that arrived while the flow was open
	Drops, Losses    int
	Retransmits      int
	Timeouts         int
	Received         time.Duration // how long it took until all of FlowConfig.Bytes had arrived; 0: they have not
	Completed        time.Duration // how long it took to deliver them, to the last acknowledgement; 0: it has not
	Objects          []Object      // that its client asked for, chunks of a video among them
	FCT              Delays        // how long those took that came: from the request to the last byte
	Video            Playback      // of the whole run
	PerSecond        []cc.Rate     // throughput in each second of the run
	Samples          []Sample
	Final            flow.Snapshot   // as it closed, or at the end
	Read             cc.Bytes        // as in Sample, by then; UDP: by the end
	Jitter           []time.Duration // of UDP, as Jitter has all
	Window           flow.Snapshot   // then, too, of the flow that decides an upload's receive window
}

// Sample is a flow's state at one moment.
type Sample struct {
	At time.Duration // from the run's start
	flow.Snapshot
	Read           cc.Bytes // payload that arrived with no hole before it: what an application can have; UDP: all
	Backlog        cc.Bytes // in the bottleneck's queue, of all flows; a cell: in its host's
	BacklogPackets int
}

// Delays describes a set of delays, each packet's counted once.
type Delays struct {
	Mean, P50, P95, P99, Max time.Duration
}

// DelaysOf sorts its argument, and summarises it.
func DelaysOf(all []time.Duration) Delays {
	if len(all) == 0 {
		return Delays{}
	}
	slices.Sort(all)
	sum := 0.0
	for _, d := range all {
		sum += float64(d)
	}
	return Delays{
		Mean: time.Duration(sum / float64(len(all))),
		P50:  NearestRank(all, 0.50), P95: NearestRank(all, 0.95), P99: NearestRank(all, 0.99),
		Max: all[len(all)-1],
	}
}

// NearestRank is the least of sorted values that a part p of them does not exceed; there is at least one.
func NearestRank[T any](sorted []T, p float64) T {
	return sorted[min(len(sorted)-1, max(0, int(math.Ceil(p*float64(len(sorted))))-1))]
}

// Jain is the fairness index of Jain, Chiu and Hawe (1984): 1 when all are
// equal, 1/n when one has everything; 0 for none at all.
func Jain(x ...float64) float64 {
	sum, squares := 0.0, 0.0
	for _, v := range x {
		sum += v
		squares += v * v
	}
	if squares == 0 {
		return 0
	}
	return sum * sum / (float64(len(x)) * squares)
}

// result sums up the run.
func (w *world) result() Result {
	from := w.origin.Add(w.scenario.Warmup)
	up := !slices.ContainsFunc(w.scenario.Flows, func(f FlowConfig) bool { return !f.Upload })
	r := Result{Offered: w.offered(up, 0, from, w.end)}
	var queueing, oneWay []time.Duration
	waited := time.Duration(0)
	var throughputs []float64
	for i, e := range w.endpoints {
		f, s := e.result(), e.measured()
		r.Flows = append(r.Flows, f)
		if w.scenario.Flows[i].Upload == up {
			r.Carried += s.carried
			r.Utilisation += ratio(s.carried, w.offered(up, s.host, from, w.end))
			queueing = append(queueing, s.queueing...)
			waited += s.waited
		}
		r.Drops += f.Drops
		r.Losses += f.Losses
		r.Retransmits += f.Retransmits
		oneWay = append(oneWay, s.oneWay...)
		if f.Algorithm != UDP && f.From < f.To {
			throughputs = append(throughputs, float64(f.Throughput))
		}
	}
	if w.scenario.Cell == nil || up {
		r.Utilisation = ratio(r.Carried, r.Offered)
	} else if r.Utilisation > 0 {
		r.Offered = cc.Bytes(float64(r.Carried) / r.Utilisation)
	}
	r.Jain = Jain(throughputs...)
	r.QueuePackets = float64(waited) / float64(w.end.Sub(from))
	r.Queueing, r.OneWay = DelaysOf(queueing), DelaysOf(oneWay)
	return r
}

// result adds what its client saw to a flow's.
func (c *client) result(f *FlowResult) {
	var took []time.Duration
	for _, o := range c.Objects {
		if o.At < f.From {
			continue
		}
		f.Objects = append(f.Objects, o)
		if o.Took > 0 {
			took = append(took, o.Took)
		}
	}
	f.FCT = DelaysOf(took)
	if played := c.Playback(f.To); played != nil {
		f.Video = *played
	}
}

func ratio(part, whole cc.Bytes) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}
