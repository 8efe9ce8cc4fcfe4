package bench

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// KernelAlgorithms are the kernel's congestion controls that may send directly
// or lie under Penstock.
var KernelAlgorithms = []string{"cubic", "bbr", "reno"}

// envelopeEBPF is Penstock's own congestion control in the kernel, which the
// proxy brings along: nothing sends with it directly, and the kernel does not
// list it before.
const envelopeEBPF = "ebpf"

// EnvelopeSim is none in the kernel: the run is in virtual time, with nothing but
// the algorithm, a simulated transport and the link.
const EnvelopeSim = "sim"

// envelopeWireGuard is none in the kernel either: the client reaches Penstock
// through a tunnel, and what sends to it is the TCP in user space that ends there.
const envelopeWireGuard = "wireguard"

// EnvelopeNative is none in the kernel: the algorithm itself sends, over UDP and from the
// server, without a proxy and without TCP below it.
const EnvelopeNative = "native"

// ProxyEnvelopes are what may lie under a proxy's algorithms.
var ProxyEnvelopes = append(slices.Clone(KernelAlgorithms), envelopeEBPF, envelopeWireGuard)

// Envelopes are what may lie under algorithms.
var Envelopes = append(slices.Clone(ProxyEnvelopes), EnvelopeNative, EnvelopeSim)

// Sender is who decides how fast the data come: the kernel at the server, or
// Penstock at the edge.
type Sender struct {
	Name      string // as tables show it: "cubic", "copa", "copa:delta=0.1@cubic"
	Kernel    string // congestion control of the server's own socket; empty: through Penstock
	Algorithm string // as cc.Parse reads it; empty: direct
	Envelope  string // one of Envelopes, under Penstock; empty: the proxy's default
	// Transport is what a sender in virtual time has below it, as sim.Transport names it; empty: as its
	// algorithm has in the real runs beside it.
	Transport string
}

// Native reports whether the algorithm itself sends, with nothing below it.
func (s Sender) Native() bool { return s.Envelope == EnvelopeNative }

// Virtual reports whether there are data at all, or only virtual ones.
func (s Sender) Virtual() bool { return s.Envelope == EnvelopeSim }

// Tunnelled reports whether the data reach the client through a tunnel.
func (s Sender) Tunnelled() bool { return s.Envelope == envelopeWireGuard }

// ParseSenders reads senders as the command line has them. A bare cubic, bbr or
// reno is the kernel's own, sending directly; everything else goes through
// Penstock, over the envelope after its "@" or over each of envelopes in turn.
func ParseSenders(specs, envelopes []string) ([]Sender, error) {
	for _, e := range envelopes {
		if err := checkEnvelope(e); err != nil {
			return nil, fmt.Errorf("--envelope: %w", err)
		}
	}
	if len(specs) == 0 {
		return nil, errors.New("--sender: name at least one, such as --sender cubic,copa")
	}
	var senders []Sender
	for _, spec := range specs {
		more, err := ParseSender(spec, envelopes)
		if err != nil {
			return nil, fmt.Errorf("--sender %q: %w", spec, err)
		}
		for _, s := range more {
			if !slices.Contains(senders, s) {
				senders = append(senders, s)
			}
		}
	}
	return senders, nil
}

// ParseSender reads one of ParseSenders' specs.
func ParseSender(spec string, envelopes []string) ([]Sender, error) {
	if slices.Contains(KernelAlgorithms, spec) {
		return []Sender{{Name: spec, Kernel: spec}}, nil
	}
	ref, envelope, chosen := strings.Cut(spec, "@")
	name, _, err := cc.Parse(ref)
	if err != nil {
		return nil, err
	}
	switch {
	case chosen:
		if err := checkEnvelope(envelope); err != nil {
			return nil, err
		}
		envelopes = []string{envelope}
	case len(envelopes) == 0:
		return []Sender{{Name: ref, Algorithm: ref}}, nil
	}
	simulated := strings.Contains(name, ":") || // decided by an agent
		slices.ContainsFunc(sim.Algorithms(), func(s cc.Spec) bool { return s.Name == name })
	for _, alone := range []string{EnvelopeSim, EnvelopeNative} {
		if slices.Contains(envelopes, alone) && !simulated {
			return nil, fmt.Errorf("%s leaves the window to the kernel, and over %s there is none", name, alone)
		}
	}
	if slices.Contains(envelopes, EnvelopeNative) && strings.Contains(name, ":") {
		return nil, fmt.Errorf("%s: agents steer proxies and virtual time, not native senders", ref)
	}
	senders := make([]Sender, 0, len(envelopes))
	for _, e := range envelopes {
		senders = append(senders, Sender{Name: ref + "@" + e, Algorithm: ref, Envelope: e})
	}
	return senders, nil
}

func checkEnvelope(name string) error {
	if !slices.Contains(Envelopes, name) {
		return fmt.Errorf("no envelope %q; use one of %s", name, strings.Join(Envelopes, ", "))
	}
	return nil
}
