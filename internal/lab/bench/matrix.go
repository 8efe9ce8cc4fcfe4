// Package bench makes experiments of flags: senders, which are the kernel's congestion controls or Penstock's
// algorithms, over links. It shows progress, too.
package bench

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/policy"
)

// Matrix is what flags say of an experiment: every sender on every link through every buffer,
// with every loss.
type Matrix struct {
	Name       string // of the experiment: "bench"
	Senders    []Sender
	Links      []string // as recipe.Carries reads them
	Up         string   // towards the servers, as recipe.Carries reads it; record.Same, or record.Free
	Buffers    []string // of both directions, but for what is free; 2MB, 250pkt or record.None
	Delay      time.Duration
	DelayTrace string // a file of delays in place of Delay; empty: none
	AQM        string
	Losses     []float64 // probabilities that a data packet is lost at random
	UpLoss     float64
	Reorder    float64 // probability that a data packet takes ReorderBy longer
	ReorderBy  time.Duration
	Hints      time.Duration // how often the link tells the edge of itself; 0: never
	Duration   time.Duration
	Warmup     time.Duration
	Flows      int           // that download side by side, each with its own window; 0 as 1
	ECN        string        // what their packets say; empty: the default
	AckEvery   time.Duration // 0: as the transport has it
	Agents     agents.Agents // that decide for senders ccp:NAME
}

// check tells what is wrong that no key of an experiment tells, naming the flag.
func (m Matrix) check() error {
	switch {
	case len(m.Senders) == 0 || len(m.Links) == 0 || len(m.Buffers) == 0 || len(m.Losses) == 0:
		return errors.New("nothing to run: give at least one --sender, --link, --buffer and --loss")
	case slices.Contains(m.Links, ""):
		return errors.New("--link is empty: write such as 12mbit or generate:lte")
	case m.Delay < 0 || m.Warmup < 0 || m.AckEvery < 0 || m.Hints < 0:
		return errors.New("--delay, --warmup, --hints and --ack-every must not be negative; write a time such as 20ms")
	case !part(m.Reorder):
		return fmt.Errorf("--reorder %v: must be a probability below 1, such as 0.01 for one packet in a hundred", m.Reorder)
	case m.Reorder > 0 && m.ReorderBy <= 0:
		return fmt.Errorf("--reorder-by %s: must be above 0, as packets that take no longer are not overtaken", m.ReorderBy)
	case m.Hints != 0 && !slices.ContainsFunc(m.Senders, func(s Sender) bool { return s.Kernel == "" }):
		return errors.New("--hints: there is no proxy to tell: name a sender other than the kernel's own")
	case !part(m.UpLoss) || slices.ContainsFunc(m.Losses, func(l float64) bool { return !part(l) }):
		return errors.New("--loss and --up-loss must be probabilities below 1, such as 0.01 for one packet in a hundred")
	}
	for _, s := range m.Senders {
		name, _, _ := strings.Cut(s.Algorithm, ",")
		if err := m.Agents.Check(name); err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
	}
	return nil
}

func part(p float64) bool { return p >= 0 && p < 1 }

// Experiment returns a run of each sender on each link through each buffer with each loss. Senders take turns, so that
// what is compared is played close together.
func (m Matrix) Experiment() (recipe.Recipe, error) {
	if err := m.check(); err != nil {
		return recipe.Recipe{}, err
	}
	var runs []recipe.Experiment
	for _, link := range m.Links {
		for _, buffer := range m.Buffers {
			for _, loss := range m.Losses {
				for _, s := range m.Senders {
					run, err := m.run(link, buffer, loss, s)
					if err != nil {
						return recipe.Recipe{}, err
					}
					runs = append(runs, run)
				}
			}
		}
	}
	r, err := recipe.Of(m.Name, runs, m.Agents)
	if mistake := (*config.Error)(nil); errors.As(err, &mistake) {
		err = fmt.Errorf("--%s: %s", flags[mistake.Key], mistake.Message)
	}
	return r, err
}

// flags are those that a key of an experiment is read from.
var flags = map[string]string{
	"duration": "duration", "warmup": "warmup", "hints": "hints", "link": "delay", "up": "delay",
	"link.carries": "link", "up.carries": "up", "link.delay_trace": "delay-trace", "up.delay_trace": "delay-trace",
	"flows.download": "flows",
}

// run is that of one sender over one link.
func (m Matrix) run(link, buffer string, loss float64, s Sender) (e recipe.Experiment, err error) {
	down := recipe.Link{Carries: link, DelayTrace: m.DelayTrace}
	if m.DelayTrace == "" {
		down.Delay = &m.Delay
	}
	if queue := &down.Queue.Value; buffer != record.None {
		if queue.Bytes, queue.Packets, err = sim.ParseQueue(buffer); err != nil {
			return e, fmt.Errorf("--buffer: %w or none", err)
		}
	}
	up := down
	if down.AQM.Value, err = sim.ParseAQM(m.AQM); err != nil {
		return e, fmt.Errorf("--aqm: %w", err)
	}
	down.Loss.Value, down.Reorder.Value = loss, m.Reorder
	if m.Reorder > 0 {
		down.ReorderBy = m.ReorderBy
	}
	up.Loss.Value = m.UpLoss
	switch m.Up {
	case record.Free:
		up.Carries, up.Queue = "", recipe.Word[recipe.Queue]{}
	case record.Same:
	default:
		up.Carries = m.Up
	}
	flow := recipe.Flow{Actor: stage.Actor{Name: "download", Kind: stage.Bulk, Host: 1}}
	if m.Flows > 1 {
		flow.Count = m.Flows
	}
	if flow.ECN.Value, err = sim.ParseECN(cmp.Or(m.ECN, sim.ECNDefault.String())); err != nil {
		return e, fmt.Errorf("--ecn: %w", err)
	}
	e = recipe.Experiment{
		Name: s.Name, Link: down, Up: up, Flows: recipe.Flows{List: []recipe.Flow{flow}}, Hints: m.Hints,
		Acks: recipe.Acks{Every: m.AckEvery}, Duration: m.Duration, Warmup: m.Warmup, Seed: 1, Kernel: s.Kernel,
		Algorithm: policy.Algorithm(s.Algorithm), Virtual: s.Virtual(),
	}
	if s.Kernel != "" {
		return e, nil
	}
	e.Group = "flow"
	switch {
	case s.Native() || s.Transport == sim.Native.String():
		e.Native = true
	case s.Tunnelled():
		e.Tunnel = envelopeWireGuard
	case s.Virtual() && s.transport(m.Senders) == sim.Relay.String():
		e.Envelope = "bbr"
	case !s.Virtual():
		e.Envelope = config.Envelope(s.Envelope)
	}
	return e, nil
}

// transport is the one that a sender in virtual time has: its own, or that of the algorithm's
// real runs beside it, the kernel's where any of them, or none, has that.
func (s Sender) transport(beside []Sender) string {
	if s.Transport != "" {
		return s.Transport
	}
	transport := sim.Kernel
	for _, o := range beside {
		switch {
		case o.Virtual() || o.Algorithm != s.Algorithm || o.Native():
			continue
		case o.Envelope == "" || o.Envelope == envelopeEBPF:
			return sim.Kernel.String()
		}
		transport = sim.Relay
	}
	return transport.String()
}
