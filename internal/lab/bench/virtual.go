package bench

import (
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/netlab"
)

// simulate makes a run in virtual time: the algorithm on the same link, buffers,
// delays and losses, from the first data packet at the start of the trace on,
// counted by the same code. It shows what the algorithm by itself comes to; the
// rest of what a real run shows is the proxy's and the machine's, since the
// transport below is that of the real runs beside it.
func (b *Bench) simulate(plan Plan, t Trial, p Progress) (Result, error) {
	r := b.describe(plan, t)
	r.Attempt, r.Transport = p.Attempt, plan.transport(t.Sender).String()
	scenario, err := plan.scenario(t)
	if err != nil {
		return r, err
	}
	var run *netlab.Simulation
	err = plan.Agents.Simulate(scenario, func(s sim.Scenario) (err error) {
		run, err = netlab.Simulate(s)
		return err
	})
	if err != nil {
		return r, err
	}
	report := run.Report(0, plan.Duration)
	r.count(report, plan.Duration)
	if sent := run.Flows[0].Packets; sent > 0 {
		r.Retransmitted = float64(run.Retransmits) / float64(sent) // all of one size
	}
	r.record(run.Series(netlab.Down, 0, plan.Duration, netlab.DefaultStep), report.Down.DataQueueing)
	p.Elapsed, p.Result = plan.Duration, &r
	b.report(p)
	return r, nil
}

// scenario is the trial as the simulator has it.
func (p Plan) scenario(t Trial) (sim.Scenario, error) {
	down, up, err := p.directions(t)
	if err != nil {
		return sim.Scenario{}, err
	}
	algorithm, params, err := cc.Parse(t.Sender.Algorithm)
	return sim.Scenario{
		Down: down, Up: up, Transport: p.transport(t.Sender), RawRTT: true, Hints: p.Hints, Duration: p.Duration, Seed: t.Seed,
		Flows: []sim.FlowConfig{{Algorithm: algorithm, Params: params}},
	}, err
}

// transport is the one that a sender in virtual time has: that of the algorithm's
// real runs in the plan, the kernel's where any of them, or none, has that.
func (p Plan) transport(virtual Sender) sim.Transport {
	transport, other := sim.Kernel, sim.Native
	for _, s := range p.Senders {
		switch {
		case s.Virtual() || s.Algorithm != virtual.Algorithm:
			continue
		case s.Native():
		case s.Envelope == "" || s.Envelope == envelopeEBPF:
			return sim.Kernel
		default:
			other = sim.Relay
		}
		transport = other
	}
	return transport
}

// count takes the figures out of a report on the path.
func (r *Result) count(report netlab.Report, over time.Duration) {
	down := report.Down
	r.Throughput = down.Throughput.Mbps()
	r.Offered = cc.RateOf(down.Offered, over).Mbps()
	r.Utilisation = down.Utilisation
	r.Queueing, r.OneWay = percentiles(down.DataQueueing), percentiles(down.DataOneWay)
	r.UpQueueing = percentiles(report.Up.Queueing)
	r.Packets, r.QueueDrops, r.RandomLosses = down.Sent, down.Drops.Queue, down.Drops.Loss
}
