package sim

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"maps"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// CaseFormat shows every line that a case file may have. Their order does not
// matter, but for flows and hosts.
const CaseFormat = `link 12mbit rtt 40ms queue 100pkt loss 0.01  # delay: one way; queue: bytes or packets
trace lte seed 1                             # a built-in model or a file, in place of the rate
cell rtt 40ms blocks 100                     # in place of a link: hosts with queues and equal parts of the air
host bits 500 queue 100pkt loss 0.01 delay 5ms # its first, second...; those beyond are as the last
up 2mbit queue 64KiB loss 0.01               # acknowledgements; without it: no limit
up trace FILE
link 12mbit rtt 40ms reorder 0.01 reorder-by 5ms # one packet in a hundred takes so much longer
link 12mbit rtt 40ms mark 0.1                # one packet in ten gets an ECN mark (CE)
link 12mbit rtt 40ms aqm dualpi2             # the queue is managed: codel or dualpi2; without it: drop-tail
acks every 10ms                              # in batches
acks delayed 40ms                            # one packet's by itself, as Linux does; 0s: each at once
transport kernel                             # enforces the window, acks delayed 40ms, timestamps 1ms; else relay
hints every 10ms                             # the bottleneck tells of itself; without it: never
timestamps 1ms skew 200                      # each packet's own round trip; receivers' clock, 200 ppm fast; or off
step 10s 6mbit                               # the rate from then on
outage 10s 20s                               # from, to
delay 30s rtt 80ms                           # from then on
move 10s NAME copa                           # the flow's algorithm from then on
flow copa:delta=0.1 start 0s stop 30s name a group g weight 2 priority 1 maxrate 5mbit
flow cubic group g class guarantee target 5mbit minrate 1mbit
flow prague ecn l4s                          # its packets say ECT(1); classic: ECT(0), off: neither
flow copa host 2 rtt 60ms                    # to the second host; propagation of its own, added to the path's
flow cubic bytes 1MB rate 2mbit on 1s off 1s
flow cubic on 10s off 10s random             # means of exponential times, drawn from the seed
flow cubic bytes 100KB every 2s              # an object asked for every so often; how long each takes
flow cubic video 4mbit chunk 4s buffer 30s   # chunks asked for as the player's buffer has room
flow cubic upload receive penstock host 1    # goes up; the algorithm of the window that holds its host's uploads
flow udp rate 20mbit on 2s off 3s            # datagrams, whatever becomes of them
flow udp rate 20mbit group g share 0.5       # in the window of the group, through a gateway
run 30s warmup 5s seed 1 sample 100ms
expect utilisation >= 0.9
expect a.throughput_mbit from 20s to 30s >= 5
expect jain from 20s to 30s >= 0.99          # in the worst of these seconds
`

// Case is a scenario and what is expected of it, as one text file says it: see
// CaseFormat.
type Case struct {
	Scenario
	Expect []Expectation
}

// The bounds of a case file.
const (
	maxCaseLines = 1000
	maxFlows     = 256
)

// caseReader collects the lines of a file.
type caseReader struct {
	c        Case
	open     func(name string) (*Trace, error)
	once     map[string]bool // directives seen
	trace    traceRef
	upTrace  traceRef
	steps    []Step
	outages  [][2]time.Duration
	declared map[string]bool // names of flows
	hosts    []CellHost
}

// traceRef names a model or a file.
type traceRef struct {
	name string // empty: no trace
	seed uint64
}

// ReadCase parses a case; an error names the line. open reads a trace that is
// not a built-in model; nil allows none.
func ReadCase(name string, r io.Reader, open func(name string) (*Trace, error)) (Case, error) {
	p := &caseReader{open: open, once: map[string]bool{}, declared: map[string]bool{}}
	p.c.Sample = 100 * time.Millisecond
	lines := bufio.NewScanner(r)
	n := 0
	for lines.Scan() {
		if n++; n > maxCaseLines {
			return Case{}, fmt.Errorf("%s:%d: a scenario may have at most %d lines", name, n, maxCaseLines)
		}
		text, _, _ := strings.Cut(lines.Text(), "#")
		words := strings.Fields(text)
		if len(words) == 0 {
			continue
		}
		if err := p.line(words); err != nil {
			return Case{}, fmt.Errorf("%s:%d: %w", name, n, err)
		}
	}
	if err := lines.Err(); errors.Is(err, bufio.ErrTooLong) {
		return Case{}, fmt.Errorf("%s:%d: the line is too long", name, n+1)
	} else if err != nil {
		return Case{}, fmt.Errorf("%s: %w", name, err)
	}
	if err := p.finish(); err != nil {
		return Case{}, fmt.Errorf("%s: %w", name, err)
	}
	return p.c, nil
}

