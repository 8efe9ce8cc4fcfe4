package sim

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// Scenario is one run: flows that share a path.
type Scenario struct {
	Down LinkConfig  // carries data; its queue is the bottleneck
	Cell *CellConfig // in place of Down; nil: none
	Up   LinkConfig  // carries acknowledgements
	// Transport is below the flows.
	Transport Transport
	// AckEvery lets the receiver acknowledge only at multiples of it, as a link
	// layer that aggregates does; 0: each packet by itself.
	AckEvery time.Duration
	// AckDelay lets the receiver acknowledge every second packet at once and one by
	// itself only after this time (RFC 9293 §3.8.6.3), with Linux's exceptions: the
	// first 16, those after a pause, and the end of what was written. 0: as Transport
	// has it, unless there is AckEvery; AckAtOnce: never.
	AckDelay time.Duration
	// RawRTT reports each packet's own round trip, as a transport with timestamps
	// can; otherwise the flow's send ledger measures. With Kernel it always is.
	RawRTT bool
	// Timestamps is the tick of the receivers' clocks; each acknowledgement carries
	// their time; at most 1 s. 0: as Transport has it; NoTimestamps: none.
	Timestamps time.Duration
	ClockSkew  float64 // by how many millionths those clocks run fast
	// Hints is how often the bottleneck tells the senders of itself; their copy
	// arrives after the propagation delay of Up. At least 1 ms; 0: never.
	Hints time.Duration
	// Forecasts has receivers forecast what the path will deliver, where the algorithm takes that (cc.Forecaster).
	Forecasts bool
	// Tell replaces the hints of the link, to see what a wrong hint does; nil: senders get
	// the link's own.
	Tell func(cc.Hint) cc.Hint

	Flows   []FlowConfig
	Changes []Change

	Duration time.Duration
	Warmup   time.Duration // results count from here on
	Sample   time.Duration // how often each flow's state is recorded; 0: never
	Seed     uint64        // of the links' losses, where they have no seed, and of the algorithms

	// Lookup finds the flows' algorithms; nil: cc.Lookup.
	Lookup func(name string) (cc.Spec, error)

	// Watch is called with each packet as soon as its fate is certain: for a link in the
	// order of sending; for a cell as packets leave its queue, and not for packets that
	// wait there at the run's end. nil: it is not called.
	Watch func(Packet)
}

// Packet is one packet at the moment at which it is sent into a link.
type Packet struct {
	Up               bool          // an acknowledgement
	Host             int           // that it is for or from, counted from 0
	Size             cc.Bytes      // IP length
	At               time.Duration // from the run's start, as the others
	Departs, Arrives time.Duration // 0 when it is dropped
	Dropped          Drop
}

