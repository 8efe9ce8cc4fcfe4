package sim

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// Scenario is one run: flows that share a path.
type Scenario struct {
	Down LinkConfig // carries data; its queue is the bottleneck
	Up   LinkConfig // carries acknowledgements
	// AckEvery lets the receiver acknowledge only at multiples of it, as a link
	// layer that aggregates does; 0: each packet by itself.
	AckEvery time.Duration
	// RawRTT reports each packet's own round trip, as a transport with timestamps
	// can; otherwise the flow's send ledger measures.
	RawRTT bool
	// Hints is how often the bottleneck tells the senders of itself; their copy
	// arrives after the propagation delay of Up. At least 1 ms; 0: never.
	Hints time.Duration

	Flows     []FlowConfig
	Datagrams []DatagramConfig
	Changes   []Change

	Duration time.Duration
	Warmup   time.Duration // results count from here on
	Sample   time.Duration // how often each flow's state is recorded; 0: never
	Seed     uint64        // of the links' losses, where they have no seed, and of the algorithms

	Watch func(Packet) // is told of each packet, in the order in which they are sent; nil: nobody is
}

// Packet is one packet at the moment at which it is sent into a link.
type Packet struct {
	Up               bool          // an acknowledgement
	Size             cc.Bytes      // IP length
	At               time.Duration // from the run's start, as the others
	Departs, Arrives time.Duration // 0 when it is dropped
	Dropped          Drop
}

// FlowConfig describes one flow and the application that feeds it.
type FlowConfig struct {
	Name      string // for results; empty: its number, counted from 1
	Algorithm string
	Params    cc.Params
	Group     string // flows with equal Group, Algorithm and Params share one window; empty: alone
	Priority  int
	Weight    int
	MaxRate   cc.Rate

	Start, Stop time.Duration // Stop 0: never
	Bytes       cc.Bytes      // what there is to send; 0: no end
	Rate        cc.Rate       // how fast the application produces it; 0: as fast as it is taken
	On, Off     time.Duration // it produces for On, then pauses for Off, and so on; On 0: always
}

// Change alters the path, or moves a flow, during the run.
type Change struct {
	At    time.Duration
	Delay time.Duration // the new propagation delay of each direction; of the path
	// Flow is the name of the one that gets the Terms; empty: the path changes. It
	// stays in its group and with its host where the terms name none. A flow that is
	// not open then, or no longer, keeps its own.
	Flow  string
	Terms flow.Terms
}

// maxDuration bounds a run: statistics are kept for every packet.
const maxDuration = time.Hour

// Check tells what is wrong with the scenario; Run asks it, too.
func (s Scenario) Check() error {
	switch {
	case s.Duration <= 0 || s.Duration > maxDuration:
		return fmt.Errorf("sim: duration is %v, but must be above 0 and at most %v", s.Duration, maxDuration)
	case s.Warmup < 0 || s.Warmup >= s.Duration:
		return fmt.Errorf("sim: warm-up is %v, but must be shorter than the run of %v", s.Warmup, s.Duration)
	case s.AckEvery < 0 || s.Sample < 0:
		return fmt.Errorf("sim: periods must not be negative")
	case s.Hints != 0 && s.Hints < time.Millisecond:
		return fmt.Errorf("sim: hints come every %v, but the shortest period is 1ms; 0: never", s.Hints)
	case len(s.Flows) == 0:
		return fmt.Errorf("sim: there is no flow")
	case s.Down.Rate == 0 && s.Down.Trace == nil:
		return fmt.Errorf("sim: link down needs a rate or a trace: nothing else bounds what is sent")
	}
	for _, d := range []struct {
		name string
		cfg  LinkConfig
	}{{"down", s.Down}, {"up", s.Up}} {
		if err := d.cfg.check(); err != nil {
			return fmt.Errorf("sim: link %s: %w", d.name, err)
		}
	}
	for i, f := range s.Flows {
		if err := f.check(); err != nil {
			return fmt.Errorf("sim: flow %s: %w", f.name(i), err)
		}
	}
	for _, d := range s.Datagrams {
		if err := d.check(s); err != nil {
			return fmt.Errorf("sim: datagrams %s: %w", d.Name, err)
		}
	}
	for _, c := range s.Changes {
		if c.At < 0 || c.Delay < 0 {
			return fmt.Errorf("sim: a change at %v to a delay of %v: neither may be negative", c.At, c.Delay)
		}
		if c.Flow == "" {
			continue
		}
		i := s.named(c.Flow)
		if i < 0 {
			return fmt.Errorf("sim: a move at %v of flow %q, which is not there", c.At, c.Flow)
		}
		f := s.Flows[i]
		f.Algorithm, f.Params = c.Terms.Algorithm, c.Terms.Params
		if err := f.check(); err != nil {
			return fmt.Errorf("sim: the move of flow %s at %v: %w", c.Flow, c.At, err)
		}
	}
	return nil
}

