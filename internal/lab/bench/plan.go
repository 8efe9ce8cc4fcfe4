package bench

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/edge"
)

// Ingress is how a download reaches the proxy.
type Ingress string

// The ways in: captured on its way through the edge, client and server
// untouched, or sent by the client to a port of the edge.
const (
	IngressTPROXY  Ingress = "tproxy"
	IngressForward Ingress = "forward"
	// IngressWireGuard is that of senders over a tunnel, whatever the plan's is.
	IngressWireGuard Ingress = "wireguard"
)

// Plan is every sender on every link through every buffer, with every loss and
// every seed, Runs times.
type Plan struct {
	Senders   []Sender
	Links     []Link
	Up        *Link // towards the server; nil: as the link itself
	Buffers   []Buffer
	Delay     time.Duration   // propagation, each way
	Delays    *sim.DelayTrace // in place of Delay; nil: it does not move
	AQM       sim.AQM         // of the queue towards the client
	Losses    []float64       // probabilities that a data packet is lost at random; towards the client only
	Reorder   float64         // probability that a data packet takes ReorderBy longer
	ReorderBy time.Duration
	Duration  time.Duration // from the first data packet
	Seeds     []uint64      // of random loss, and of generated traces that name none
	Runs      int           // for each seed
	Ingress   Ingress
	Sample    time.Duration // between looks at the proxy's window; 0: never
	Packets   bool          // record the packets towards the link
	Hints     time.Duration // how often the link tells the proxy of itself; 0: never
	Late      time.Duration // p99 of the emulator's lateness above which a run is noisy
	Retry     bool          // repeat a noisy run once
	Models    []string      // of the algorithm mdi, as NAME=FILE: the proxy is a process of its own
	Agents    agents.Agents // that decide for senders ccp:NAME
}

// Trial is one run to be made.
type Trial struct {
	Sender Sender
	Link   Link
	Buffer Buffer
	Loss   float64
	Seed   uint64
	Run    int // from 1
}

// shortest is the shortest run: slow start alone needs about that.
const shortest = time.Second

// Validate tells what is wrong with the plan, naming the flag.
func (p Plan) Validate() error {
	switch {
	case len(p.Senders) == 0 || len(p.Links) == 0 || len(p.Buffers) == 0 || len(p.Losses) == 0 || len(p.Seeds) == 0:
		return errors.New("nothing to run: give at least one --sender, --link, --buffer, --loss and one of --seeds")
	case p.Duration < shortest:
		return fmt.Errorf("--duration %s: must be at least %s", p.Duration, shortest)
	case p.Delay < 0:
		return fmt.Errorf("--delay %s: must not be negative", p.Delay)
	case !(p.Reorder >= 0 && p.Reorder < 1):
		return fmt.Errorf("--reorder %v: must be a probability below 1, such as 0.01 for one packet in a hundred",
			p.Reorder)
	case p.Reorder > 0 && p.ReorderBy <= 0:
		return fmt.Errorf("--reorder-by %s: must be above 0, as packets that take no longer are not overtaken",
			p.ReorderBy)
	case p.Runs < 1:
		return fmt.Errorf("--runs %d: must be at least 1", p.Runs)
	case p.Ingress != IngressTPROXY && p.Ingress != IngressForward:
		return fmt.Errorf("--ingress %q: must be %s or %s", p.Ingress, IngressTPROXY, IngressForward)
	case p.Hints != 0 && p.Hints < edge.LeastHints:
		return fmt.Errorf("--hints %s: must be at least %s; 0: never", p.Hints, edge.LeastHints)
	case p.Packets && slices.ContainsFunc(p.Senders, Sender.Tunnelled):
		return errors.New("--packets: what leaves through a tunnel cannot be told apart; record senders that are " +
			"not over wireguard")
	case p.Sample < 0:
		return fmt.Errorf("--sample %s: must not be negative; 0 switches sampling off", p.Sample)
	}
	for _, loss := range p.Losses {
		if !(loss >= 0 && loss < 1) {
			return fmt.Errorf("--loss %v: must be a probability below 1, such as 0.01 for one packet in a hundred",
				loss)
		}
	}
	for _, s := range p.Senders {
		name, _, _ := strings.Cut(s.Algorithm, ",")
		if err := p.Agents.Check(name); err != nil {
			return fmt.Errorf("--sender %s: %w", s.Name, err)
		}
	}
	return nil
}

// Real tells whether any run of the plan needs a network.
func (p Plan) Real() bool {
	return slices.ContainsFunc(p.Senders, func(s Sender) bool { return !s.Virtual() })
}

// Trials lists the runs in the order they are made. Within a table the senders
// take turns, so that a slow drift of the machine falls on all of them alike.
func (p Plan) Trials() []Trial {
	var trials []Trial
	for _, link := range p.Links {
		for _, buffer := range p.Buffers {
			for run := range p.Runs {
				for _, seed := range p.Seeds {
					for _, loss := range p.Losses {
						for _, sender := range p.Senders {
							trials = append(trials, Trial{
								Sender: sender, Link: link, Buffer: buffer, Loss: loss,
								Seed: seed, Run: run + 1,
							})
						}
					}
				}
			}
		}
	}
	return trials
}