// line takes in one directive.
func (p *caseReader) line(words []string) error {
	args := &arguments{directive: words[0], words: words[1:]}
	switch words[0] {
	case "link", "cell", "trace", "acks", "transport", "hints", "timestamps", "run":
		if p.once[words[0]] {
			return fmt.Errorf("a second %q; one is all a scenario has", words[0])
		}
		p.once[words[0]] = true
	}
	switch words[0] {
	case "link":
		return p.link(args, &p.c.Down, &p.c.Up)
	case "cell":
		return p.cell(args)
	case "host":
		return p.host(args)
	case "trace":
		return p.traceLine(args, &p.trace)
	case "up":
		if len(args.words) > 0 && args.words[0] == "trace" {
			args.words = args.words[1:]
			return p.traceLine(args, &p.upTrace)
		}
		return p.link(args, &p.c.Up, nil)
	case "acks":
		return args.each(map[string]func(string) error{
			"every": set(&p.c.AckEvery, parseSpan), "delayed": set(&p.c.AckDelay, parseAckDelay),
		})
	case "transport":
		if err := args.next(set(&p.c.Transport, ParseTransport)); err != nil {
			return err
		}
		return args.end()
	case "hints":
		return args.each(map[string]func(string) error{"every": set(&p.c.Hints, parseSpan)})
	case "timestamps":
		return p.timestamps(args)
	case "step":
		var s Step
		if err := args.next(set(&s.At, parseSpan)); err != nil {
			return err
		}
		if err := args.next(set(&s.Rate, cc.ParseRate)); err != nil {
			return err
		}
		p.steps = append(p.steps, s)
		return args.end()
	case "outage":
		var from, to time.Duration
		if err := args.next(set(&from, parseSpan)); err != nil {
			return err
		}
		if err := args.next(set(&to, parseSpan)); err != nil {
			return err
		}
		if to <= from {
			return fmt.Errorf("an outage ends after it begins; write outage 10s 20s")
		}
		p.outages = append(p.outages, [2]time.Duration{from, to})
		return args.end()
	case "delay":
		var c Change
		if err := args.next(set(&c.At, parseSpan)); err != nil {
			return err
		}
		p.c.Changes = append(p.c.Changes, c)
		return args.each(delayKeys(&p.c.Changes[len(p.c.Changes)-1].Delay))
	case "move":
		c := Change{}
		for _, take := range []func(string) error{
			set(&c.At, parseSpan),
			set(&c.Flow, parseWord),
			func(s string) (err error) {
				c.Terms.Algorithm, c.Terms.Params, err = cc.Parse(s)
				return err
			},
		} {
			if err := args.next(take); err != nil {
				return err
			}
		}
		p.c.Changes = append(p.c.Changes, c)
		return args.end()
	case "flow":
		return p.flow(args)
	case "run":
		if err := args.next(set(&p.c.Duration, parseSpan)); err != nil {
			return err
		}
		return args.each(map[string]func(string) error{
			"warmup": set(&p.c.Warmup, parseSpan),
			"seed":   set(&p.c.Seed, parseSeed),
			"sample": set(&p.c.Sample, parseSpan),
		})
	case "expect":
		e, err := parseExpectation(args.words)
		p.c.Expect = append(p.c.Expect, e)
		return err
	}
	return fmt.Errorf("%q is not something a scenario says; lines begin with link, cell, host, trace, up, "+
		"transport, acks, hints, timestamps, step, outage, delay, move, flow, run or expect", words[0])
}

