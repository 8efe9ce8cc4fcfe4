package ingress

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// User is a name and a password with which a client may use a listener.
type User struct {
	Name, Password string // 1 to 255 bytes each, RFC 1929
}

// Config describes one listener.
type Config struct {
	Name string      // for logs, metrics and errors
	Mode access.Mode // one for TCP: not that of a tunnel
	Addr string      // "host:port"; an empty host is every address, both families
	Auth []User      // who may use it, in modes that ask for a password; empty: everybody

	Socket *net.TCPListener // listens at Addr already; nil: Listen opens one

	// TrustedProxies are the peers whose connections must begin with a PROXY protocol header, v1 or
	// v2. From any other peer such a header is data like any other.
	TrustedProxies []netip.Prefix

	Target           string        // "host:port" of mode forward
	HandshakeTimeout time.Duration // from accept until the destination is known; 0: 10 s
	Log              *slog.Logger  // for connections that cannot be accepted; nil: silent
}

// Acceptor is a listening socket of a transport.
type Acceptor interface {
	// Serve calls take, which must not wait, for each connection until Close. failed is told why a
	// connection could not be accepted, and returns how long to wait before the next; below 0 Serve
	// returns that error.
	Serve(take func(datapath.Conn), failed func(error) (pause time.Duration)) error
	SetTransparent() error // accept connections to addresses that are not this host's
	Addr() net.Addr
	Close() error
}

// Open makes a transport's Acceptor of a listener that kernel.Listen returned. The Acceptor owns it
// from then on; after an error the caller does.
type Open func(*net.TCPListener) (Acceptor, error)

const defaultHandshakeTimeout = 10 * time.Second

func (c Config) validateConfig() error {
	switch {
	case !c.Mode.Known() || c.Mode.Tunnels():
		return fmt.Errorf("mode %q is none of a listener for TCP", c.Mode)
	case len(c.Auth) > 0 && !c.Mode.Asks():
		return fmt.Errorf("auth: mode %s cannot ask for a password; use socks5, connect or mixed", c.Mode)
	case c.Mode == access.Forward && c.Target == "":
		return errors.New("target: mode forward needs a host:port to forward to")
	case c.Mode != access.Forward && c.Target != "":
		return fmt.Errorf("target: only mode forward has one, not %s", c.Mode)
	case c.HandshakeTimeout < 0:
		return errors.New("handshake_timeout: must not be negative")
	}
	for i, u := range c.Auth {
		if len(u.Name) < 1 || len(u.Name) > 255 || len(u.Password) < 1 || len(u.Password) > 255 {
			return fmt.Errorf("auth[%d]: name and password must have 1 to 255 bytes each", i)
		}
	}
	for i, p := range c.TrustedProxies {
		if !p.IsValid() {
			return fmt.Errorf("trusted_proxies[%d]: not a prefix", i)
		}
	}
	return nil
}
