package ingress

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"time"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// greeter runs the handshakes of a listener's clients by one configuration. It is immutable:
// Socket.Apply puts another one in its place.
type greeter struct {
	cfg     Config
	users   users
	guesses *Guesses       // shared by all greeters of the listener
	target  netip.AddrPort // of mode forward; invalid where host is set
	host    string         // of mode forward: "name:port"; empty where target is set
	self    netip.AddrPort // where we listen; unspecified: every local address
}

// newGreeter returns a greeter for cfg, which validateConfig has accepted. self is the address of
// the listener.
func newGreeter(cfg Config, self netip.AddrPort, guesses *Guesses) (*greeter, error) {
	if cfg.HandshakeTimeout == 0 {
		cfg.HandshakeTimeout = defaultHandshakeTimeout
	}
	g := &greeter{cfg: cfg, users: newUsers(cfg.Auth), self: self, guesses: guesses}
	if cfg.Mode != access.Forward {
		return g, nil
	}
	host, port, err := net.SplitHostPort(cfg.Target)
	if err == nil {
		g.target, g.host, err = destinationOf(host, port)
	}
	if err != nil {
		return nil, fmt.Errorf("target %q: %w", cfg.Target, err)
	}
	return g, nil
}

// trustsPeer reports whether a peer must begin with a PROXY header, which the greeter then trusts.
func (g *greeter) trustsPeer(peer netip.Addr) bool {
	return slices.ContainsFunc(g.cfg.TrustedProxies, func(p netip.Prefix) bool { return p.Contains(peer) })
}

// setTarget sets the destination of a client that is not asked. It refuses a captured destination that would come back
// to this listener.
func (g *greeter) setTarget(c *Client) error {
	mode, conn := g.cfg.Mode, c.Conn
	// The client speaks no protocol with us. The kernel has completed its handshake, and RST is the only refusal left.
	c.Answer = func(_ netip.AddrPort, err error) error {
		if err == nil {
			return nil
		}
		return conn.Reset()
	}
	switch mode {
	case access.Forward:
		c.Target, c.Host, c.Fixed = g.target, g.host, true
		return nil
	case access.Redirect:
		c.Target, _ = originalDestination(c.Conn)
	default:
		c.Target = datapath.LocalOf(c.Conn)
	}
	if !c.Target.IsValid() {
		return fmt.Errorf("%s: no original destination: the connection came here without a capture rule", mode)
	}
	if g.reachesSelf(c.Target) {
		return fmt.Errorf("%s: destination %v is this listener: dialling it would loop", mode, c.Target)
	}
	return nil
}

// wrapError names the listener in an error.
func (g *greeter) wrapError(err error) error {
	return fmt.Errorf("ingress: listener %q: %w", g.cfg.Name, err)
}

// reachesSelf reports whether dialling target would reach this listener, which would dial it
// again, without end.
func (g *greeter) reachesSelf(target netip.AddrPort) bool {
	if target.Port() != g.self.Port() {
		return false
	}
	if !g.self.Addr().IsUnspecified() {
		return target.Addr() == g.self.Addr()
	}
	if target.Addr().IsLoopback() || target.Addr().IsUnspecified() {
		return true
	}
	local, err := new(Routes).Local(target.Addr()) // opens a socket, but destinations with our own port are rare
	return err != nil || local                     // after an error refuse: that is cheaper than a loop
}

// checkHTTPUser returns why the client of a request may not use the listener, and how long to delay its answer. A
// request without a password is no wrong guess: the client was not asked for one yet.
func (g *greeter) checkHTTPUser(from netip.Addr, req *http.Request) (pause time.Duration, err error) {
	if len(g.users) == 0 {
		return 0, nil
	}
	// BasicAuth reads the one header; a proxy's credentials are in the other.
	asked := http.Request{Header: http.Header{"Authorization": req.Header["Proxy-Authorization"]}}
	name, password, ok := asked.BasicAuth()
	if !ok {
		return 0, errors.New("no name and password")
	}
	return g.checkPassword(from, name, password)
}

// checkPassword returns why the client at from may not use the listener, and how long to delay its answer.
func (g *greeter) checkPassword(from netip.Addr, name, password string) (pause time.Duration, err error) {
	if !g.guesses.MayTry(from) {
		return 0, errGuessing
	}
	if !g.users.allowUser([]byte(name), []byte(password)) {
		// The client gets the answer before the handshake timeout.
		return g.guesses.addWrong(datapath.Host(from), g.cfg.HandshakeTimeout*9/10), errWrongPassword
	}
	return 0, nil
}