// link reads a link's properties; its delay is also that of other, if there is one.
func (p *caseReader) link(args *arguments, l, other *LinkConfig) error {
	if len(args.words) > 0 && args.words[0][0] >= '0' && args.words[0][0] <= '9' {
		if err := args.next(set(&l.Rate, cc.ParseRate)); err != nil {
			return err
		}
	}
	keys := map[string]func(string) error{
		"queue": queueKey(&l.QueueBytes, &l.QueuePackets),
		"loss":  set(&l.Loss, parseFraction),

		"reorder":    set(&l.Reorder, parseFraction),
		"reorder-by": set(&l.ReorderBy, parseSpan),
	}
	if other != nil {
		maps.Copy(keys, delayKeys(&l.Delay))
		keys["mark"] = set(&l.Mark, parsePart) // acknowledgements are not ECN-capable
		keys["aqm"] = set(&l.AQM, ParseAQM)
	}
	if err := args.each(keys); err != nil {
		return err
	}
	if other != nil {
		other.Delay = l.Delay
	}
	return nil
}

// timestamps reads what acknowledgements tell of the receivers' clocks.
func (p *caseReader) timestamps(args *arguments) error {
	p.c.Timestamps = kernelTick
	if len(args.words)%2 == 1 {
		if err := args.next(set(&p.c.Timestamps, parseTick)); err != nil {
			return err
		}
	}
	p.c.RawRTT = p.c.Timestamps != NoTimestamps
	return args.each(map[string]func(string) error{"skew": set(&p.c.ClockSkew, parseSkew)})
}

// cell reads a cell's properties; its delay is also that of acknowledgements.
func (p *caseReader) cell(args *arguments) error {
	p.c.Cell = &CellConfig{}
	keys := delayKeys(&p.c.Cell.Delay)
	keys["blocks"] = set(&p.c.Cell.Blocks, parseCount)
	err := args.each(keys)
	p.c.Up.Delay = p.c.Cell.Delay
	return err
}

// host reads the properties of a cell's next host.
func (p *caseReader) host(args *arguments) error {
	if len(p.hosts) == maxFlows {
		return fmt.Errorf("a cell may have at most %d hosts", maxFlows)
	}
	var h CellHost
	err := args.each(map[string]func(string) error{
		"bits":  set(&h.BitsPerBlock, parseCount),
		"queue": queueKey(&h.QueueBytes, &h.QueuePackets),
		"loss":  set(&h.Loss, parseFraction),
		"delay": set(&h.Delay, parseSpan),
	})
	p.hosts = append(p.hosts, h)
	return err
}

// queueKey reads the limit of a queue.
func queueKey(bytes *cc.Bytes, packets *int) func(string) error {
	return func(s string) (err error) {
		*bytes, *packets, err = ParseQueue(s)
		return err
	}
}

// delayKeys read a propagation delay one way or as a round trip.
func delayKeys(d *time.Duration) map[string]func(string) error {
	return map[string]func(string) error{
		"delay": set(d, parseSpan),
		"rtt": func(s string) (err error) {
			*d, err = parseSpan(s)
			*d /= 2
			return err
		},
	}
}

func (p *caseReader) traceLine(args *arguments, ref *traceRef) error {
	if err := args.next(set(&ref.name, parseWord)); err != nil {
		return err
	}
	return args.each(map[string]func(string) error{"seed": set(&ref.seed, parseSeed)})
}

