package recipe

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// view is a run as an expression sees it: figures of the whole, then functions of a flow's
// name. Rates are of payload in Mbit/s, times in seconds from the run's start, delays in
// milliseconds, windows in packets. What is not measured over real sockets is NaN there.
// Spans go from the first number to the second, without them from the warm-up to the end
// as long as the flow is there. The comments of its fields are the table of docs/recipes.md (make docs).
type view struct {
	// Names.
	Flows []string `expr:"flows"`
	// Seconds of the run.
	Duration float64 `expr:"duration"`
	// Mbit/s with headers that left the link.
	Wire float64 `expr:"wire"`
	// Mbit/s of payload that a link of a fixed rate carries.
	Capacity float64 `expr:"capacity"`
	// The part of the link that was used.
	Utilisation float64 `expr:"utilisation"`
	// ms in the link's queue: .mean, .p50, .p95, .p99, .max.
	Queueing record.Percentiles `expr:"queueing"`
	// ms that 0, 1, … 100 % of the data packets do not exceed.
	Centiles []float64 `expr:"queueing_centiles"`
	// Mean ms in each second from the run's start; 0: no packet left.
	Course []float64 `expr:"queueing_seconds"`
	// Jain's index of the TCP flows' throughputs.
	Fairness float64 `expr:"fairness"`
	// In virtual time alone.
	QueuePackets float64 `expr:"queue_packets"`
	// Packets that found the link's queue full.
	Drops float64 `expr:"drops"`
	// Packets that the link lost at random.
	Losses float64 `expr:"losses"`
	// In virtual time alone.
	Retransmits float64 `expr:"retransmits"`
	// Bytes of the proxy at each second.
	Memory []float64 `expr:"memory"`
	// No byte was lost or changed, and nothing ended early.
	Intact bool `expr:"intact"`
	// Answers of the proxy to changes of its configuration.
	Answers int `expr:"answers"`
	// Good changes refused and wrong ones taken.
	WrongAnswers int `expr:"wrong_answers"`
	// Seconds of processor time for each GB, of the proxy and its agents or of native senders. Not in virtual time.
	CPU float64 `expr:"cpu"`
	// ms from a report to an agent until its decision is in force. Not in virtual time.
	Decision record.Percentiles `expr:"decision"`
	// The part of the samples of a managed download, alone on its link, in which the kernel's window was at least ours.
	// Over real sockets alone.
	Covers float64 `expr:"kernel_covers"`
	// The run was played in virtual time: for `when`.
	Virtual bool `expr:"virtual"`
	// Times that a fallback took over from an agent. Not in virtual time.
	Fallbacks float64 `expr:"fallbacks"`

	// Mbit/s of payload after the warm-up, or from the first to the second number of seconds.
	Rate func(flow string, span ...any) (float64, error) `expr:"rate"`
	// Mbit/s in each second after the warm-up.
	Seconds func(flow string) ([]float64, error) `expr:"seconds"`
	// Mbit/s with headers of all that left the link, by steps of a multiple of 0.02 s.
	Each func(step any) ([]float64, error) `expr:"each"`
	// Its part of all rates.
	Share func(flow string) (float64, error) `expr:"share"`
	// Jain's index in the worst of these seconds, of the flows that are there in all of it.
	LeastJain func(from, to any) (float64, error) `expr:"least_jain"`
	// Seconds after `from` until it has had `mbit` for `over` seconds.
	FirstAt func(flow string, mbit, over, from any) (float64, error) `expr:"first_at"`
	// Its rate while the other runs, from a second after that began.
	RateBeside func(flow, other string) (float64, error) `expr:"rate_beside"`
	// Packets, each 0.1 s.
	Window func(flow string, span ...any) ([]float64, error) `expr:"window"`
	// ms of one flow's packets, in a cell of its host's. Over real sockets, and of `app: web`, only of a flow that has
	// its host to itself.
	QueueingOf func(flow string) (record.Percentiles, error) `expr:"queueing_of"`
	// ms that each took; with two sizes, of the flows that ask for above the first and up to the second, in bytes.
	Requests func(flow string, sizes ...any) ([]float64, error) `expr:"requests"`
	// How many requests a minute has room for.
	RPM func(flow string) (float64, error) `expr:"rpm"`
	// ms that the slowest took of the flows with names that begin so.
	Pages func(prefix string) ([]float64, error) `expr:"pages"`
	// The part of its UDP that came.
	Arrived func(flow string) (float64, error) `expr:"arrived"`
	// ms by which the transit of each packet of its UDP differs from that of the one before.
	Jitter func(flow string) ([]float64, error) `expr:"jitter"`
	// Seconds until its last byte came; `inf` for a download of a size that did not end.
	Finish func(flow string) (float64, error) `expr:"finish"`
	// Longest time without a byte from then on.
	Stall func(flow string, from any) (float64, error) `expr:"stall"`
	// .rebuffers: how often; .rebuffer, .startup: seconds.
	Video func(flow string) (record.Video, error) `expr:"video"`
	// In virtual time alone.
	Timeouts func(flow string) (float64, error) `expr:"timeouts"`
	// What its algorithm shows at each 0.1 s, as `penstock algorithms NAME` lists it. In virtual time alone.
	Internal func(flow, name string) ([]float64, error) `expr:"internal"`
}

