// Package stage plays experiments: hosts behind one last hop, what their
// applications do, what the edge makes of it, and what came of it. The same
// experiment runs over real sockets between network namespaces, with a proxy
// process at the edge, and in virtual time.
package stage

import (
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// Tunnel is a VPN between the hosts and the edge.
type Tunnel string

// WireGuard is wireguard-go: at the host, and at an edge that only routes. A
// proxy has its own.
const WireGuard Tunnel = "wireguard"

// Stage is one run.
type Stage struct {
	Name string // in tables: "one window per host"

	Down, Up sim.LinkConfig  // the last hop, edge to hosts and back
	Cell     *sim.CellConfig // in place of Down: a queue and a share of the air for each host; nil: none

	// Edge is what the proxy's configuration says, listeners and telemetry left
	// out, and agents: envelope, defaults, rules. Empty: there is no proxy, the edge routes.
	Edge   string
	Agents agents.Agents // that it may name; those without a socket are started for the run
	// Hold makes UDP towards the hosts wait at the proxy until their windows have room. Otherwise it passes by.
	Hold   bool
	Tunnel Tunnel        // around all that passes the last hop, and ends at the edge; empty: none
	Kernel string        // congestion control of the servers towards hosts that no proxy serves; empty: cubic
	Hints  time.Duration // how often the last hop tells the proxy of itself; 0: never

	Actors  []Actor
	Changes []Change // in the order of their times

	Duration time.Duration // from the first data packet
	Warmup   time.Duration // figures over the whole run count from here on
	Seed     uint64        // of links and applications

	// AckEvery and AckDelay are as in sim.Scenario, and in virtual time alone: over real
	// sockets the hosts' kernels acknowledge as they do.
	AckEvery, AckDelay time.Duration
	// Native has what the edge would decide without the edge, and nothing below it: each packet is
	// acknowledged by itself, over UDP.
	Native bool
	// Over says what carries the data of native senders: one of Overs. Empty: OverUDP.
	Over string `json:",omitempty"`
	// Virtual has this run in virtual time, wherever those beside it are played.
	Virtual bool
	// Algorithm and Envelope are what Edge has by default, as it was written, for the record.
	Algorithm, Envelope string
	Sample              time.Duration // how much of its course a golden file keeps; 0: Step
}

// Change alters the stage while it plays.
type Change struct {
	At    time.Duration
	Edge  string        // another configuration for the proxy, which rereads it; empty: none
	Delay time.Duration // the last hop's propagation delay from now on, each way; 0: unchanged
	// Refused says that Edge is wrong on purpose, and the one before must stay.
	Refused bool
}

// Kind is what an actor's application does.
type Kind string

// The kinds of applications.
const (
	Bulk Kind = "bulk" // one connection that downloads without end
	// a download of Size every Every, one after the other on one connection; how long each takes
	Requests Kind = "requests"
	Web      Kind = "web"    // as Requests, each on a connection of its own
	Video    Kind = "video"  // a player: chunks of Every seconds' worth at Rate, ahead as far as its buffer holds
	UDP      Kind = "udp"    // datagrams towards the host at Rate, whatever becomes of them
	Upload   Kind = "upload" // one connection that uploads without end
	QUIC     Kind = "quic"   // one connection that downloads without end over UDP, by the server's own control
)

// Actor is one application on a host behind the last hop. The tags are keys in the files of experiments.
type Actor struct {
	Name   string
	Kind   Kind `yaml:"app"`
	Host   int  `yaml:"host" min:"1" max:"100"`   // its host, from 0, in files from 1; hosts have an address each
	Port   int  `yaml:"port" min:"1" max:"65535"` // of the server, for rules; 0: 80
	Direct bool `yaml:"direct"`                   // past the proxy: the server's own congestion control, end to end

	Start time.Duration `yaml:"start"`
	Stop  time.Duration `yaml:"stop"` // 0: never
	Size  cc.Bytes      `yaml:"size"` // of a Requests or Web object; of a Bulk download: 0 without end
	// Every is, of Requests and Web, from one start to the next, or as soon as the last has
	// ended; of Video a chunk's length.
	Every time.Duration `yaml:"every"`
	// Rate is, of UDP, on the wire; of Video that of the encoding; of Bulk what the server
	// produces, 0: as fast as it is taken.
	Rate   cc.Rate       `yaml:"rate"`
	Buffer time.Duration `yaml:"buffer"` // Video: played ahead at most; 0: 30 s
	// SendBuffer is that of the server's socket, SO_SNDBUF, of a Bulk download that no proxy serves; 0: the
	// kernel's own.
	SendBuffer cc.Bytes `yaml:"send_buffer"`
	// Control is the sender's own congestion control, of Upload and QUIC; empty: cubic, of QUIC reno. Over real
	// sockets reno is quic-go as it is, and others are this project's over UDP (package native).
	Control string `yaml:"control"`

	// On and Off let it run and rest in turns, beginning with the first and keeping
	// its connection: means of exponential times drawn from the stage's seed where
	// Random is set, else the times themselves. On 0: it never rests.
	On     time.Duration `yaml:"on"`
	Off    time.Duration `yaml:"off"`
	Random bool          `yaml:"random"`
	ECN    sim.ECN       // what its packets say; in virtual time alone
}

// Record is what came of a run.
type Record struct {
	Actors []ActorRecord // in the order of Stage.Actors

	// Throughput to Queueing are of the uplink where there is nothing but uploads.
	Throughput  cc.Rate // IP bytes that left the last hop towards the hosts, after warm-up
	Utilisation float64 // of what it could have carried; 0: no bound
	// Path is the last hop's whole account, after warm-up, and Points its course in steps of Step, towards
	// the hosts or, where there is nothing but uploads, from them.
	Path      netlab.Report
	Points    []netlab.Point
	Resent    float64       // share of the bytes that were sent into the last hop, but for UDP, after warm-up
	Queueing  sim.Delays    // of data packets in the last hop's queue, of all hosts, after warm-up
	Lateness  time.Duration // p99 of how late the emulator handed packets over, after warm-up; 0 in virtual time
	Discarded string        // why none of it counts: the emulator lost packets; empty: it does
	Left      []cc.Bytes    // IP bytes that left the last hop towards the hosts, in each FineStep of the run

	Reloads []Reload      // what the proxy answered to changes of its configuration
	CPU     time.Duration // that the proxy used in the run, or the processes of native senders; 0 without both
	Decided Decided       // by agents
	Memory  []cc.Bytes    // resident of the proxy, at the start and at each second; nil without one

	Envelope string   // below the first managed actor, as the proxy says; empty: it does not
	Missing  []string // what the proxy asked of the kernel for it and did not get
	Window   *Window  // of the one managed download, if there is no other actor; else nil
	Attempt  int      // 2: played again, as the machine disturbed the first; 0 as 1

	Transport sim.Transport // in virtual time
	Virtual   *sim.Result   // all that virtual time tells; nil over real sockets
}

// Disturbed reports whether the record says more about the machine than about what was measured.
func (r Record) Disturbed() bool { return r.Lateness > netlab.Late }

// Decided is what became of agents' flows over real sockets.
type Decided struct {
	CPU       time.Duration // that the agents used which were started for the run
	Fallbacks int           // times that a fallback took over
	// Took is how long it was from a report until the decision that followed was in force.
	Took datapath.Histogram
}

// Reload is one change of the proxy's configuration.
type Reload struct {
	At    time.Duration
	Error string // why the old one stayed; empty: the new one is in force
}

// Step is how finely records are cut.
const Step = 100 * time.Millisecond

// FineStep is that of Record.Left.
const FineStep = 20 * time.Millisecond

// ActorRecord is what came of one application.
type ActorRecord struct {
	Name  string
	Bytes []cc.Bytes // payload that the application read in each Step from the start of the run
	// Queueing is of its host's data packets in the last hop, zero where HostHasQueueing is false; for an Upload, of
	// its packets in the uplink.
	Queueing sim.Delays
	// Cwnd is that of its group at each Step, 0 where there is none, or of the server's socket where there is
	// no proxy; nil for what is past a proxy, and for Upload and UDP.
	Cwnd     []cc.Bytes
	Share    []cc.Bytes         // its part of Cwnd
	Limited  map[string]float64 // seconds that it was held back by each cause, as the proxy says; nil: it does not
	Requests []sim.Object       // Requests and Web, in the order of their starts; they take from dialling on
	Flows    []int              // those of Record.Virtual that are its own; nil over real sockets
	Video    *sim.Playback      // Video
	Sent     cc.Bytes           // UDP: payload, as Bytes counts it
	// Jitter is, of UDP after the warm-up, how much the transit of each packet differs from that of the one before it
	// (RFC 3393 §2).
	Jitter  []time.Duration
	Corrupt string // what was wrong with the bytes that came; empty: nothing
	Error   string // what ended the application before its time; empty: nothing
}

// isDatagrams reports whether the actor's packets are UDP.
func (a Actor) isDatagrams() bool { return a.Kind == UDP || a.Kind == QUIC }

// marks reports whether either way may give packets an ECN mark that allow it.
func (s Stage) marks() bool {
	return slices.ContainsFunc([]sim.LinkConfig{s.Down, s.Up}, func(c sim.LinkConfig) bool {
		return c.AQM != sim.DropTail || c.Mark > 0
	})
}

// HostHasQueueing reports whether the queueing of an actor's packets is that of its host's: in a cell, where each host
// has a queue, and where no other actor is on the host.
func (s Stage) HostHasQueueing(i int) bool {
	return s.Cell != nil || !slices.ContainsFunc(slices.Delete(slices.Clone(s.Actors), i, i+1), func(other Actor) bool {
		return other.Host == s.Actors[i].Host
	})
}

// There is the time after the warm-up in which an actor is there.
func (s Stage) There(i int) (from, to time.Duration) {
	a := s.Actors[i]
	from, to = max(s.Warmup, a.Start), s.Duration
	if a.Stop > 0 {
		to = min(to, a.Stop)
	}
	return from.Truncate(Step), to.Truncate(Step)
}

// RateOf is the throughput of actor i after the warm-up, while it is there.
func (r Record) RateOf(s Stage, i int) cc.Rate {
	if r.Virtual != nil && s.Actors[i].Kind != Web { // which has a flow for each request
		return r.Virtual.Flows[i].Throughput
	}
	a := r.Actors[i]
	return a.Rate(a.there(s, i))
}

// Rates are the throughputs in Mbit/s of all that fairness is among: actors that are there after the warm-up, but UDP.
func (r Record) Rates(s Stage) (all []float64) {
	for i, a := range r.Actors {
		if from, to := a.there(s, i); from < to && s.Actors[i].Kind != UDP {
			all = append(all, r.RateOf(s, i).Mbps())
		}
	}
	return all
}

// there is Stage.There of the record's actor i, up to the last byte of a download of a size.
func (a ActorRecord) there(s Stage, i int) (from, to time.Duration) {
	from, to = s.There(i)
	size := s.Actors[i].Size
	if s.Actors[i].Kind != Bulk || size == 0 {
		return from, to
	}
	for k, n := range a.Bytes {
		if size -= n; size <= 0 {
			return from, min(to, time.Duration(k+1)*Step)
		}
	}
	return from, to
}

// Rate is the actor's throughput between two moments.
func (a ActorRecord) Rate(from, to time.Duration) cc.Rate {
	first, last := int(from/Step), min(int(to/Step), len(a.Bytes))
	if last <= first {
		return 0
	}
	var sum cc.Bytes
	for _, n := range a.Bytes[first:last] {
		sum += n
	}
	return cc.RateOf(sum, time.Duration(last-first)*Step)
}
