package bench

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/telemetry"
)

// startProxy starts the proxy under test. Its configuration shows nothing that a
// user's would not.
func startProxy(ctx context.Context, executable string, lab *netlab.Cellular, sender Sender, plan Plan,
	target netip.AddrPort, tunnel *edge.Tunnel,
) (*edge.Proxy, error) {
	envelope := sender.Envelope
	if envelope == "" || tunnel != nil {
		envelope = "auto"
	}
	o := edge.Options{
		Executable: executable,
		Config: fmt.Sprintf("envelope: %s\ndefaults:\n  algorithm: %q\n%s",
			envelope, sender.Algorithm, plan.Agents.YAML()),
	}
	for _, m := range plan.Models {
		o.Args = append(o.Args, "--mdi-model", m)
	}
	switch {
	case tunnel != nil:
		o.Listener = tunnel.Listener()
	case plan.Ingress == IngressTPROXY:
		o.Server, o.Ports = target.Addr(), []uint16{target.Port()}
	default:
		o.Address, o.Target = netip.AddrPortFrom(lab.EdgeNear.V4, forwardPort), target
	}
	return edge.Start(ctx, lab.Edge, o)
}

// flowOf asks the proxy about the client's connection.
func flowOf(ctx context.Context, p *edge.Proxy, client netip.AddrPort) (telemetry.Flow, error) {
	flows, err := p.Flows(ctx)
	if err != nil {
		return telemetry.Flow{}, err
	}
	for _, f := range flows {
		if edge.Client(f) == client && f.Down != nil && f.ClientLeg != nil {
			return f, nil
		}
	}
	return telemetry.Flow{}, fmt.Errorf("the proxy knows no flow of %s", client)
}

// answer asks the proxy how soon its windows came into force; nil: it does not say.
func answer(ctx context.Context, p *edge.Proxy) (a *Answer, err error) {
	err = p.Get(ctx, "/metrics", func(r io.Reader) error {
		a, err = readAnswer(r)
		return err
	})
	return a, err
}

// feeder has the link tell the proxy of itself.
type feeder struct {
	cancel context.CancelFunc
	ended  chan error
}

func feed(ctx context.Context, p *edge.Proxy, m *netlab.Monitor, host netip.Addr, period, delay time.Duration) *feeder {
	ctx, cancel := context.WithCancel(ctx)
	f := &feeder{cancel: cancel, ended: make(chan error, 1)}
	look := func() []edge.HostHint {
		h, ok := m.Hint()
		if !ok {
			return nil
		}
		return []edge.HostHint{{Host: host, Hint: h}}
	}
	go func() { f.ended <- p.Feed(ctx, look, period, delay) }()
	return f
}

// stop ends the feeding and returns what went wrong with it.
func (f *feeder) stop() error {
	f.cancel()
	return <-f.ended
}