// view shows the run to expressions.
func (r Run) view() *view {
	rec, unknown := r.Record, math.NaN()
	v := &view{
		Duration: r.Stage.Duration.Seconds(), Wire: rec.Throughput.Mbps(), Capacity: r.capacity(),
		Utilisation:  rec.Utilisation,
		Queueing:     delaysOf(rec.Queueing, rec.Throughput),
		QueuePackets: unknown, Retransmits: unknown, Covers: unknown,
		Drops: float64(rec.Path.Down.Drops.Queue), Losses: float64(rec.Path.Down.Drops.Loss),
		Intact: true, Answers: len(rec.Reloads), CPU: r.cpu(), Decision: within(rec.Decided.Took), Fallbacks: unknown,
		Each: r.each,
		Rate: r.rate, Seconds: ofFlow(r, r.seconds), Share: ofFlow(r, r.share), LeastJain: r.leastJain,
		FirstAt: r.firstAt, RateBeside: r.rateBeside,
		Window: r.window, Requests: r.requests, RPM: r.rpm, Pages: r.pages, Arrived: ofFlow(r, r.arrived),
		Jitter: ofFlow(r, r.listJitter), Finish: ofFlow(r, r.finish), Stall: r.stall, Video: ofFlow(r, r.video),
		Timeouts: ofFlow(r, r.timeouts), Internal: r.internal, QueueingOf: ofFlow(r, r.queueing),
	}
	if v.Virtual = rec.Virtual != nil; !v.Virtual {
		v.Fallbacks = float64(rec.Decided.Fallbacks)
	}
	if rec.Window != nil {
		v.Covers = rec.Window.KernelCovers
	}
	for _, a := range rec.Actors {
		v.Flows = append(v.Flows, a.Name)
		v.Intact = v.Intact && a.Corrupt+a.Error == ""
	}
	v.Fairness = jain(rec.Rates(r.Stage))
	if one := rec.Virtual; one != nil {
		v.QueuePackets = one.QueuePackets
		v.Drops, v.Losses, v.Retransmits = float64(one.Drops), float64(one.Losses), float64(one.Retransmits)
	}
	if down := rec.Path.Down.DataQueueing; down.Count > 0 {
		v.Centiles = inMillis(down.Centiles[:])
	}
	for _, p := range record.Merge(rec.Points, int(time.Second/stage.Step)) {
		v.Course = append(v.Course, record.Millis(p.Queueing))
	}
	for _, m := range rec.Memory {
		v.Memory = append(v.Memory, float64(m))
	}
	answers := rec.Reloads
	for _, c := range r.Stage.Changes {
		if c.Edge == "" || len(answers) == 0 {
			continue
		}
		if (answers[0].Error != "") != c.Refused {
			v.WrongAnswers++
		}
		answers = answers[1:]
	}
	return v
}

