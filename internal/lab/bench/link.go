package bench

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// Link is what one direction of the emulated link can carry: a fixed rate, a
// recorded trace, or a generated one.
type Link struct {
	Name   string // as tables show it
	rate   cc.Rate
	trace  *sim.Trace
	preset string // of a generated trace without a seed of its own
}

const generatePrefix = "generate:"

// ParseLink reads a link as the command line has it: "12mbit", "generate:lte",
// "generate:lte:7", or the name of a trace file in Mahimahi's format.
func ParseLink(spec string) (Link, error) {
	if rest, ok := strings.CutPrefix(spec, generatePrefix); ok {
		return parseGenerated(spec, rest)
	}
	rate, rateErr := cc.ParseRate(spec)
	if rateErr == nil {
		if rate <= 0 {
			return Link{}, fmt.Errorf("%q carries nothing", spec)
		}
		return Link{Name: spec, rate: rate}, nil
	}
	f, err := os.Open(spec)
	if err != nil {
		return Link{}, fmt.Errorf("%q is neither a rate such as 12mbit, nor generate:NAME, nor a trace file: %w",
			spec, err)
	}
	name := filepath.Base(spec)
	trace, err := sim.ReadTrace(name, f)
	if err := errors.Join(err, f.Close()); err != nil {
		return Link{}, fmt.Errorf("%s: %w", spec, err)
	}
	return Link{Name: name, trace: trace}, nil
}

func parseGenerated(spec, rest string) (Link, error) {
	preset, seedText, seeded := strings.Cut(rest, ":")
	l := Link{Name: spec, preset: preset}
	var seed uint64
	if seeded {
		var err error
		if seed, err = strconv.ParseUint(seedText, 10, 64); err != nil {
			return Link{}, fmt.Errorf("%q: the seed after the second colon must be a whole number, such as "+
				"generate:%s:7", spec, preset)
		}
	}
	if _, err := sim.Model(preset); err != nil {
		return Link{}, fmt.Errorf("%q: %w", spec, err)
	}
	if seeded {
		trace, err := sim.Generate(preset, seed, sim.GeneratedLength)
		if err != nil {
			return Link{}, fmt.Errorf("%q: %w", spec, err)
		}
		l.trace, l.preset = trace, ""
	}
	return l, nil
}

// Config returns the link as the emulator wants it, delay and queue left open.
func (l Link) Config(seed uint64) (sim.LinkConfig, error) {
	cfg := sim.LinkConfig{Rate: l.rate, Trace: l.trace, Seed: seed}
	if l.preset != "" {
		trace, err := sim.Generate(l.preset, seed, sim.GeneratedLength)
		if err != nil {
			return cfg, fmt.Errorf("%s: %w", l.Name, err)
		}
		cfg.Trace = trace
	}
	return cfg, nil
}

// ReadDelayTrace reads a trace of delays from a file.
func ReadDelayTrace(name string) (*sim.DelayTrace, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	delays, err := sim.ReadDelayTrace(filepath.Base(name), f)
	return delays, errors.Join(err, f.Close())
}

// Buffer is the drop-tail limit of the link's queue; zero: none.
type Buffer struct {
	Name    string // as tables show it
	bytes   cc.Bytes
	packets int
}

// bufferNone is the name of a queue without a limit.
const bufferNone = "none"

// ParseBuffer reads a buffer as the command line has it: "2MB", "250pkt", or
// "none" for a queue without a limit.
func ParseBuffer(spec string) (Buffer, error) {
	b := Buffer{Name: spec}
	if spec == bufferNone {
		return b, nil
	}
	if num, ok := strings.CutSuffix(spec, "pkt"); ok {
		n, err := strconv.Atoi(num)
		if err != nil || n < 1 || n > math.MaxInt32 {
			return Buffer{}, fmt.Errorf("%q is not a whole number of packets, such as 250pkt", spec)
		}
		b.packets = n
		return b, nil
	}
	n, err := cc.ParseBytes(spec)
	switch {
	case err != nil:
		return Buffer{}, fmt.Errorf("%q is neither a size such as 2MB, nor a number of packets such as 250pkt, nor "+
			"none", spec)
	case n < sim.OpportunityBytes:
		return Buffer{}, fmt.Errorf("%q does not hold one packet of %d bytes", spec, int64(sim.OpportunityBytes))
	}
	b.bytes = n
	return b, nil
}

// directions returns both directions of the emulated path for one trial.
func (p Plan) directions(t Trial) (down, up sim.LinkConfig, err error) {
	if down, err = t.Link.Config(t.Seed); err != nil {
		return down, up, err
	}
	back := t.Link
	if p.Up != nil {
		back = *p.Up
	}
	if up, err = back.Config(t.Seed); err != nil {
		return down, up, err
	}
	for _, c := range []*sim.LinkConfig{&down, &up} {
		c.Delay, c.QueueBytes, c.QueuePackets = p.Delay, t.Buffer.bytes, t.Buffer.packets
		if c.Delays = p.Delays; p.Delays != nil {
			c.Delay = 0
		}
	}
	down.AQM, down.Loss, down.Reorder, down.ReorderBy = p.AQM, t.Loss, p.Reorder, p.ReorderBy
	return down, up, nil
}
