package stage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/policy"
)

// PlayVirtual plays a stage in virtual time: the flows have the terms that the
// proxy's configuration gives them, over the transport that the real stage has.
// There is no proxy then, so its time, memory and sockets do not matter.
//
// A Web application's requests begin when they are due and it runs, whether or not the one
// before has ended; of Requests, those after the warm-up are recorded.
//
// change alters the scenario that it comes to; nil: nothing does. When ctx ends there is no record.
func PlayVirtual(ctx context.Context, s Stage, change func(*sim.Scenario)) (Record, error) {
	scenario, record, err := Scenario(s)
	if err != nil {
		return Record{}, err
	}
	if change != nil {
		change(&scenario)
	}
	var run *netlab.Simulation
	err = s.Agents.Simulate(scenario, func(scenario sim.Scenario) (err error) {
		run, err = netlab.Simulate(ctx, scenario)
		return err
	})
	if err != nil {
		return Record{}, fmt.Errorf("stage: %s: %w", s.Name, err)
	}
	r := record(run.Result)
	r.passed(s, run)
	for i, a := range s.Actors {
		if s.HostHasQueueing(i) && a.Kind == Web { // each of its flows has its own
			r.Actors[i].Queueing = run.HostReport(a.Host, s.Warmup, s.Duration).Down.DataQueueing.Delays
		}
	}
	return r, nil
}

// Scenario is a stage as the simulator has it, and what reads its result as that of a real
// run is.
func Scenario(s Stage) (sim.Scenario, func(sim.Result) Record, error) {
	v := virtual{stage: s, flows: make([][]int, len(s.Actors))}
	err := v.prepare()
	if err == nil {
		err = v.scenario.Check()
	}
	if err != nil {
		return sim.Scenario{}, nil, fmt.Errorf("stage: %s: %w", s.Name, err)
	}
	return v.scenario, v.record, nil
}

// virtual is a stage as the simulator has it.
type virtual struct {
	stage    Stage
	scenario sim.Scenario
	flows    [][]int // numbers of each actor's; the first is the actor's own
	edges    []virtualEdge
	reloads  []Reload
}

// virtualEdge is what decides about connections from a moment on.
type virtualEdge struct {
	from  time.Duration
	rules *policy.Policy // nil: there is no proxy
}

func (v *virtual) prepare() error {
	s := v.stage
	if err := s.Check(); err != nil {
		return err
	}
	edge, rules, err := s.readEdge(s.Edge)
	if err != nil {
		return err
	}
	v.scenario = sim.Scenario{
		Down: s.Down, Cell: s.Cell, Up: s.Up, Transport: s.transport(edge.Envelope.Kernel()),
		Forecasts: s.Native && s.Over != OverTCP,
		RawRTT:    s.Tunnel != "", Hints: s.Hints, AckEvery: s.AckEvery, AckDelay: s.AckDelay,
		Duration: s.Duration, Warmup: s.Warmup, Sample: Step, Seed: s.Seed,
	}
	v.edges = []virtualEdge{{rules: rules}}
	for _, c := range s.Changes {
		if c.Delay > 0 {
			v.scenario.Changes = append(v.scenario.Changes, sim.Change{At: c.At, Delay: c.Delay})
		}
		if c.Edge == "" {
			continue
		}
		answer := Reload{At: c.At}
		if rules, err := s.rereadEdge(edge, c.Edge); err != nil {
			answer.Error = err.Error()
		} else {
			v.edges = append(v.edges, virtualEdge{c.At, rules})
		}
		v.reloads = append(v.reloads, answer)
	}
	if err := v.addFlows(); err != nil {
		return err
	}
	for _, e := range v.edges[1:] {
		v.move(e)
	}
	return nil
}

// virtualListener is where connections to the edge come in, as far as rules can
// tell; Edge leaves listeners out.
const virtualListener = "edge"