// delaysOf are delays in ms; NaN where nothing passed, at a rate, that could have had any.
func delaysOf(d sim.Delays, passed cc.Rate) record.Percentiles {
	if none := math.NaN(); d == (sim.Delays{}) && passed == 0 {
		return record.Percentiles{Mean: none, P50: none, P95: none, P99: none, Max: none}
	}
	return record.PercentilesOf(d)
}

// queueing is of a flow's packets, where its host's are not others' too.
func (r Run) queueing(i int) (record.Percentiles, error) {
	rec := r.Record
	own := rec.RateOf(r.Stage, i)
	switch {
	case len(rec.Actors) == 1: // all packets are its own
	case rec.Virtual != nil && r.Stage.Actors[i].Kind != stage.Web: // which has a flow for each request
		return delaysOf(rec.Virtual.Flows[i].Queueing, own), nil
	case r.Stage.HostHasQueueing(i) || r.Stage.Actors[i].Kind == stage.Upload:
		return delaysOf(rec.Actors[i].Queueing, own), nil
	}
	return delaysOf(rec.Queueing, rec.Throughput), nil // the queue is everybody's
}

// ofFlow is a figure of a flow's name, made of one of its number.
func ofFlow[T any](r Run, figure func(i int) (T, error)) func(flow string) (T, error) {
	return func(flow string) (v T, err error) {
		i, err := r.index(flow)
		if err != nil {
			return v, err
		}
		return figure(i)
	}
}

func (r Run) index(flow string) (int, error) {
	for i, a := range r.Record.Actors {
		if a.Name == flow {
			return i, nil
		}
	}
	return -1, fmt.Errorf("run %q has no flow %q", r.Stage.Name, flow)
}

// capacity is what a link of a fixed rate carries of payload; NaN of another.
func (r Run) capacity() float64 {
	if r.Stage.Down.Rate == 0 || r.Stage.Down.Trace != nil {
		return math.NaN()
	}
	return payload(r.Stage.Down.Rate)
}

// moment is a time of the run; v is in seconds from its start.
func (r Run) moment(v any) (time.Duration, error) {
	s, err := toNumber(v)
	end := (r.Stage.Duration + stage.Step - 1).Truncate(stage.Step).Seconds()
	if err == nil && !(s >= 0 && s <= end) {
		err = fmt.Errorf("%v is no time of a run: write seconds from 0 to %v", v, end)
	}
	if err != nil {
		return 0, err
	}
	return time.Duration(math.Round(s*1e3)) * time.Millisecond, nil
}

// between is the time between two moments, which are at least so far apart.
func (r Run) between(first, last any, least time.Duration) (from, to time.Duration, err error) {
	if from, err = r.moment(first); err == nil {
		to, err = r.moment(last)
	}
	if err == nil && to-from < least {
		err = fmt.Errorf("from %v to %v are less than %v seconds", first, last, least.Seconds())
	}
	return from, to, err
}

// span is the time between two moments, or without them that in which flow i is there.
func (r Run) span(i int, span []any) (from, to time.Duration, err error) {
	switch len(span) {
	case 0:
		from, to = r.Stage.There(i)
		return from, max(from, to), nil
	case 2:
		return r.between(span[0], span[1], stage.Step)
	}
	return 0, 0, fmt.Errorf("expected two times, from and to, or none")
}

func (r Run) rate(flow string, span ...any) (float64, error) {
	i, err := r.index(flow)
	if err != nil {
		return 0, err
	}
	from, to, err := r.span(i, span)
	if err == nil && from == to { // it is never there
		return math.NaN(), nil
	}
	whole := from%time.Second == 0 && to%time.Second == 0
	if v := r.Record.Virtual; err == nil && v != nil && whole && len(span) > 0 && r.Stage.Actors[i].Kind != stage.Web {
		return mean(v.Flows[i].PerSecond, from, to), nil
	}
	return r.Record.Actors[i].Rate(from, to).Mbps(), err
}

// seconds are the rates in each whole second in which a flow is there.
func (r Run) seconds(i int) (all []float64, err error) {
	from, to := r.Stage.There(i)
	for t := from; t+time.Second <= to; t += time.Second {
		all = append(all, r.Record.Actors[i].Rate(t, t+time.Second).Mbps())
	}
	return all, nil
}

