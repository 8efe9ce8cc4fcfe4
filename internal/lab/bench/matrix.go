package bench

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
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

// check tells what is wrong, naming the flag.
func (m Matrix) check() error {
	switch {
	case len(m.Senders) == 0 || len(m.Links) == 0 || len(m.Buffers) == 0 || len(m.Losses) == 0:
		return errors.New("nothing to run: give at least one --sender, --link, --buffer and --loss")
	case m.Duration <= 0:
		return fmt.Errorf("--duration is %v; write a time such as 30s", m.Duration)
	case m.Warmup >= m.Duration:
		return fmt.Errorf("--warmup %v leaves nothing of --duration %v", m.Warmup, m.Duration)
	case m.Delay < 0 || m.Warmup < 0 || m.AckEvery < 0 || m.Hints < 0:
		return errors.New("--delay, --warmup, --hints and --ack-every must not be negative; write a time such as 20ms")
	case !part(m.Reorder):
		return fmt.Errorf("--reorder %v: must be a probability below 1, such as 0.01 for one packet in a hundred", m.Reorder)
	case m.Reorder > 0 && m.ReorderBy <= 0:
		return fmt.Errorf("--reorder-by %s: must be above 0, as packets that take no longer are not overtaken", m.ReorderBy)
	case m.Hints != 0 && m.Hints < edge.LeastHints:
		return fmt.Errorf("--hints %s: must be at least %s; 0: never", m.Hints, edge.LeastHints)
	case m.Hints != 0 && !m.managed():
		return errors.New("--hints: there is no proxy to tell: name a sender other than the kernel's own")
	case !part(m.UpLoss) || slices.ContainsFunc(m.Losses, func(l float64) bool { return !part(l) }):
		return errors.New("--loss and --up-loss must be probabilities below 1, such as 0.01 for one packet in a hundred")
	}
	names := map[string]bool{}
	for _, spec := range m.Links {
		if _, _, err := recipe.Carries(spec, 1); err != nil {
			return fmt.Errorf("--link: %w", err)
		}
		name := filepath.Base(spec) // as tables and records have it
		if names[name] {
			return fmt.Errorf("two links are called %s, so that nobody could tell them apart: leave one out, or "+
				"rename its file", name)
		}
		names[name] = true
	}
	if m.Up != record.Same && m.Up != record.Free {
		if _, _, err := recipe.Carries(m.Up, 1); err != nil {
			return fmt.Errorf("--up: %w", err)
		}
	}
	for _, b := range m.Buffers {
		if _, _, err := sim.ParseQueue(b); err != nil && b != record.None {
			return fmt.Errorf("--buffer: %w or none", err)
		}
	}
	if _, err := sim.ParseAQM(m.AQM); err != nil {
		return fmt.Errorf("--aqm: %w", err)
	}
	if _, err := sim.ParseECN(m.ECN); err != nil && m.ECN != "" {
		return fmt.Errorf("--ecn: %w", err)
	}
	for _, s := range m.Senders {
		name, _, _ := strings.Cut(s.Algorithm, ",")
		if err := m.Agents.Check(name); err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
	}
	return nil
}

// managed reports whether any sender is a proxy's.
func (m Matrix) managed() bool {
	return slices.ContainsFunc(m.Senders, func(s Sender) bool { return s.Kernel == "" })
}

func part(p float64) bool { return p >= 0 && p < 1 }

// Experiment is the matrix in the form that experiments have.
func (m Matrix) Experiment() (recipe.Recipe, error) {
	text, err := m.Text()
	if err != nil {
		return recipe.Recipe{}, err
	}
	return recipe.Parse(m.Name, []byte(text), m.Agents)
}

// Text is the file of that experiment, as a user may go on with it.
func (m Matrix) Text() (string, error) {
	if err := m.check(); err != nil {
		return "", err
	}
	var b strings.Builder
	list := func(all []string) string {
		quoted := make([]string, len(all))
		for i, s := range all {
			quoted[i] = quote(s)
		}
		return "[" + strings.Join(quoted, ", ") + "]"
	}
	links := make([]string, len(m.Links))
	for i, l := range m.Links {
		links[i] = placed(l)
	}
	fmt.Fprintf(&b, "about: senders side by side\nvary:\n  link: %s\n  queue: %s\n  loss: %s\n",
		list(links), list(m.Buffers),
		strings.ReplaceAll(fmt.Sprint(m.Losses), " ", ", "))
	delay := fmt.Sprintf("delay: %s", m.Delay)
	if m.DelayTrace != "" {
		delay = "delay_trace: " + quote(absolute(m.DelayTrace))
	}
	fmt.Fprintf(&b, "link: {carries: \"$(link)\", %s, queue: $(queue), loss: $(loss), aqm: %s", delay, m.AQM)
	if m.Reorder > 0 {
		fmt.Fprintf(&b, ", reorder: %v, reorder_by: %s", m.Reorder, m.ReorderBy)
	}
	fmt.Fprintf(&b, "}\nup: {%s, loss: %v", delay, m.UpLoss)
	switch m.Up {
	case record.Free:
	case record.Same:
		b.WriteString(", carries: \"$(link)\", queue: $(queue)")
	default:
		fmt.Fprintf(&b, ", carries: %s, queue: $(queue)", quote(placed(m.Up)))
	}
	b.WriteString("}\n")
	if m.managed() {
		b.WriteString("group: flow\n")
	}
	b.WriteString("flows: {download: {")
	var keys []string
	if m.Flows > 1 {
		keys = append(keys, fmt.Sprintf("count: %d", m.Flows))
	}
	if m.ECN != "" {
		keys = append(keys, "ecn: "+m.ECN)
	}
	b.WriteString(strings.Join(keys, ", ") + "}}\n")
	for key, d := range map[string]time.Duration{"duration": m.Duration, "warmup": m.Warmup, "hints": m.Hints} {
		if d > 0 {
			fmt.Fprintf(&b, "%s: %s\n", key, d)
		}
	}
	if m.AckEvery > 0 {
		fmt.Fprintf(&b, "acks: {every: %s}\n", m.AckEvery)
	}
	b.WriteString("runs:\n")
	for _, s := range m.Senders {
		fmt.Fprintf(&b, "  - {name: %s%s}\n", quote(s.Name), s.keys(m.Senders))
	}
	return b.String(), nil
}

// quote is a text as YAML has it.
func quote(s string) string { return fmt.Sprintf("%q", s) }

// placed is a file's name from everywhere, and anything else as it is; what is a rate is no file.
func placed(spec string) string {
	_, err := cc.ParseRate(spec)
	if err == nil || strings.HasPrefix(spec, "generate:") || strings.HasPrefix(spec, "recorded:") {
		return spec
	}
	return absolute(spec)
}

func absolute(file string) string {
	if path, err := filepath.Abs(file); err == nil {
		return path
	}
	return file
}

// keys are what differs in an experiment by sender.
func (s Sender) keys(all []Sender) (keys string) {
	add := func(key, value string) { keys += ", " + key + ": " + value }
	switch {
	case s.Kernel != "":
		add("kernel", s.Kernel)
		return keys
	case s.Native() || s.Transport == sim.Native.String():
		add("native", "true")
	case s.Tunnelled():
		add("tunnel", envelopeWireGuard)
	case s.Virtual() && s.transport(all) == sim.Relay.String():
		add("envelope", "bbr")
	case s.Envelope != "" && !s.Virtual():
		add("envelope", s.Envelope)
	}
	add("algorithm", quote(s.Algorithm))
	if s.Virtual() {
		add("virtual", "true")
	}
	return keys
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
