package stage

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/policy"
)

// PlayVirtual plays a stage in virtual time: the flows have the terms that the
// proxy's configuration gives them, over a transport that acknowledges each
// packet, reports each acknowledgement and keeps the window to the byte. There is
// no proxy then whose time, memory or sockets could matter.
func PlayVirtual(s Stage) (Record, error) {
	v := virtual{stage: s}
	if err := v.prepare(); err != nil {
		return Record{}, fmt.Errorf("stage: %s: %w", s.Name, err)
	}
	run, err := netlab.Simulate(v.scenario)
	if err != nil {
		return Record{}, fmt.Errorf("stage: %s: %w", s.Name, err)
	}
	return v.record(run), nil
}

// virtual is a stage as the simulator has it.
type virtual struct {
	stage    Stage
	scenario sim.Scenario
	reloads  []Reload
}

func (v *virtual) prepare() error {
	s := v.stage
	if err := s.Check(); err != nil {
		return err
	}
	v.scenario = sim.Scenario{
		Down: s.Down, Up: s.Up, RawRTT: true, Hints: s.Hints,
		Duration: s.Duration, Sample: Step, Seed: s.Seed,
	}
	rules, err := virtualEdge(s.Edge)
	if err != nil {
		return err
	}
	for i, a := range s.Actors {
		f, err := s.flow(i, a, rules)
		if err != nil {
			return fmt.Errorf("actor %d, %q: %w", i, a.Name, err)
		}
		v.scenario.Flows = append(v.scenario.Flows, f)
	}
	for _, c := range s.Changes {
		if c.Delay > 0 {
			v.scenario.Changes = append(v.scenario.Changes, sim.Change{At: c.At, Delay: c.Delay})
		}
	}
	return nil
}

// virtualListener is where connections to the edge come in, as far as rules can
// tell; Edge leaves listeners out.
const virtualListener = "edge"

// virtualEdge reads the proxy's configuration; nil where there is no proxy.
func virtualEdge(edge string) (*policy.Policy, error) {
	if edge == "" {
		return nil, nil
	}
	cfg, err := proxy.Parse(fmt.Appendf(nil, "listeners: [{name: %s, mode: mixed, address: \"127.0.0.1:1080\"}]\n%s", virtualListener, edge))
	if err != nil {
		return nil, err
	}
	return cfg.Policy()
}

// Where hosts and servers are, as far as rules can tell.
func virtualHost(host, actor int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 77, 1, byte(host + 2)}), uint16(40_000+actor))
}

var virtualServer = netip.AddrFrom4([4]byte{10, 77, 2, 2})

// terms are those of the actor's downloads: the edge's, or the server's own
// where it is past the edge or the edge leaves it alone.
func (s Stage) terms(i int, a Actor, rules *policy.Policy) (flow.Terms, error) {
	host := virtualHost(a.Host, i)
	if rules != nil && !a.Direct {
		v := rules.Decide(policy.Facts{
			Listener: virtualListener, Source: host, Target: netip.AddrPortFrom(virtualServer, a.port()),
		})
		if v.Refuse != "" {
			return flow.Terms{}, fmt.Errorf("rule %s refuses it: %s", v.Rule, v.Refuse)
		}
		if v.Down.Algorithm != policy.Unmanaged {
			return v.Down, nil
		}
	}
	kernel := s.Kernel
	if kernel == "" {
		kernel = "cubic"
	}
	return flow.Terms{Group: fmt.Sprintf("server %d", i), Host: host.Addr(), Algorithm: kernel}, nil
}

// flow is the actor's connection.
func (s Stage) flow(i int, a Actor, rules *policy.Policy) (sim.FlowConfig, error) {
	t, err := s.terms(i, a, rules)
	return sim.FlowConfig{
		Name: a.Name, Algorithm: t.Algorithm, Params: t.Params, Group: t.Group,
		Priority: t.Priority, Weight: t.Weight, MaxRate: t.MaxRate,
		Start: a.Start, Stop: a.Stop, Bytes: a.Size, Rate: a.Rate, On: a.On, Off: a.Off,
	}, err
}

// record reads the run as that of a real one is.
func (v *virtual) record(run *netlab.Simulation) Record {
	s := v.stage
	report := run.Report(s.Warmup, s.Duration).Down
	r := Record{
		Stage: s.Name, Throughput: report.Throughput, Utilisation: report.Utilisation,
		Queueing: quantilesOf(report.DataQueueing), Reloads: v.reloads,
	}
	for i, f := range run.Flows {
		r.Actors = append(r.Actors, s.actorRecord(s.Actors[i], f))
	}
	return r
}

func quantilesOf(q netlab.Quantiles) Quantiles {
	return Quantiles{Mean: q.Mean, P50: q.P50, P95: q.P95, Max: q.Max}
}

func (s Stage) actorRecord(a Actor, f sim.FlowResult) ActorRecord {
	steps := int(s.Duration / Step)
	r := ActorRecord{Name: a.Name, Bytes: make([]cc.Bytes, steps)}
	managed := s.Edge != "" && !a.Direct
	if managed {
		r.Cwnd, r.Share = make([]cc.Bytes, steps), make([]cc.Bytes, steps)
	}
	var delivered cc.Bytes
	note := func(at time.Duration, now flow.Snapshot) {
		k := min(int((at-1)/Step), steps-1) // what is sampled at a step's end belongs to it
		r.Bytes[k] += now.Delivered - delivered
		delivered = now.Delivered
	}
	for _, sample := range f.Samples {
		if sample.At > 0 {
			note(sample.At, sample.Snapshot)
		}
		if k := int(sample.At / Step); managed && k < steps {
			r.Cwnd[k], r.Share[k] = sample.Cwnd, sample.Share
		}
	}
	note(f.To, f.Final)
	return r
}

// Turn is a time in which an application runs.
type Turn struct{ From, To time.Duration }

// Turns are when the actor of that number runs.
func (s Stage) Turns(number int) (all []Turn) {
	for _, t := range s.turns(number) {
		all = append(all, Turn{t.from, t.to})
	}
	return all
}