func (p *caseReader) flow(args *arguments) error {
	var f FlowConfig
	if len(p.c.Flows) == maxFlows {
		return fmt.Errorf("a scenario may have at most %d flows", maxFlows)
	}
	algorithm := func(s string) (err error) {
		if s == UDP {
			f.Algorithm = s
			return nil
		}
		f.Algorithm, f.Params, err = cc.Parse(s)
		return err
	}
	if err := args.next(algorithm); err != nil {
		return err
	}
	f.Upload, f.Random = args.flag("upload"), args.flag("random")
	keys := map[string]func(string) error{
		"receive": func(s string) (err error) {
			f.Receive, f.ReceiveParams, err = cc.Parse(s)
			return err
		},
		"name":     set(&f.Name, parseWord),
		"group":    set(&f.Group, parseWord),
		"weight":   set(&f.Weight, parseCount),
		"priority": set(&f.Priority, parseCount),
		"maxrate":  set(&f.MaxRate, cc.ParseRate),
		"connrate": set(&f.ConnectionRate, cc.ParseRate),
		"share":    set(&f.Share, parseShare),
		"class":    set(&f.Class, flow.ParseClass),
		"target":   set(&f.Target, cc.ParseRate),
		"minrate":  set(&f.MinRate, cc.ParseRate),
		"start":    set(&f.Start, parseSpan),
		"stop":     set(&f.Stop, parseSpan),
		"bytes":    set(&f.Bytes, cc.ParseBytes),
		"rate":     set(&f.Rate, cc.ParseRate),
		"on":       set(&f.On, parseSpan),
		"off":      set(&f.Off, parseSpan),
		"host":     set(&f.Host, parseCount),
		"ecn":      set(&f.ECN, ParseECN),
		"every":    set(&f.Every, parseSpan),
		"video":    set(&f.Video.Rate, cc.ParseRate),
		"chunk":    set(&f.Video.Chunk, parseSpan),
		"buffer":   set(&f.Video.Buffer, parseSpan),
	}
	maps.Copy(keys, delayKeys(&f.Delay))
	if err := args.each(keys); err != nil {
		return err
	}
	if err := f.check(); err != nil {
		return err
	}
	name := f.name(len(p.c.Flows))
	if p.declared[name] {
		return fmt.Errorf("a second flow %q", name)
	}
	p.declared[name] = true
	p.c.Flows = append(p.c.Flows, f)
	return nil
}

// finish builds the traces and checks the whole.
func (p *caseReader) finish() (err error) {
	if p.c.Duration <= 0 || p.c.Duration > maxDuration {
		return fmt.Errorf("it needs a line such as \"run 30s\", of at most %v", maxDuration)
	}
	if p.c.Down.Trace, err = p.load(p.trace); err != nil {
		return err
	}
	if err := p.finishCell(); err != nil {
		return err
	}
	if p.c.Up.Trace, err = p.load(p.upTrace); err != nil {
		return err
	}
	if len(p.steps) > 0 {
		if p.c.Down.Trace != nil || p.c.Down.Rate == 0 {
			return errors.New("steps need a link with a rate")
		}
		steps := append([]Step{{Rate: p.c.Down.Rate}}, p.steps...)
		if p.c.Down.Trace, err = Steps("steps", p.c.Duration, steps...); err != nil {
			return err
		}
	}
	for _, o := range p.outages {
		if p.c.Down.Trace == nil {
			if p.c.Down.Trace, err = Steps("outage", p.c.Duration, Step{Rate: p.c.Down.Rate}); err != nil {
				return err
			}
		}
		if p.c.Down.Trace, err = p.c.Down.Trace.Without(o[0], o[1], p.c.Duration); err != nil {
			return err
		}
	}
	for i := range p.c.Changes {
		if c := &p.c.Changes[i]; c.Flow != "" && p.declared[c.Flow] { // all but the algorithm stays
			own := p.c.terms(p.c.named(c.Flow))
			own.Algorithm, own.Params = c.Terms.Algorithm, c.Terms.Params
			c.Terms = own
		}
	}
	for _, e := range p.c.Expect {
		if e.Flow != "" && !p.declared[e.Flow] {
			return fmt.Errorf("%q is expected of flow %q, which is not there", e, e.Flow)
		}
	}
	return p.c.Check()
}

// finishCell puts a cell's hosts into it.
func (p *caseReader) finishCell() error {
	switch {
	case p.c.Cell != nil:
		p.c.Cell.Hosts = p.hosts
	case len(p.hosts) > 0:
		return errors.New("hosts are those of a cell; write a line such as \"cell rtt 40ms\"")
	}
	return nil
}

func (p *caseReader) load(ref traceRef) (*Trace, error) {
	if ref.name == "" {
		return nil, nil
	}
	m, err := Model(ref.name)
	if err == nil {
		return m.Generate(ref.seed, GeneratedLength)
	}
	if p.open == nil {
		return nil, err
	}
	return p.open(ref.name)
}
