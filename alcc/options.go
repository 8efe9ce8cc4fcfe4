package alcc

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/cc/flow"
)

// Options say how connections send. The zero value: Penstock's own algorithm, one window for each host.
type Options struct {
	// Algorithm is a name of the registry of package cc, with settings where wanted: "copa", "copa:delta=0.1".
	// "ccp:NAME" is what an agent decides that listens on AgentSocket. "none" leaves connections to the kernel.
	// Empty: "penstock".
	Algorithm string
	// AgentSocket is the path of the Unix socket where an agent of Algorithm listens; empty: portus's.
	AgentSocket string
	// OwnAcks makes both ends acknowledge data by themselves, in the framing of package frame, so that nothing is needed
	// of the kernel. Both ends must set it. Connections may then be of any kind, such as TLS or a stream of QUIC.
	OwnAcks bool
	// Group returns the name of the window that a connection shares; nil: the peer's address.
	Group func(local, remote net.Addr) string
	// Class says what the connections are for. The zero value is bulk.
	Class flow.Class
	// Weight is the part of the window relative to the other connections of the group; 0 counts as 1.
	Weight int
	// Target is the rate that a connection of class flow.Guarantee needs; 0: not known.
	Target cc.Rate
	// MaxRate is what all connections of one group may send together; 0: no maximum.
	MaxRate cc.Rate
}

// Validate returns what is wrong with o; nil: nothing.
func (o Options) Validate() error {
	_, err := o.resolve()
	return err
}

// settings are Options that have been checked.
type settings struct {
	terms flow.Terms // without Group and Host
	group func(local, remote net.Addr) string
	// ownAcks is Options.OwnAcks.
	ownAcks bool
	// forecasts reports whether the algorithm uses forecasts of the receiver.
	forecasts bool
	// agentSocket is where the agent of a ccp algorithm listens.
	agentSocket string
}

// resolve returns the settings of o, or what is wrong with them.
func (o Options) resolve() (*settings, error) {
	name, params, err := cc.Parse(cmp.Or(o.Algorithm, cc.Default))
	if err != nil {
		return nil, fmt.Errorf("alcc: Options.Algorithm: %w", err)
	}
	s := &settings{group: o.Group, ownAcks: o.OwnAcks, agentSocket: cmp.Or(o.AgentSocket, ccp.DefaultSocket)}
	s.terms = flow.Terms{
		Algorithm: name, Params: params, Class: o.Class, Weight: o.Weight, Target: o.Target, MaxRate: o.MaxRate,
	}
	if err := s.terms.Check(); err != nil {
		return nil, fmt.Errorf("alcc: Options: %w", err)
	}
	s.forecasts = o.OwnAcks && cc.TakesForecasts(name, params)
	return s, nil
}

// isManaged reports whether an algorithm decides anything.
func (s *settings) isManaged() bool { return s.terms.Algorithm != "none" || s.terms.MaxRate > 0 }

// termsFor returns the terms of a connection between two addresses.
func (s *settings) termsFor(local, remote net.Addr) flow.Terms {
	t := s.terms
	t.Host = hostOf(remote)
	switch {
	case s.group != nil:
		t.Group = s.group(local, remote)
	case s.forecasts: // a forecast is for one connection only
		t.Group, t.Alone = fmt.Sprintf("%v to %v", local, remote), true
	default:
		t.Group = t.Host.String()
	}
	return t
}

// hostOf returns the address of a host; invalid: it is not known.
func hostOf(a net.Addr) netip.Addr {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return tcp.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}