// transport is the one below the downloads: the kernel's, unless they come out of
// a tunnel that ends in the proxy, or the proxy relays above an envelope of the
// kernel's own. A stage has one, also for those that are past such a proxy.
func (s Stage) transport(envelope string) sim.Transport {
	switch {
	case s.Over == OverTCP:
		return sim.Kernel
	case s.Over == OverOwnAcks:
		return sim.Relay
	case s.Native:
		return sim.Native
	}
	tunnelled := s.Edge != "" && s.Tunnel != ""
	if tunnelled || envelope != "" && envelope != kernel.EBPF {
		return sim.Relay
	}
	return sim.Kernel
}

// readEdge reads the proxy's configuration and its rules, nil where there is no proxy.
func (s Stage) readEdge(edge string) (cfg config.Config, rules *policy.Policy, err error) {
	if edge == "" {
		return cfg, nil, nil
	}
	cfg, err = config.Parse(fmt.Appendf(nil, "listeners: [{name: %s, mode: mixed, address: \"127.0.0.1:1080\"}]\n%s",
		virtualListener, s.Agents.YAML()+edge))
	if err != nil {
		return cfg, nil, err
	}
	rules, err = cfg.Policy()
	return cfg, rules, err
}

// rereadEdge reads another configuration for a proxy that runs.
func (s Stage) rereadEdge(now config.Config, edge string) (*policy.Policy, error) {
	next, rules, err := s.readEdge(edge)
	if err == nil {
		err = now.CheckReload(next)
	}
	return rules, err
}

// addFlows makes the actors' flows. Those that are not an actor's first come last, so
// that the first have their actors' numbers.
func (v *virtual) addFlows() error {
	var more []func()
	for i, a := range v.stage.Actors {
		starts, err := v.starts(i)
		if err != nil {
			return err
		}
		for k, at := range starts {
			f, err := v.flow(v.connection(i, k), at)
			if err != nil {
				return fmt.Errorf("actor %d, %q: %w", i, a.Name, err)
			}
			if k == 0 {
				v.add(i, f)
			} else {
				more = append(more, func() { v.add(i, f) })
			}
		}
	}
	for _, add := range more {
		add()
	}
	return nil
}

// maxRequests bounds the requests of a Web application: each is a flow.
const maxRequests = 50_000

// starts are when an actor's connections begin: one, or a Web application's, in its turns.
func (v *virtual) starts(i int) (all []time.Duration, err error) {
	a := v.stage.Actors[i]
	if (a.Kind == Requests || a.Kind == Video) && a.On > 0 {
		return nil, &config.Error{Key: "flows." + a.Name + ".on", Message: fmt.Sprintf("in virtual time app: %s has "+
			"no rests: take on and off out, or play it over real sockets", a.Kind)}
	}
	if a.Kind != Web {
		return []time.Duration{a.Start}, nil
	}
	if a.Every == 0 {
		return nil, &config.Error{Key: "flows." + a.Name, Message: "in virtual time a web application has a time " +
			"from one request to the next: write such as every: 2s"}
	}
	due := a.Start
	for _, t := range v.stage.Turns(i) {
		for due = max(due, t.From); due < t.To; due += a.Every {
			if all = append(all, due); len(all) > maxRequests {
				return nil, &config.Error{Key: "flows." + a.Name + ".every", Message: fmt.Sprintf("these are more "+
					"than %d requests: write a longer time from one to the next", maxRequests)}
			}
		}
	}
	return all, nil
}

func (v *virtual) add(actor int, f sim.FlowConfig) {
	n := len(v.scenario.Flows)
	f.Name = v.stage.Actors[actor].Name
	if k := len(v.flows[actor]); k > 0 {
		f.Name += " " + strconv.Itoa(k+1)
	}
	v.scenario.Flows = append(v.scenario.Flows, f)
	v.flows[actor] = append(v.flows[actor], n)
}

// connection is the number of actor i's connection k, both from 0; the first of each has its actor's number.
func (v *virtual) connection(i, k int) int { return i + k*len(v.stage.Actors) }

// actor returns the actor of connection n.
func (v *virtual) actor(n int) Actor { return v.stage.Actors[n%len(v.stage.Actors)] }

