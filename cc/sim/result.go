package sim

import (
	"math"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// Result is what a run came to. Everything but the series counts from the end
// of the warm-up.
type Result struct {
	Flows        []FlowResult
	Datagrams    []FlowResult // in Carried, Utilisation and all delays; Drops are the gateway's, too
	Offered      cc.Bytes     // what the bottleneck could have carried
	Carried      cc.Bytes     // what it did, with headers and retransmissions
	Utilisation  float64      // Carried over Offered
	Queueing     Delays       // of all flows' packets, in the queue
	OneWay       Delays       // of all flows' packets, from sender to receiver
	QueuePackets float64      // mean over time
	Drops        int          // by the full queue
	Losses       int          // at random
	Retransmits  int
	Jain         float64 // fairness of the flows' throughputs
}

// FlowResult is one flow's part of it, counted while the flow was open.
type FlowResult struct {
	Name, Algorithm  string
	From, To         time.Duration // of the time that counts, from the run's start
	Throughput       cc.Rate       // payload that arrived for the first time
	Utilisation      float64       // of what the bottleneck offered in that time
	Queueing, OneWay Delays
	Packets          int // sent, retransmissions included
	Drops, Losses    int
	Retransmits      int
	Timeouts         int
	Completed        time.Duration // how long it took to deliver FlowConfig.Bytes, to the last acknowledgement; 0: it has not
	PerSecond        []cc.Rate     // throughput in each second of the run
	Samples          []Sample
	Final            flow.Snapshot // as it closed, or at the end
}

// Sample is a flow's state at one moment.
type Sample struct {
	At time.Duration // from the run's start
	flow.Snapshot
	Backlog        cc.Bytes // in the bottleneck's queue, of all flows
	BacklogPackets int
}

// Delays describes a set of delays, each packet's counted once.
type Delays struct {
	Mean, P50, P95, P99, Max time.Duration
}

// delaysOf sorts its argument.
func delaysOf(all []time.Duration) Delays {
	if len(all) == 0 {
		return Delays{}
	}
	slices.Sort(all)
	sum := 0.0
	for _, d := range all {
		sum += float64(d)
	}
	nearestRank := func(p float64) time.Duration {
		return all[max(0, int(math.Ceil(p*float64(len(all))))-1)]
	}
	return Delays{
		Mean: time.Duration(sum / float64(len(all))),
		P50:  nearestRank(0.50), P95: nearestRank(0.95), P99: nearestRank(0.99),
		Max: all[len(all)-1],
	}
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

// stats gathers what becomes of one flow's packets.
type stats struct {
	from, end, origin cc.Time // counting begins and ends; the run's start
	queueing, oneWay  []time.Duration
	packets, drops    int
	losses, resent    int
	timeouts          int
	carried, arrived  cc.Bytes
	perSecond         []cc.Bytes
	completed         cc.Time // 0: not yet
	samples           []Sample
	final             flow.Snapshot
}

func newStats(w *world, cfg FlowConfig) stats {
	seconds := (w.scenario.Duration + time.Second - 1) / time.Second
	return stats{
		from: w.origin.Add(max(cfg.Start, w.scenario.Warmup)), end: w.end, origin: w.origin,
		perSecond: make([]cc.Bytes, seconds),
	}
}

// packet notes a packet of size bytes that was sent at now.
func (s *stats) packet(now cc.Time, size cc.Bytes, v Verdict) {
	if v.Dropped == DropNone && v.Departs >= s.from && v.Departs < s.end {
		s.carried += size
	}
	if now < s.from {
		return
	}
	s.packets++
	switch v.Dropped {
	case DropQueue:
		s.drops++
	case DropLoss:
		s.losses++
	case DropNone:
		s.queueing = append(s.queueing, v.Departs.Sub(now))
		s.oneWay = append(s.oneWay, v.Arrives.Sub(now))
	}
}

// delivered notes the first arrival of size bytes of payload.
func (s *stats) delivered(now cc.Time, size cc.Bytes) {
	s.perSecond[now.Sub(s.origin)/time.Second] += size
	if now >= s.from {
		s.arrived += size
	}
}

func (s *stats) retransmit(now cc.Time) {
	if now >= s.from {
		s.resent++
	}
}

func (s *stats) timeout(now cc.Time) {
	if now >= s.from {
		s.timeouts++
	}
}

func (s *stats) sample(w *world, state flow.Snapshot) {
	bytes, packets := w.down.Backlog(w.now)
	s.samples = append(s.samples, Sample{At: w.now.Sub(w.origin), Snapshot: state, Backlog: bytes, BacklogPackets: packets})
}

// result sums up the run.
func (w *world) result() Result {
	from := w.origin.Add(w.scenario.Warmup)
	r := Result{Offered: w.down.Offered(from, w.end)}
	var queueing, oneWay []time.Duration
	var throughputs []float64
	for i, s := range w.senders {
		f := s.result(i)
		r.Flows = append(r.Flows, f)
		r.Carried += s.stats.carried
		r.Drops += f.Drops
		r.Losses += f.Losses
		r.Retransmits += f.Retransmits
		queueing = append(queueing, s.stats.queueing...)
		oneWay = append(oneWay, s.stats.oneWay...)
		throughputs = append(throughputs, float64(f.Throughput))
	}
	for _, b := range w.blasters {
		r.Datagrams = append(r.Datagrams, b.result())
		r.Carried += b.stats.carried
		queueing = append(queueing, b.stats.queueing...)
		oneWay = append(oneWay, b.stats.oneWay...)
	}
	r.Utilisation = ratio(r.Carried, r.Offered)
	r.Jain = Jain(throughputs...)
	waited := 0.0
	for _, d := range queueing {
		waited += float64(d)
	}
	r.QueuePackets = waited / float64(w.end.Sub(from)) // Little's law
	r.Queueing, r.OneWay = delaysOf(queueing), delaysOf(oneWay)
	return r
}

func (s *sender) result(i int) FlowResult {
	st := &s.stats
	to := s.w.end
	if s.flow != nil && !s.closed {
		st.final = s.flow.Snapshot()
	}
	if s.closedAt != 0 {
		to = s.closedAt
	}
	f := FlowResult{
		Name: s.cfg.name(i), Algorithm: s.cfg.Algorithm,
		From: st.from.Sub(st.origin), To: to.Sub(st.origin),
		Throughput: cc.RateOf(st.arrived, to.Sub(st.from)),
		Packets:    st.packets, Drops: st.drops, Losses: st.losses, Retransmits: st.resent, Timeouts: st.timeouts,
		Queueing: delaysOf(st.queueing), OneWay: delaysOf(st.oneWay),
		Samples: st.samples, Final: st.final,
	}
	f.Utilisation = ratio(st.carried, s.w.down.Offered(st.from, to))
	if st.completed != 0 {
		f.Completed = st.completed.Sub(s.src.started)
	}
	f.PerSecond = st.rates(s.w.scenario.Duration)
	return f
}

// rates are the throughputs of each second of a run of that length.
func (s *stats) rates(run time.Duration) []cc.Rate {
	var all []cc.Rate
	for k, n := range s.perSecond {
		length := min(time.Second, run-time.Duration(k)*time.Second)
		all = append(all, cc.RateOf(n, length))
	}
	return all
}

func ratio(part, whole cc.Bytes) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}