// mean is the mean throughput between two whole seconds.
func mean(perSecond []cc.Rate, from, to time.Duration) float64 {
	sum, n := cc.Rate(0), cc.Rate(0)
	for k := int(from / time.Second); k < int(to/time.Second) && k < len(perSecond); k++ {
		sum += perSecond[k]
		n++
	}
	return (sum / max(1, n)).Mbps()
}

func (r Run) share(i int) (float64, error) {
	var all, own float64
	for k := range r.Record.Actors {
		rate := r.Record.RateOf(r.Stage, k).Mbps()
		all += rate
		if k == i {
			own = rate
		}
	}
	return own / all, nil
}

// leastJain is the least fairness of any whole second between two times, among the flows
// that are there in all of it. One flow alone is fair; NaN: none ever is there.
func (r Run) leastJain(from, to any) (float64, error) {
	first, last, err := r.between(from, to, time.Second)
	if err != nil {
		return 0, err
	}
	least, none := 1.0, true
	for at := first; at+time.Second <= last; at += time.Second {
		var open []float64
		for _, a := range r.Stage.Actors {
			if a.Start <= at && (a.Stop == 0 || a.Stop >= at+time.Second) {
				rate, err := r.rate(a.Name, at.Seconds(), (at + time.Second).Seconds())
				if err != nil {
					return 0, err
				}
				open = append(open, rate)
			}
		}
		if len(open) > 0 {
			least, none = min(least, sim.Jain(open...)), false
		}
	}
	if none {
		return math.NaN(), nil
	}
	return least, nil
}

// firstAt is how many seconds after a time (from) a flow has had a rate (mbit) for a time (over); +Inf: never.
func (r Run) firstAt(flow string, mbit, over, from any) (float64, error) {
	i, err := r.index(flow)
	if err != nil {
		return 0, err
	}
	want, err := toNumber(mbit)
	if err != nil {
		return 0, err
	}
	_, length, err := r.between(0, over, stage.Step)
	if err != nil {
		return 0, err
	}
	since, _, err := r.between(from, r.Stage.Duration.Seconds(), length)
	if err != nil {
		return 0, err
	}
	for t := since; t+length <= r.Stage.Duration; t += stage.Step {
		if r.Record.Actors[i].Rate(t, t+length).Mbps() >= want {
			return (t + length - since).Seconds(), nil
		}
	}
	return math.Inf(1), nil
}

// rateBeside is a flow's rate in the time in which another runs, from a second after the
// other's start on; NaN: there is none.
func (r Run) rateBeside(flow, other string) (float64, error) {
	i, err := r.index(flow)
	if err != nil {
		return 0, err
	}
	k, err := r.index(other)
	if err != nil {
		return 0, err
	}
	var got, length float64
	for _, turn := range r.Stage.Turns(k) {
		from, to := turn.From.Truncate(stage.Step)+time.Second, turn.To.Truncate(stage.Step)
		if to > from {
			got += r.Record.Actors[i].Rate(from, to).Mbps() * (to - from).Seconds()
			length += (to - from).Seconds()
		}
	}
	return got / length, nil
}

// window is a flow's group's at each step, in packets.
func (r Run) window(flow string, span ...any) (packets []float64, err error) {
	i, err := r.index(flow)
	if err != nil {
		return nil, err
	}
	from, to, err := r.span(i, span)
	if err != nil {
		return nil, err
	}
	all := r.Record.Actors[i].Cwnd
	if all == nil {
		return nil, fmt.Errorf("flow %q has no window that is looked at: it goes past the proxy, up, or as UDP", flow)
	}
	for _, w := range all[min(len(all), int(from/stage.Step)):min(len(all), int(to/stage.Step))] {
		packets = append(packets, float64(w)/float64(cc.DefaultMSS))
	}
	return packets, nil
}

// checkDatagrams refuses a flow that is no app: udp.
func (r Run) checkDatagrams(i int) error {
	if a := r.Stage.Actors[i]; a.Kind != stage.UDP {
		return fmt.Errorf("flow %q is no app: udp: of others all arrives, in order", a.Name)
	}
	return nil
}

