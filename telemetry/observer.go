package telemetry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/telemetry/compare"
	"github.com/penstock-net/penstock/telemetry/page"
)

const (
	// observePeriod is the time between two readings of all flows.
	observePeriod = time.Second
	// checkPeriod is the time between two checks of whether a sampled rule does harm.
	checkPeriod = time.Minute
	// busyBytes is what a host gets in a busy second, at least. Less shows neither its rate nor its queue.
	busyBytes = 16 << 10
)

// SampledRule is a rule that only a sample of the hosts gets.
type SampledRule struct {
	Rule    string
	Against string // the rule that the other hosts have; empty: the defaults
}

// Observer records the rates and queueing delays of hosts under the rules that are compared, and during proofs.
// Without a sampled rule and without a proof it records nothing. It is safe for concurrent use.
//
//	field                       guarded by
//	recorder, watched, readers  themselves
//	proof, gains                mu
//	hosts, delivered            only ObserveFlows uses them
//	Downloads                   itself
type Observer struct {
	// Flows returns how many connections there are, and each of them.
	Flows func() (n int, each iter.Seq[*proxy.FlowInfo])
	// Samples returns the sampled rules in force.
	Samples func() []SampledRule
	// StopSample takes a sampled rule out of force. why says what harm it does to its hosts.
	StopSample func(rule, why string) error
	// Try puts a trial into force; nil ends it.
	Try  func(*proxy.Trial)
	Wall func() time.Time
	Log  *slog.Logger

	Downloads *Downloads // counts all connections that are over, sampled or not

	recorder compare.Recorder
	watched  atomic.Pointer[[]string] // rules that are recorded
	readers  sync.Map                 // functions that are called with connections that are over

	mu    sync.Mutex
	proof *proof      // the last one; nil: there was none
	gains []page.Gain // of the samples, at the last check

	hosts     hostBases
	delivered map[uint64]cc.Bytes // by flow, at the last reading
}

// ObserveFlows observes until ctx ends.
func (o *Observer) ObserveFlows(ctx context.Context) {
	o.delivered = map[uint64]cc.Bytes{}
	tick := time.NewTicker(observePeriod)
	defer tick.Stop()
	checked := o.Wall()
	for {
		select {
		case <-ctx.Done():
			o.Try(nil)
			return
		case <-tick.C:
		}
		now := o.Wall()
		o.observeSecond(now)
		if now.Sub(checked) >= checkPeriod {
			checked = now
			o.checkSamples(now)
		}
	}
}

// observeSecond records what busy hosts saw since the last call.
func (o *Observer) observeSecond(now time.Time) {
	var watched []string
	for _, s := range o.Samples() {
		watched = append(watched, s.Rule, s.Against)
	}
	o.watched.Store(&watched)
	o.mu.Lock()
	p := o.runningProof(now)
	o.mu.Unlock()
	if len(watched) == 0 && p == nil {
		clear(o.delivered)
		return
	}
	for host, s := range o.sumSeconds(now) {
		if s.bytes < busyBytes {
			continue
		}
		delay := max(0, s.rtt/time.Duration(s.bytes)-o.hosts[host].base)
		add := func(u *compare.Unit) { u.ObserveSecond(delay, float64(s.bytes)) }
		if rule, ok := onlyOne(s.rules); ok && slices.Contains(watched, rule) {
			o.recorder.Observe(now, rule, host, add)
		}
		if p != nil && p.host == host {
			p.observeTurn(now, s.sides, add)
		}
	}
	o.hosts.dropOldHosts(now)
}

// hostSecond is what one host got in one second.
type hostSecond struct {
	bytes cc.Bytes
	rtt   time.Duration // the sum over bytes of the smoothed round trip
	rules []string      // of the flows that were busy
	sides []string      // of a proof
}

// sumSeconds adds up what each host got since the last call. It takes TCP's round trips, because TCP measures those of
// managed and of unmanaged connections in the same way.
func (o *Observer) sumSeconds(now time.Time) map[string]*hostSecond {
	sums, delivered := map[string]*hostSecond{}, make(map[uint64]cc.Bytes, len(o.delivered))
	_, flows := o.Flows()
	for f := range flows {
		before, known := o.delivered[f.ID]
		delivered[f.ID] = f.Client.Delivered
		moved := f.Client.Delivered - before
		known = known || f.Age < 2*observePeriod // a new one has moved all its bytes since the last reading
		if !f.Relayed() || !known || moved <= 0 || f.Client.SRTT <= 0 {
			continue
		}
		host := f.ClientHost()
		o.hosts.updateBase(now, host, f.Client.MinRTT)
		s := sums[host]
		if s == nil {
			s = &hostSecond{}
			sums[host] = s
		}
		s.bytes += moved
		s.rtt += f.Client.SRTT * time.Duration(moved)
		s.rules = appendNew(s.rules, f.Rule)
		s.sides = appendNew(s.sides, sideOf(f))
	}
	o.delivered = delivered
	return sums
}

// appendNew appends s unless it is there.
func appendNew(all []string, s string) []string {
	if slices.Contains(all, s) {
		return all
	}
	return append(all, s)
}

// onlyOne returns the only element. Seconds with several rules or sides are not recorded, because their connections
// share one queue.
func onlyOne(all []string) (string, bool) {
	if len(all) != 1 {
		return "", false
	}
	return all[0], true
}

// ObserveClosed records a connection that is over.
func (o *Observer) ObserveClosed(f *proxy.FlowInfo) {
	o.Downloads.ObserveClosed(o.Wall(), f)
	o.readers.Range(func(_, read any) bool { read.(func(*proxy.FlowInfo))(f); return true })
	watched := o.watched.Load()
	if watched == nil || len(*watched) == 0 || f.Down.Written == 0 || !slices.Contains(*watched, f.Rule) {
		return
	}
	o.recorder.Observe(o.Wall(), f.Rule, f.ClientHost(), func(u *compare.Unit) {
		u.ObserveDownload(int64(f.Down.Written), f.Age-f.Idle)
	})
}