// FlowConfig describes one flow and the application that feeds it.
type FlowConfig struct {
	Name      string // for results; empty: its number, counted from 1
	Algorithm string // or UDP
	Params    cc.Params
	// Upload has the bytes take the way of acknowledgements, from a host that runs
	// Algorithm by itself, and their acknowledgements the way down.
	Upload bool
	// Receive is the algorithm of the window that an upload's receiver advertises, in
	// one group with all of its host's; empty: the receiver advertises what there is room for.
	Receive       string
	ReceiveParams cc.Params
	// Hold makes the flow a server's own, by Algorithm, in packets that the edge holds under this one, in one group with
	// all of its host's; empty: Algorithm is the edge's.
	Hold           string
	HoldParams     cc.Params
	NoEcho         bool   // the host answers no echo request, so acknowledgements of the group's other flows serve
	Group          string // flows with equal Group, Algorithm and Params share one window; empty: alone
	Priority       int
	Weight         int
	MaxRate        cc.Rate // of the group
	ConnectionRate cc.Rate
	Class          flow.Class
	Target         cc.Rate // as in flow.Terms, as MinRate and HintCap
	MinRate        cc.Rate
	HintCap        float64
	Restarts       bool          // as in flow.Terms
	ECN            ECN           // what its packets say; of TCP
	Host           int           // it leads to, counted from 1; 0: one of its group's own
	Delay          time.Duration // propagation of its own, each way, added to the path's

	Start, Stop time.Duration // Stop 0: never
	Bytes       cc.Bytes      // what there is to send; 0: no end
	Rate        cc.Rate       // how fast the application produces it, UDP: with headers; 0: as fast as it is taken
	On, Off     time.Duration // it produces for On, then pauses for Off, and so on; On 0: always
	Random      bool          // On and Off are means of exponential times, drawn from the run's seed
	// SendBuffer is what the sender's transport holds of the stream, sent and not: it takes no more until some
	// of it is acknowledged. Of a transport that holds the window; 0: no limit.
	SendBuffer cc.Bytes

	// Every makes Bytes an object that a client asks for, time and again: so long
	// after it asked for the last, or when that has come, if it took longer. 0: once.
	Every time.Duration
	Video Video // in place of Bytes
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

// Check tells what is wrong with the scenario; Run asks it, too. Who describes flows checks them: negative sizes and
// times, for example, are not looked for.
func (s Scenario) Check() error {
	s = s.identify()
	switch {
	case s.Duration <= 0 || s.Duration > maxDuration:
		return fmt.Errorf("sim: duration is %v, but must be above 0 and at most %v", s.Duration, maxDuration)
	case s.Warmup < 0 || s.Warmup >= s.Duration:
		return fmt.Errorf("sim: warm-up is %v, but must be shorter than the run of %v", s.Warmup, s.Duration)
	case s.AckEvery < 0 || s.AckDelay < AckAtOnce || s.Sample < 0 || s.Hints != 0 && s.Hints < time.Millisecond:
		return fmt.Errorf("sim: periods must not be negative, and that of hints not below 1ms")
	case len(s.Flows) == 0:
		return fmt.Errorf("sim: there is no flow")
	case s.Up.AQM != DropTail:
		return fmt.Errorf("sim: the queue of link up is not managed: acknowledgements pass it in order")
	case s.Cell == nil && s.Down.Rate == 0 && s.Down.Trace == nil:
		return fmt.Errorf("sim: link down needs a rate or a trace: nothing else bounds what is sent")
	}
	if s.Cell != nil {
		if err := s.Cell.Check(); err != nil {
			return fmt.Errorf("sim: cell: %w", err)
		}
	}
	for name, link := range map[string]LinkConfig{"down": s.Down, "up": s.Up} {
		if err := link.Check(); err != nil {
			return fmt.Errorf("sim: link %s: %w", name, err)
		}
	}
	for _, f := range s.Flows {
		if err := f.check(); err != nil {
			return fmt.Errorf("sim: flow %s: %w", f.Name, err)
		}
	}
	for _, c := range s.Changes {
		if c.Flow == "" {
			continue
		}
		i := s.named(c.Flow)
		if i < 0 || s.Flows[i].Algorithm == UDP {
			return fmt.Errorf("sim: a move at %v of flow %q, which is not there or has no algorithm", c.At, c.Flow)
		}
		f := s.Flows[i]
		f.Algorithm, f.Params = c.Terms.Algorithm, c.Terms.Params
		if err := f.check(); err != nil {
			return fmt.Errorf("sim: the move of flow %s at %v: %w", c.Flow, c.At, err)
		}
	}
	return nil
}

// Check tells what about the link cannot be.
func (c LinkConfig) Check() error {
	switch {
	case c.Rate < 0:
		return fmt.Errorf("the rate is %v, but must not be negative", c.Rate)
	case c.Delay < 0:
		return fmt.Errorf("the delay is %v, but must not be negative", c.Delay)
	case c.QueueBytes < 0 || c.QueuePackets < 0:
		return fmt.Errorf("the queue's limit must not be negative")
	case !(c.Loss >= 0 && c.Loss < 1):
		return fmt.Errorf("the loss is %v, but must be from 0 to less than 1", c.Loss)
	case !(c.Reorder >= 0 && c.Reorder < 1):
		return fmt.Errorf("the part of packets reordered is %v, but must be from 0 to less than 1", c.Reorder)
	case c.ReorderBy < 0:
		return fmt.Errorf("packets are reordered by %v, but that must not be negative", c.ReorderBy)
	case c.Reorder > 0 && c.ReorderBy == 0:
		return fmt.Errorf("packets are reordered, but by no time")
	case int(c.AQM) >= len(aqmNames):
		return fmt.Errorf("there is no %v; use DropTail, CoDel, DualPI2, PIE or FQCoDel", c.AQM)
	case c.AQM != DropTail && c.Rate == 0 && c.Trace == nil:
		return fmt.Errorf("the queue of %v needs a rate or a trace: nothing waits without", c.AQM)
	case !(c.Mark >= 0 && c.Mark <= 1):
		return fmt.Errorf("the part of packets marked is %v, but must be from 0 to 1", c.Mark)
	}
	return nil
}

// check tells what of the flow's algorithms and times cannot be played.
func (f FlowConfig) check() error {
	switch {
	case f.Algorithm == UDP && f.Rate < minDatagramRate:
		return fmt.Errorf("udp sends at a rate of at least %v", minDatagramRate)
	case f.Algorithm == "none":
		return fmt.Errorf("none leaves the window to the transport below, and a simulated one has none; try cubic " +
			"or reno")
	case f.Stop > 0 && f.Stop <= f.Start:
		return fmt.Errorf("it must stop after it starts, at 0 or later")
	case f.Receive != "":
		if err := (flow.Terms{Algorithm: f.Receive, Params: f.ReceiveParams, Receives: true}).Check(); err != nil {
			return err
		}
	}
	if f.Algorithm == UDP {
		return nil
	}
	return f.terms().Check()
}

// identify gives each flow that has none a name, a group, and a host: one for a group, with the lowest number that is
// free, in the order of the groups' first flows.
func (s Scenario) identify() Scenario {
	s.Flows = slices.Clone(s.Flows)
	taken := map[int]bool{}
	for i := range s.Flows {
		f := &s.Flows[i]
		f.Name = cmp.Or(f.Name, fmt.Sprint(i+1))
		f.Group = cmp.Or(f.Group, fmt.Sprintf("flow %d", i+1))
		taken[f.Host] = true
	}
	hosts, next := map[string]int{}, 1
	for i := range s.Flows {
		f := &s.Flows[i]
		if f.Host == 0 && hosts[f.Group] == 0 {
			for taken[next] {
				next++
			}
			hosts[f.Group] = next
			next++
		}
		f.Host = cmp.Or(f.Host, hosts[f.Group])
	}
	return s
}

// terms are those of the flow.
func (f FlowConfig) terms() flow.Terms {
	target := f.Target
	if target == 0 {
		target = f.Rate // what it produces is what it needs
	}
	host := hostAddr(f.Host - 1)
	if f.Upload { // the hints are about the way down
		host = netip.Addr{}
	}
	return flow.Terms{
		Group: f.Group, Host: host, Algorithm: f.Algorithm, Params: f.Params,
		MaxRate: f.MaxRate, ConnectionRate: f.ConnectionRate, Priority: f.Priority, Weight: f.Weight,
		Class: f.Class, Target: target, MinRate: f.MinRate, HintCap: f.HintCap, Restarts: f.Restarts,
	}
}

// named is the index of the flow of that name, or -1.
func (s Scenario) named(name string) int {
	return slices.IndexFunc(s.Flows, func(f FlowConfig) bool { return f.Name == name })
}

// terms are those of the i-th flow.
func (w *world) terms(i int) flow.Terms {
	f := w.scenario.Flows[i]
	if f.Hold != "" { // the server knows no group
		f.Group = fmt.Sprintf("server of flow %d", i+1)
	}
	return f.terms()
}

// moved completes the terms that the i-th flow moves to.
func (w *world) moved(i int, t flow.Terms) flow.Terms {
	own := w.terms(i)
	t.Group, t.Host = cmp.Or(t.Group, own.Group), cmp.Or(t.Host, own.Host)
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
	w.plan()
	w.run()
	if w.err != nil {
		return Result{}, fmt.Errorf("sim: %w", w.err)
	}
	return w.result(), nil
}

// plan makes the flows and plans all that the scenario has happen.
func (w *world) plan() {
	s := w.scenario
	for i, f := range s.Flows {
		var e endpoint
		if f.Algorithm == UDP {
			e = newDatagrams(w, f, i)
		} else {
			e = newSender(w, f, i)
		}
		if s.Hints > 0 && !f.Upload {
			w.hints.add(f.Host-1, e)
		}
		w.endpoints = append(w.endpoints, e)
		w.at(w.origin.Add(f.Start), e.open)
		if f.Stop > 0 {
			w.at(w.origin.Add(f.Stop), e.close)
		}
	}
	for _, c := range s.Changes {
		w.at(w.origin.Add(c.At), func() {
			if c.Flow != "" {
				i := s.named(c.Flow)
				w.endpoints[i].(*sender).move(w.moved(i, c.Terms))
				return
			}
			w.up.SetDelay(c.Delay)
			w.down.SetDelay(c.Delay)
		})
	}
	if s.Hints > 0 {
		w.at(w.origin.Add(s.Hints), w.hints.report)
	}
	if s.Sample > 0 {
		w.at(w.origin, func() { w.sample(s.Sample) })
	}
}
