package stage

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

// maxHosts is what a lab has addresses for.
const maxHosts = 100

// kernelDefault is what hosts have by themselves, and ownControls what they may have.
const kernelDefault = "cubic"

var ownControls = []string{kernelDefault, "bbr", "reno"}

// quicControl is quic-go's.
const quicControl = "reno"

// defaultBuffer is how far a player downloads ahead that is not told.
const defaultBuffer = 30 * time.Second

// leastMean is that of random times on and off, as in virtual time.
const leastMean = 10 * time.Millisecond

// Check tells what is wrong with the stage.
func (s Stage) Check() error {
	var errs []error
	wrong := func(key, format string, args ...any) {
		errs = append(errs, &config.Error{Key: key, Message: fmt.Sprintf(format, args...)})
	}
	path, down := "link", s.Down.Delay
	if s.Cell != nil {
		path, down = "cell", s.Cell.Delay
		for _, h := range s.Cell.Hosts {
			down = max(down, s.Cell.Delay+h.Delay)
		}
	}
	switch {
	case s.Duration <= 0:
		wrong("duration", "its duration is %s, but must be above 0", s.Duration)
	case s.Warmup < 0 || s.Warmup >= s.Duration:
		wrong("warmup", "its warm-up is %s, but must be shorter than the run of %s", s.Warmup, s.Duration)
	case down+s.Up.Delay >= s.Duration:
		wrong(path, "its round trip takes %s, but must be shorter than the run of %s", down+s.Up.Delay, s.Duration)
	case s.Hints != 0 && s.Hints < edge.LeastHints:
		wrong("hints", "its hints come every %s, but the shortest period is %s; 0: never", s.Hints, edge.LeastHints)
	case s.Cell != nil && s.Down != (sim.LinkConfig{}):
		wrong("cell", "a cell takes the place of the link down: there is one of them")
	case len(s.Actors) == 0:
		wrong("flows", "there is no actor")
	}
	if s.Tunnel != "" && s.Tunnel != WireGuard {
		wrong("tunnel", "its tunnel is %q, but must be %s; empty: none", s.Tunnel, WireGuard)
	}
	if s.Hold && (s.Edge == "" || s.Tunnel != "" || s.Native) {
		wrong("hold", "it is for a transparent proxy: give it algorithm or edge, and neither tunnel nor native")
	}
	if s.Over != "" && (!s.Native || !slices.Contains(Overs, s.Over)) {
		wrong("over", "it is %q, but must be one of %s, of a run with native: true", s.Over, strings.Join(Overs, ", "))
	}
	for _, a := range s.Actors {
		if err := a.check(s); err != nil {
			wrong("flows."+a.Name, "%v", err)
		}
	}
	for i, c := range s.Changes {
		switch {
		case c.At < 0 || c.At >= s.Duration:
			wrong("changes", "change %d is at %s, which is not in the run", i, c.At)
		case i > 0 && c.At < s.Changes[i-1].At:
			wrong("changes", "change %d is at %s, which is before the one that precedes it", i, c.At)
		case c.Edge != "" && s.Edge == "":
			wrong("changes", "change %d is for a proxy, but there is none: give algorithm or edge", i)
		case c.Delay < 0:
			wrong("changes", "change %d: Delay is %s, but must not be negative", i, c.Delay)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("stage: %s: %w", s.Name, err)
	}
	return nil
}

func (a Actor) check(s Stage) error {
	switch {
	case a.Host < 0 || a.Host >= maxHosts:
		return fmt.Errorf("its host is %d, but must be from 0 to %d", a.Host, maxHosts-1)
	case a.Port < 0 || a.Port > 65535:
		return fmt.Errorf("its port is %d, but must be from 1 to 65535; 0: 80", a.Port)
	case a.Start < 0 || a.Start >= s.Duration:
		return fmt.Errorf("its start is %s, which is not in the run", a.Start)
	case a.Stop != 0 && a.Stop <= a.Start:
		return fmt.Errorf("its stop is %s, which is not after its start; 0: never", a.Stop)
	case a.Size < 0 || a.Every < 0 || a.Rate < 0 || a.Buffer < 0 || a.On < 0 || a.Off < 0:
		return errors.New("sizes, rates and times must not be negative")
	case s.Tunnel != "" && (a.Host > 0 || a.Direct || a.isDatagrams()):
		return errors.New("inside a tunnel there are downloads of one host, and no way past it")
	case s.Hold && a.Direct && a.isDatagrams():
		return errors.New("the edge holds all UDP: take hold or direct out")
	case a.On == 0 && a.Off > 0:
		return errors.New("it has rests, off, but no on")
	case a.Random && min(a.On, a.Off) < leastMean:
		return fmt.Errorf("at random its on and off must be at least %s: write such as on 10s and off 10s", leastMean)
	}
	if a.SendBuffer != 0 && (a.SendBuffer < cc.DefaultMSS || a.Kind != Bulk || s.Native || s.proxied(a)) {
		return fmt.Errorf("its send_buffer is %d bytes, but must be 0 or at least %d, of a download that no proxy "+
			"serves", a.SendBuffer, cc.DefaultMSS)
	}
	switch a.Kind {
	case Bulk:
		return nil
	case Upload, QUIC:
		if a.Kind == Upload && s.Native && a.Control != "" {
			return errors.New("a native upload is under the stage's algorithm: take native or control out")
		}
		if name := cmp.Or(a.Control, kernelDefault); !slices.Contains(ownControls, name) {
			return fmt.Errorf("its control is %q, but must be one of %s", name, strings.Join(ownControls, ", "))
		}
		if a.Size+cc.Bytes(a.Rate)+cc.Bytes(a.On) > 0 {
			return fmt.Errorf("app: %s goes on without end: size, rate and on are not for it", a.Kind)
		}
		if a.Kind == QUIC && s.Native {
			return errors.New("native senders are UDP themselves: take native or app: quic out")
		}
	case Requests, Web:
		if a.Size == 0 {
			return errors.New("the size of what it requests is missing, such as size 100KB")
		}
	case Video:
		if a.Rate == 0 || a.Every == 0 || a.Rate.BytesIn(a.Every) == 0 {
			return errors.New("a video needs the rate of the encoding and a chunk's length, such as rate 4mbit and chunk 4s")
		}
		if a.video().Buffer < a.Every {
			return fmt.Errorf("its buffer is %s, but must hold a chunk of %s; 0: %s", a.Buffer, a.Every, defaultBuffer)
		}
	case UDP:
		if a.Rate == 0 {
			return errors.New("its rate is missing, such as rate 3mbit")
		}
	default:
		return fmt.Errorf("its app is %q, but must be one of %s, %s, %s, %s, %s, %s, %s",
			a.Kind, Bulk, Requests, Web, Video, UDP, Upload, QUIC)
	}
	return nil
}

// CheckEdge tells what is wrong with the configuration of the stage's proxy, and which change of it is wrong
// though it is not said to be, or the other way round.
func (s Stage) CheckEdge() error {
	edge, _, err := s.readEdge(s.Edge)
	if err != nil {
		return err
	}
	for _, c := range s.Changes {
		if c.Edge == "" {
			continue
		}
		_, wrong := s.rereadEdge(edge, c.Edge)
		if mistake := (*config.Error)(nil); errors.As(wrong, &mistake) {
			mistake.Line = 0 // it is of the proxy's file
		}
		switch {
		case wrong != nil && !c.Refused:
			err = fmt.Errorf("the one at %s is refused: %w; refused: true has it so on purpose", c.At, wrong)
		case wrong == nil && c.Refused:
			err = fmt.Errorf("the one at %s is not refused: take refused out", c.At)
		default:
			continue
		}
		return &config.Error{Key: "changes", Message: err.Error()}
	}
	return nil
}

// deciding are the agents that the proxy's configurations name.
func (s Stage) deciding() agents.Agents {
	named := s.Edge
	for _, c := range s.Changes {
		named += "\n" + c.Edge
	}
	return s.Agents.In(named)
}

// CheckAgents tells which agent of the stage cannot be started.
func (s Stage) CheckAgents() error {
	if err := s.deciding().Startable(); err != nil {
		return fmt.Errorf("stage: %s: %w", s.Name, err)
	}
	return nil
}

// Realisable tells what of the stage is for virtual time alone.
func (s Stage) Realisable() error {
	if s.AckEvery > 0 || s.AckDelay != 0 {
		return fmt.Errorf("stage: %s: over real sockets the hosts acknowledge as their kernel does: leave acks out, or "+
			"play it in virtual time", s.Name)
	}
	if s.Native && len(s.Changes) > 0 {
		return fmt.Errorf("stage: %s: over real sockets native senders do not change; play this in virtual time", s.Name)
	}
	for _, a := range s.Actors {
		if s.Native && a.Kind != UDP && (a.Kind != Bulk && (a.Kind != Upload || a.Host > 0) ||
			a.Size > 0 || a.Rate > 0 || a.On > 0 || a.Direct) {
			return fmt.Errorf("stage: %s: %q: over real sockets native senders only download without end, or upload "+
				"from the first host; play this in virtual time", s.Name, a.Name)
		}
		if a.ECN != sim.ECNDefault {
			return fmt.Errorf("stage: %s: %q has ecn %s, which virtual time alone can set", s.Name, a.Name, a.ECN)
		}
	}
	return s.kernelHas()
}

const availableControls = "/proc/sys/net/ipv4/tcp_available_congestion_control"

// kernelHas tells which congestion control the stage needs and this kernel lacks. Whether our
// own can be loaded only the proxy can tell.
func (s Stage) kernelHas() error {
	text, err := os.ReadFile(availableControls)
	if err != nil {
		return fmt.Errorf("read the kernel's congestion controls: %w", err)
	}
	needed := []string{s.Kernel}
	if s.Edge != "" && s.Envelope != "auto" && s.Envelope != kernel.EBPF {
		needed = append(needed, s.Envelope)
	}
	for _, a := range s.Actors {
		if a.Kind != QUIC {
			needed = append(needed, a.Control)
		}
	}
	for _, name := range needed {
		if name != "" && !slices.Contains(strings.Fields(string(text)), name) {
			return fmt.Errorf("stage: %s: this kernel has no congestion control %s, only %s: load it (modprobe tcp_%s), or "+
				"choose another", s.Name, name, strings.TrimSpace(string(text)), name)
		}
	}
	return nil
}

// UploadsAlone reports whether there is nothing else.
func (s Stage) UploadsAlone() bool {
	return !slices.ContainsFunc(s.Actors, func(a Actor) bool { return a.Kind != Upload })
}

// port is the server's.
func (a Actor) port() uint16 { return uint16(cmp.Or(a.Port, 80)) }