// flow is connection n, which begins at a time.
func (v *virtual) flow(n int, at time.Duration) (sim.FlowConfig, error) {
	a := v.actor(n)
	if a.Kind == Upload {
		return v.upload(n)
	}
	t, ours, err := v.terms(n, at)
	f := sim.FlowConfig{
		Algorithm: t.Algorithm, Params: t.Params, Group: t.Group, Host: a.Host + 1,
		Priority: t.Priority, Weight: t.Weight, MaxRate: t.MaxRate, ConnectionRate: t.ConnectionRate,
		Class: t.Class, Target: t.Target, MinRate: t.MinRate, HintCap: t.HintCap, Restarts: t.Restarts,
		Start: at, Stop: a.Stop, Bytes: a.Size, Rate: a.Rate, On: a.On, Off: a.Off, Random: a.Random, ECN: a.ECN,
		SendBuffer: a.SendBuffer,
	}
	switch a.Kind {
	case UDP, QUIC:
		if ours {
			f.Hold, f.HoldParams = t.Algorithm, t.Params
		}
		f.Algorithm, f.Params = cmp.Or(a.Control, quicControl), nil
		if a.Kind == UDP {
			f.Algorithm = sim.UDP
		}
	case Requests:
		f.Every = max(a.Every, 1) // 0: as soon as the last has come
	case Web:
		f.On, f.Off, f.Random = 0, 0, false // what has begun goes on in a rest
	case Video:
		f.Rate, f.Video = 0, a.video()
	}
	return f, err
}

// upload is an upload's connection, under the control that its client has: in a native stage the stage's algorithm. The
// window that the edge holds is one for all uploads of a host.
func (v *virtual) upload(n int) (sim.FlowConfig, error) {
	a := v.actor(n)
	control := cmp.Or(a.Control, kernelDefault)
	f := sim.FlowConfig{
		Algorithm: control, Params: sim.KernelParams(control), Upload: true, Host: a.Host + 1,
		Start: a.Start, Stop: a.Stop,
	}
	verdict, err := v.decide(n, v.edges[0])
	if v.stage.Native {
		f.Algorithm, f.Params = verdict.Down.Algorithm, verdict.Down.Params
	} else if verdict.FromClient.Algorithm != policy.Unmanaged {
		f.Receive, f.ReceiveParams = verdict.FromClient.Algorithm, verdict.FromClient.Params
	}
	return f, err
}

// Where hosts and servers are, as far as rules can tell.
func virtualHost(host, connection int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 77, 1, byte(host + 2)}), uint16(10_000+connection%50_000))
}

var virtualServer = netip.AddrFrom4([4]byte{10, 77, 2, 2})

// terms returns those of connection n, which begins at a time: the edge's, or the server's own where it is past the
// edge or the edge leaves it alone. It reports whether they are the edge's.
func (v *virtual) terms(n int, at time.Duration) (flow.Terms, bool, error) {
	edge := v.edges[0]
	for _, e := range v.edges[1:] {
		if e.from <= at {
			edge = e
		}
	}
	verdict, err := v.decide(n, edge)
	if err != nil || verdict.Down.Algorithm != policy.Unmanaged {
		return verdict.Down, err == nil, err
	}
	name, _, err := cc.Parse(cmp.Or(v.stage.Kernel, kernelDefault))
	return flow.Terms{
		Group: fmt.Sprintf("server %d", n), Algorithm: name, Params: sim.KernelParams(name),
		Restarts: name == "cubic" || name == "reno", // tcp_slow_start_after_idle; bbr does not
	}, false, err
}

// decide is what an edge makes of connection n.
func (v *virtual) decide(n int, edge virtualEdge) (policy.Verdict, error) {
	a, alone := v.actor(n), flow.Terms{Algorithm: policy.Unmanaged}
	if edge.rules == nil || !v.stage.proxied(a) {
		return policy.Verdict{Down: alone, FromClient: alone}, nil
	}
	facts := policy.Facts{
		Listener: virtualListener, Source: virtualHost(a.Host, n), Target: netip.AddrPortFrom(virtualServer, a.port()),
	}
	if a.isDatagrams() {
		facts.Protocol = policy.UDP
	}
	verdict := edge.rules.Decide(facts)
	if verdict.Refuse != "" {
		return verdict, errors.New("rule " + verdict.Rule + " refuses it: " + verdict.Refuse)
	}
	return verdict, nil
}