// listJitter returns how much the transit of each packet of a flow differs from that of the one before it, in ms.
func (r Run) listJitter(i int) ([]float64, error) {
	return inMillis(r.Record.Actors[i].Jitter), r.checkDatagrams(i)
}

func inMillis(times []time.Duration) (all []float64) {
	for _, d := range times {
		all = append(all, record.Millis(d))
	}
	return all
}

// arrived is the part that came of what a flow's server sent.
func (r Run) arrived(i int) (float64, error) {
	return float64(total(r.Record.Actors[i].Bytes)) / float64(r.Record.Actors[i].Sent), r.checkDatagrams(i)
}

// finish is when the last byte of a flow came, in seconds from the run's start; +Inf: a download of a size did
// not end; NaN: there is no byte.
func (r Run) finish(i int) (float64, error) {
	a, v := r.Stage.Actors[i], r.Record.Virtual
	switch ends := a.Size > 0 && a.Kind == stage.Bulk; {
	case ends && v != nil && v.Flows[i].Received == 0, ends && v == nil && total(r.Record.Actors[i].Bytes) < a.Size:
		return math.Inf(1), nil
	case ends && v != nil:
		return (a.Start + v.Flows[i].Received).Seconds(), nil
	}
	last := 0
	for k, n := range r.Record.Actors[i].Bytes {
		if n > 0 {
			last = k + 1
		}
	}
	if last == 0 {
		return math.NaN(), nil
	}
	return (time.Duration(last) * stage.Step).Seconds(), nil
}

// stall is the longest time in seconds, from a time on, in which a flow moved nothing.
func (r Run) stall(flow string, from any) (float64, error) {
	i, err := r.index(flow)
	if err != nil {
		return 0, err
	}
	since, _, err := r.between(from, r.Stage.Duration.Seconds(), stage.Step)
	if err != nil {
		return 0, err
	}
	empty, longest := 0, 0
	for _, n := range r.Record.Actors[i].Bytes[min(len(r.Record.Actors[i].Bytes), int(since/stage.Step)):] {
		if empty++; n > 0 {
			empty = 0
		}
		longest = max(longest, empty)
	}
	return (time.Duration(longest) * stage.Step).Seconds(), nil
}

// video is how a flow's video played; one that never began has no rebuffers that could be few.
func (r Run) video(i int) (record.Video, error) {
	v := r.Record.Actors[i].Video
	if v == nil {
		return record.Video{}, fmt.Errorf("flow %q is no video", r.Stage.Actors[i].Name)
	}
	if v.StartUp == 0 {
		return record.Video{StartUp: math.Inf(1), Rebuffers: math.NaN(), Rebuffer: math.NaN()}, nil
	}
	return record.VideoOf(*v), nil
}

func (r Run) timeouts(i int) (float64, error) {
	if r.Record.Virtual == nil {
		return math.NaN(), nil
	}
	sum := 0
	for _, n := range r.Record.Actors[i].Flows {
		sum += r.Record.Virtual.Flows[n].Timeouts
	}
	return float64(sum), nil
}

// internal is what a flow's algorithm shows under a name, at each step in which the flow is there. Virtual time alone
// looks into algorithms.
func (r Run) internal(flow, name string) (values []float64, err error) {
	i, err := r.index(flow)
	if err != nil {
		return nil, err
	}
	if r.Record.Virtual == nil {
		return nil, fmt.Errorf("internal: of flow %q only virtual time knows its algorithm's state", flow)
	}
	for _, s := range r.Record.Virtual.Flows[r.Record.Actors[i].Flows[0]].Samples {
		algorithm, _, _ := strings.Cut(s.Algorithm, ":")
		spec, err := cc.Lookup(algorithm)
		if err != nil {
			return nil, err
		}
		k := slices.IndexFunc(spec.Internals, func(in cc.Internal) bool { return in.Name == name })
		if k < 0 {
			return nil, fmt.Errorf("internal: %s does not show %q; penstock algorithms %s lists what it shows",
				algorithm, name, algorithm)
		}
		values = append(values, s.Internals[k])
	}
	return values, nil
}