func (c LinkConfig) check() error {
	switch {
	case c.Rate < 0:
		return fmt.Errorf("the rate is %v, but must not be negative", c.Rate)
	case c.Delay < 0:
		return fmt.Errorf("the delay is %v, but must not be negative", c.Delay)
	case c.QueueBytes < 0 || c.QueuePackets < 0:
		return fmt.Errorf("the queue's limit must not be negative")
	case !(c.Loss >= 0 && c.Loss < 1):
		return fmt.Errorf("the loss is %v, but must be from 0 to less than 1", c.Loss)
	}
	return nil
}

func (f FlowConfig) check() error {
	spec, err := cc.Lookup(f.Algorithm)
	if err != nil {
		return err
	}
	if _, err := spec.Resolve(f.Params); err != nil {
		return err
	}
	switch {
	case f.Algorithm == "none":
		return fmt.Errorf("none leaves the window to the transport below, and a simulated one has none; try cubic or reno")
	case f.Start < 0 || f.Stop < 0 || f.Stop > 0 && f.Stop <= f.Start:
		return fmt.Errorf("it must stop after it starts, at 0 or later")
	case f.Bytes < 0 || f.Rate < 0 || f.MaxRate < 0 || f.Weight < 0:
		return fmt.Errorf("bytes, rates and weights must not be negative")
	case f.On < 0 || f.Off < 0 || f.On == 0 && f.Off > 0:
		return fmt.Errorf("a pause needs a time in which the application produces")
	}
	return nil
}

func (f FlowConfig) name(i int) string {
	if f.Name != "" {
		return f.Name
	}
	return fmt.Sprint(i + 1)
}

// terms are those of the i-th flow. Each group is a host of its own.
func (s Scenario) terms(i int) flow.Terms {
	f, group, host := s.Flows[i], s.Flows[i].Group, i
	if group == "" {
		group = fmt.Sprintf("flow %d", i+1)
	} else {
		host = slices.IndexFunc(s.Flows, func(g FlowConfig) bool { return g.Group == f.Group })
	}
	return flow.Terms{
		Group: group, Host: hostAddr(host), Algorithm: f.Algorithm, Params: f.Params,
		MaxRate: f.MaxRate, Priority: f.Priority, Weight: f.Weight, Target: f.Rate,
	}
}

// named is the index of the flow of that name, or -1.
func (s Scenario) named(name string) int {
	for i, f := range s.Flows {
		if f.name(i) == name {
			return i
		}
	}
	return -1
}

// moved completes the terms that the i-th flow moves to.
func (s Scenario) moved(i int, t flow.Terms) flow.Terms {
	own := s.terms(i)
	if t.Group == "" {
		t.Group = own.Group
	}
	if !t.Host.IsValid() {
		t.Host = own.Host
	}
	return t
}

// hostAddr is the address of the i-th host.
func hostAddr(i int) netip.Addr {
	i++
	return netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
}

// Run plays a scenario from its start to its end.
func Run(s Scenario) (Result, error) {
	if err := s.Check(); err != nil {
		return Result{}, err
	}
	w := newWorld(s)
	for i, f := range s.Flows {
		snd := newSender(w, f)
		w.senders = append(w.senders, snd)
		if s.Hints > 0 {
			w.hints.add(s.terms(i).Host, snd)
		}
		w.at(w.origin.Add(f.Start), func() { snd.open(s.terms(i)) })
		if f.Stop > 0 {
			w.at(w.origin.Add(f.Stop), snd.close)
		}
	}
	for _, d := range s.Datagrams {
		b := newBlaster(w, d)
		w.blasters = append(w.blasters, b)
		w.at(w.origin.Add(d.Start), b.start)
	}
	for _, c := range s.Changes {
		w.at(w.origin.Add(c.At), func() {
			if c.Flow != "" {
				i := s.named(c.Flow)
				w.senders[i].move(s.moved(i, c.Terms))
				return
			}
			w.down.SetDelay(c.Delay)
			w.up.SetDelay(c.Delay)
		})
	}
	if s.Hints > 0 {
		w.at(w.origin.Add(s.Hints), w.hints.report)
	}
	if s.Sample > 0 {
		w.at(w.origin, func() { w.sample(s.Sample) })
	}
	w.run()
	if w.err != nil {
		return Result{}, fmt.Errorf("sim: %w", w.err)
	}
	return w.result(), nil
}