// terms are what the stage's edge says of an actor's downloads.
func (s Stage) terms(i int) (flow.Terms, error) {
	_, rules, err := s.readEdge(s.Edge)
	if err != nil {
		return flow.Terms{}, err
	}
	v := virtual{stage: s}
	verdict, err := v.decide(i, virtualEdge{rules: rules})
	return verdict.Down, err
}

// move gives running flows what another configuration says, as a reload does:
// one that it would leave alone or refuse goes on as it was.
func (v *virtual) move(edge virtualEdge) {
	for i, a := range v.stage.Actors {
		before, err := v.decide(i, v.edges[0])
		if err != nil || before.Down.Algorithm == policy.Unmanaged || a.isDatagrams() ||
			a.Kind == Upload && !v.stage.Native {
			continue // a host's own control does not change hands
		}
		for k, n := range v.flows[i] {
			f := v.scenario.Flows[n]
			verdict, err := v.decide(v.connection(i, k), edge)
			t := verdict.Down
			if err != nil || t.Algorithm == policy.Unmanaged || f.Start >= edge.from {
				continue
			}
			t.Host = netip.Addr{} // the simulator's own
			v.scenario.Changes = append(v.scenario.Changes, sim.Change{At: edge.from, Flow: f.Name, Terms: t})
		}
	}
}

// record reads the run as that of a real one is.
func (v *virtual) record(run sim.Result) Record {
	r := Record{Reloads: v.reloads, Virtual: &run, Transport: v.scenario.Transport}
	packets := 0
	for _, f := range run.Flows {
		if f.Algorithm != sim.UDP {
			packets += f.Packets
		}
	}
	r.Resent = float64(run.Retransmits) / float64(max(1, packets)) // all of one size
	for i, numbers := range v.flows {
		var flows []sim.FlowResult
		for _, n := range numbers {
			flows = append(flows, run.Flows[n])
		}
		r.Actors = append(r.Actors, v.actorRecord(i, flows))
	}
	return r
}

func (v *virtual) actorRecord(i int, flows []sim.FlowResult) ActorRecord {
	s, a := v.stage, v.stage.Actors[i]
	steps := s.steps()
	r := ActorRecord{Name: a.Name, Bytes: make([]cc.Bytes, steps), Flows: v.flows[i]}
	if s.windowed(a) {
		r.Cwnd, r.Share = make([]cc.Bytes, steps), make([]cc.Bytes, steps)
	}
	if s.Cell != nil || a.Kind == Upload {
		r.Queueing = flows[0].Queueing
	}
	for _, f := range flows {
		to := f.To
		if a.Kind == UDP {
			to = s.Duration // the last come after it has ended
		}
		r.follow(f, to)
	}
	switch a.Kind {
	case UDP:
		r.Sent, r.Jitter = flows[0].Final.Taken, flows[0].Jitter
	case Video:
		r.Video = &flows[0].Video
	case Requests:
		r.Requests = flows[0].Objects
	case Web:
		for k, f := range flows {
			q := sim.Object{At: v.scenario.Flows[v.flows[i][k]].Start}
			if f.Received > 0 {
				q.Took = s.dial(q.At, a.Host) + f.Received
			}
			r.Requests = append(r.Requests, q)
		}
	}
	return r
}

// follow adds what a flow did step by step, until a time.
func (a *ActorRecord) follow(f sim.FlowResult, to time.Duration) {
	var read cc.Bytes
	note := func(at time.Duration, now cc.Bytes) {
		if at <= 0 {
			return
		}
		k := min(int((at-1)/Step), len(a.Bytes)-1) // what is sampled at a step's end belongs to it
		a.Bytes[k] += now - read
		read = now
	}
	for _, sample := range f.Samples {
		note(sample.At, sample.Read)
		if k := int(sample.At / Step); a.Cwnd != nil && k < len(a.Cwnd) {
			a.Cwnd[k] = max(a.Cwnd[k], sample.Cwnd)
			if sample.At%Step == 0 { // there may be more
				a.Share[k] += sample.Share
			}
		}
	}
	note(to, f.Read)
}