// addReader calls read with each connection that is over, until stop is called. read must not wait, and not keep its
// argument.
func (o *Observer) addReader(read func(*proxy.FlowInfo)) (stop func()) {
	key := new(byte)
	o.readers.Store(key, read)
	return func() { o.readers.Delete(key) }
}

// checkSamples computes what each sampled rule gains, and stops those that cost their hosts a large part of their
// rate.
func (o *Observer) checkSamples(now time.Time) {
	var gains []page.Gain
	for _, s := range o.Samples() {
		r := o.recorder.Compare(now, s.Rule, s.Against, "hosts")
		gains = append(gains, page.Gain{
			Rules: []string{s.Rule, s.Against},
			Text:  fmt.Sprintf("%s against %s: %s", s.Rule, RuleName(s.Against), r.Verdict),
		})
		if !r.Harmful {
			continue
		}
		if err := o.StopSample(s.Rule, r.Verdict); err != nil {
			o.Log.Error("a sample that costs its hosts too much of their rate cannot be stopped", "rule", s.Rule,
				"verdict", r.Verdict, "err", err)
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.gains = gains
}

// Compare compares two rules that are recorded. An empty name stands for the defaults.
func (o *Observer) Compare(first, second string) (compare.Result, error) {
	var known []string
	for _, s := range o.Samples() {
		known = appendNew(appendNew(known, s.Rule), s.Against)
	}
	for _, rule := range []string{first, second} {
		switch {
		case len(known) == 0:
			return compare.Result{}, errors.New("no rule has a match.sample, so that nothing is recorded; give one of two " +
				"rules for the same traffic a sample, such as 5%")
		case !slices.Contains(known, rule):
			return compare.Result{}, fmt.Errorf("rule %q is not recorded; recorded are the rules with match.sample, and "+
				"those that the other hosts have: %s", RuleName(rule), strings.Join(nameRules(known), ", "))
		}
	}
	return o.recorder.Compare(o.Wall(), first, second, "hosts"), nil
}

// Gains says what sampled rules and the last proof have shown, one sentence each. Samples are compared each minute.
func (o *Observer) Gains() []page.Gain {
	o.mu.Lock()
	gains := slices.Clone(o.gains)
	o.mu.Unlock()
	if p, ok := o.LastProof(); ok {
		state := "so far"
		if p.Ended {
			state = "proved"
		}
		text := fmt.Sprintf("%s, %s: %s", p.Host, state, p.Result.Verdict)
		gains = append(gains, page.Gain{Host: p.Host, Text: text})
	}
	return gains
}

// RuleName returns the name of a rule for people. The defaults have none in the configuration.
func RuleName(rule string) string { return cmp.Or(rule, "defaults") }

// nameRules returns the names of rules for people.
func nameRules(rules []string) []string {
	out := make([]string, len(rules))
	for i, r := range rules {
		out[i] = RuleName(r)
	}
	return out
}

// runningProof returns the proof that runs, and ends it once its time is over. nil: none runs. The caller holds mu.
func (o *Observer) runningProof(now time.Time) *proof {
	p := o.proof
	switch {
	case p == nil || p.ended.Load():
		return nil
	case p.turnAt(now) >= turnsOfProof:
		o.endProof(now)
		return nil
	}
	return p
}

// endProof ends the proof. It keeps the result, because pages ask for it again and again. The caller holds mu.
func (o *Observer) endProof(now time.Time) {
	o.proof.result = o.proof.compareSides(now)
	o.proof.ended.Store(true)
	o.Try(nil)
}

// errProofRuns refuses a second proof: the connections of both would be counted twice.
var errProofRuns = errors.New("a proof runs already; wait for its end, or end it with penstock prove --stop")

// StartProof lets managed and unmanaged connections of a host take turns for a time.
func (o *Observer) StartProof(host string, last time.Duration) error {
	if last < minProof || last > maxProof {
		return fmt.Errorf("a proof lasts from %v to %v, not %v", minProof, maxProof, last)
	}
	now := o.Wall()
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.runningProof(now) != nil {
		return errProofRuns
	}
	p := &proof{host: host, begin: now, turn: last / turnsOfProof, seed: uint64(now.UnixNano())}
	o.proof = p
	o.Try(&proxy.Trial{
		Host:      host,
		Unmanaged: func() bool { return !p.ended.Load() && p.isUnmanaged(p.turnAt(o.Wall())) },
	})
	o.Log.Info("a proof begins: new connections of the host are managed and left to the kernel by turns", "host", host,
		"for", last, "turn", p.turn)
	return nil
}

// StopProof ends the proof that runs, if there is one.
func (o *Observer) StopProof() {
	now := o.Wall()
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.runningProof(now) != nil {
		o.endProof(now)
	}
}

// LastProof returns the state of the last proof. false: there was none.
func (o *Observer) LastProof() (Proof, bool) {
	now := o.Wall()
	o.mu.Lock()
	defer o.mu.Unlock()
	running, p := o.runningProof(now), o.proof
	if p == nil {
		return Proof{}, false
	}
	of := p.turn * turnsOfProof
	out := Proof{
		Host: p.host, Seconds: min(now.Sub(p.begin), of).Seconds(), Of: of.Seconds(), Ended: running == nil,
		Result: p.result,
	}
	if running != nil {
		out.Turn, out.Result = p.sideOfTurn(p.turnAt(now)), p.compareSides(now)
	}
	return out, true
}
