package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/netlab"
)

// Bench carries out plans. Each run has a network of its own, and a proxy of
// its own where the sender is Penstock's.
type Bench struct {
	Executable string         // the program that is the proxy: penstock itself
	Version    string         // of it, for the record
	Progress   func(Progress) // told about twice a second and at each end; nil: nobody is
}

// Progress is where a plan stands.
type Progress struct {
	Trial         Trial
	Number, Total int           // the trial's place in the plan, from 1
	Attempt       int           // 2: repeated, as the first was noisy
	Elapsed, Of   time.Duration // of the run
	Throughput    cc.Rate       // over the last second
	Queueing      time.Duration // median over the last second
	Result        *Result       // set when the run is over
}

// Run makes the plan's runs one after the other and hands each result to done
// as soon as it is there. When ctx ends or something fails, what was finished
// until then is returned beside the error.
func (b *Bench) Run(ctx context.Context, plan Plan, done func(Result) error) ([]Result, error) {
	if err := checkKernelAlgorithms(plan.Senders); err != nil {
		return nil, err
	}
	defer netlab.QuietCollector()()
	var results []Result
	trials := plan.Trials()
	for i, t := range trials {
		r, err := b.judged(ctx, plan, t, Progress{
			Trial: t, Number: i + 1, Total: len(trials), Attempt: 1,
			Of: plan.Duration,
		})
		if ctx.Err() != nil {
			return results, fmt.Errorf("bench: stopped after %d of %d runs: %w", i, len(trials), context.Cause(ctx))
		}
		if err != nil {
			return results, fmt.Errorf("bench: %s on %s: %w", t.Sender.Name, t.Link.Name, err)
		}
		results = append(results, r)
		if err := done(r); err != nil {
			return results, err
		}
	}
	return results, nil
}

// judged makes a run, and once more when it was noisy and the plan says so. The
// less noisy of the two stands.
func (b *Bench) judged(ctx context.Context, plan Plan, t Trial, p Progress) (Result, error) {
	r, err := b.measure(ctx, plan, t, p)
	if err != nil || !plan.Retry || !r.Noisy && r.Discarded == "" {
		return r, err
	}
	p.Attempt = 2
	again, err := b.measure(ctx, plan, t, p)
	if err != nil {
		return r, err
	}
	if again.Discarded == "" && (r.Discarded != "" || again.Lateness.P99 <= r.Lateness.P99) {
		return again, nil
	}
	return r, nil
}

func (b *Bench) report(p Progress) {
	if b.Progress != nil {
		b.Progress(p)
	}
}

// measure makes one run.
func (b *Bench) measure(ctx context.Context, plan Plan, t Trial, p Progress) (Result, error) {
	if t.Sender.Virtual() {
		return b.simulate(plan, t, p)
	}
	runtime.GC() // now, not in the middle of the run
	r := b.describe(plan, t)
	r.Attempt = p.Attempt
	s, err := newScene(ctx, b.Executable, plan, t)
	if err != nil {
		return r, err
	}
	err = s.play(ctx, plan, func(elapsed time.Duration) {
		p.Elapsed = elapsed
		last := s.lab.Path.Report(max(0, elapsed-time.Second), elapsed).Down
		p.Throughput, p.Queueing = last.Throughput, last.DataQueueing.P50
		b.report(p)
	})
	if err == nil {
		err = s.fill(&r, plan)
	}
	if err := errors.Join(err, s.close()); err != nil {
		return r, err
	}
	p.Elapsed, p.Result = plan.Duration, &r
	b.report(p)
	return r, nil
}

// describe writes down what is about to be run.
func (b *Bench) describe(plan Plan, t Trial) Result {
	r := Result{
		Sender: t.Sender.Name, Kernel: t.Sender.Kernel, Algorithm: t.Sender.Algorithm, Envelope: t.Sender.Envelope,
		Link: t.Link.Name, Up: upSame, Buffer: t.Buffer.Name, Delay: millis(plan.Delay), Loss: t.Loss,
		Reorder: plan.Reorder, ReorderBy: millis(plan.ReorderBy), Duration: plan.Duration.Seconds(), Seed: t.Seed, Run: t.Run,
		StartedAt: time.Now().UTC().Truncate(time.Second), Version: b.Version, System: readSystem(),
	}
	if plan.AQM != sim.DropTail {
		r.AQM = plan.AQM.String()
	}
	if plan.Delays != nil {
		r.Delay, r.Delays = 0, plan.Delays.Name
	}
	if plan.Up != nil {
		r.Up = plan.Up.Name
	}
	if t.Sender.Proxied() {
		r.Ingress = plan.Ingress
		if t.Sender.Tunnelled() {
			r.Ingress = IngressWireGuard
		}
	}
	if t.Sender.Algorithm != "" {
		r.Hints = millis(plan.Hints)
	}
	return r
}

// fill takes the figures out of the path's record.
func (s *scene) fill(r *Result, plan Plan) error {
	report := s.lab.Path.Report(0, plan.Duration)
	down := report.Down
	r.count(report, plan.Duration)
	if s.last.sent > 0 {
		r.Retransmitted = float64(s.last.resent) / float64(s.last.sent)
	}
	if s.proxy != nil {
		if gb := float64(down.Bytes) / 1e9; gb > 0 {
			perGB := s.cpu.Seconds() / gb
			r.CPUPerGB = &perGB
		}
		share := s.cpu.Seconds() / plan.Duration.Seconds()
		r.CPUShare = &share
		r.Window = window(s.samples)
		if s.tunnel == nil {
			if s.managed {
				r.Discarded = mistaken(r.Envelope, s.leg.Envelope)
			}
			if s.leg.Envelope != "" {
				r.Envelope = s.leg.Envelope
			}
		}
		r.Missing = s.leg.Missing
	}
	r.Answer, r.Departures = s.answer, s.departures
	r.Lateness = percentiles(worse(down.Lateness, report.Up.Lateness))
	r.Noisy = r.Lateness.P99 > millis(plan.Late)
	missed, err := s.lab.Path.Missed()
	if err != nil {
		return err
	}
	discarded := down.Drops.Held + down.Drops.Failed + report.Up.Drops.Held + report.Up.Drops.Failed
	if missed > 0 || discarded > 0 {
		r.Discarded = fmt.Sprintf("the emulator lost %d packets and could not deliver %d", missed, discarded)
	}
	r.record(s.lab.Path.Series(netlab.Down, 0, plan.Duration, netlab.DefaultStep), down.DataQueueing)
	return nil
}

// mistaken says that a leg did not get the envelope that was asked for; empty: it
// did, or nobody asked.
func mistaken(asked, got string) string {
	if asked == "" || got == "" || asked == got {
		return ""
	}
	return fmt.Sprintf("it went over %s and not over %s", got, asked)
}

func worse(a, b netlab.Quantiles) netlab.Quantiles {
	if b.P99 > a.P99 {
		return b
	}
	return a
}
