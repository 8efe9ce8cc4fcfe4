package proxy

import (
	"fmt"
	"net/netip"
	"syscall"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/policy"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// forwardDatagrams has the UDP and ICMP of a tunnel forwarded, by the rules that
// its connections go by.
func (s *Server) forwardDatagrams(e *entrance, way WayConfig, mark config.Mark) {
	t := e.Tunnel()
	if t == nil {
		return
	}
	settings := way.Listener.Tunnel.Datagrams()
	settings.Most = way.Datagrams
	t.Forward(settings, tunnel.Forwarding{
		Flows: s.parts.Flows, Clock: s.clock, Mark: uint32(mark), Log: s.log,
		Verdict: func(sent tunnel.Sent) (down, up flow.Terms, err error) {
			l := e.now.Load()
			if l == nil { // peers send already, and the rules for them are not in force
				return down, up, fmt.Errorf("proxy: the tunnel is being opened: %w", syscall.EHOSTUNREACH)
			}
			f := policy.Facts{
				Listener: l.cfg.Name, Protocol: policy.UDP, Source: sent.Source, Target: sent.Target, Host: sent.Host,
				Peer: sent.Peer, Inside: true,
			}
			if sent.Target.Port() == 0 {
				f.Protocol = policy.ICMP
			}
			return s.decideDatagram(l, f)
		},
	})
}

// decideDatagram decides about what a peer of a tunnel sends.
func (s *Server) decideDatagram(l *listenerState, f policy.Facts) (down, up flow.Terms, err error) {
	in := s.currentSettings()
	if via, err := s.tunnelTo(l, f.Target.Addr(), false); via != nil && err == nil && via != l.Tunnel() {
		return down, up, &refusal{RejectedDenied, fmt.Errorf("destination %v is inside another tunnel, which "+
			"TCP alone reaches", f.Target)}
	}
	if err := s.guardTarget(l, f.Target, false); err != nil {
		return down, up, err
	}
	v := in.policy.Decide(f)
	if v.Refuse != "" {
		return down, up, refusedBy(v)
	}
	if v.Down.Algorithm != policy.Unmanaged || v.Down.MaxRate > 0 { // else nothing holds them back
		down = v.Down
	}
	// No window is theirs on the way up: nobody acknowledges what they send.
	up = flow.Terms{Group: v.Up.Group, Host: v.Up.Host, Algorithm: policy.Unmanaged, MaxRate: v.Up.MaxRate}
	return down, up, nil
}

// guardTarget refuses what no rule need name: where clients would reach the proxy
// itself, or what is for its machine alone. A fixed target is the operator's choice, not
// the client's; which mode l has says nothing, since a reload may have changed the way in
// that greeted the client already.
func (s *Server) guardTarget(l *listenerState, target netip.AddrPort, fixed bool) error {
	via, err := s.tunnelTo(l, target.Addr(), fixed)
	if err != nil {
		return err
	}
	if via != nil && l.guard.Inner == nil {
		return nil // peers reach each other
	}
	if !fixed {
		if err := l.guard.Check(target.Addr()); err != nil {
			return &refusal{RejectedDenied, err}
		}
	}
	if err := s.loops.checkTarget(target); err != nil {
		return &refusal{RejectedLoop, err}
	}
	return nil
}
