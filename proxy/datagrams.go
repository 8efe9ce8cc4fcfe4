package proxy

import (
	"net/netip"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/policy"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// forwardDatagrams has the UDP and ICMP of a tunnel forwarded, by the rules that
// its connections go by.
func (s *Server) forwardDatagrams(l *listenerState) {
	t, ok := l.in.(*tunnel.Listener)
	if !ok {
		return
	}
	if l.cfg.Tunnel.Datagrams().Isolate {
		l.inner = tunnel.Inner(t.Outside())
	}
	t.Forward(l.cfg.Tunnel.Datagrams(), tunnel.Forwarding{
		Flows: s.parts.Flows, Clock: s.clock, Most: descriptors(s.settings().cfg).Sessions, Mark: uint32(s.settings().cfg.Mark), Log: s.log,
		Verdict: func(peer string, source, target netip.AddrPort) (flow.Terms, error) {
			return s.datagram(l, policy.Facts{Listener: l.cfg.Name, Source: source, Target: target, Peer: peer, Inside: true})
		},
	})
}

// datagram decides about what a peer of a tunnel sends.
func (s *Server) datagram(l *listenerState, f policy.Facts) (flow.Terms, error) {
	in := s.settings()
	if err := s.guard(l, in, f.Target); err != nil {
		return flow.Terms{}, err
	}
	v := in.policy.Decide(f)
	switch {
	case v.Refuse != "":
		return flow.Terms{}, refusedBy(v)
	case v.Down.Algorithm == policy.Unmanaged && v.Down.MaxRate == 0:
		return flow.Terms{}, nil // nothing holds them back
	}
	return v.Down, nil
}

// configureDatagrams puts what cfg says of datagrams into force.
func (s *Server) configureDatagrams(cfg config.Config) {
	for i, l := range s.lanes {
		if t, ok := l.in.(*tunnel.Listener); ok {
			t.Configure(cfg.Listeners[i].Tunnel.Datagrams())
		}
	}
}

// guard refuses what no rule need name: where clients would reach the proxy
// itself, or what is for its machine alone. The target of mode forward is the
// operator's choice, not the client's.
func (s *Server) guard(l *listenerState, in *settings, target netip.AddrPort) error {
	via, err := s.inside(l, target.Addr())
	if err != nil {
		return err
	}
	if via != nil && l.inner == nil {
		return nil // peers reach each other
	}
	if l.cfg.Guarded() {
		g := in.guards[l.cfg.Name]
		g.Inner = l.inner
		if err := g.Check(target.Addr()); err != nil {
			return &refusal{RejectedDenied, err}
		}
	}
	if err := s.loops.check(target); err != nil {
		return &refusal{RejectedLoop, err}
	}
	return nil
}
