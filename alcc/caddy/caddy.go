// Package caddy is a listener wrapper of the Caddy web server that puts connections under a congestion controller of
// package alcc.
//
//	{
//		servers {
//			listener_wrappers {
//				penstock {
//					algorithm penstock
//					max_rate 100mbit
//				}
//				tls
//			}
//		}
//	}
//
// It stands before tls, since it needs the TCP connections.
package caddy

import (
	"fmt"
	"net"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/penstock-net/penstock/alcc"
	"github.com/penstock-net/penstock/cc"
)

func init() { caddy.RegisterModule(Wrapper{}) }

// Wrapper is the module caddy.listeners.penstock.
type Wrapper struct {
	// Algorithm as alcc.Options.Algorithm has it: "copa", "copa:delta=0.1". Empty: "penstock".
	Algorithm string `json:"algorithm,omitempty"`
	// MaxRate is what all connections of one client may send together, such as "20mbit". Empty: no maximum.
	MaxRate string `json:"max_rate,omitempty"`

	options alcc.Options
}

var (
	_ caddy.Provisioner     = (*Wrapper)(nil)
	_ caddy.ListenerWrapper = (*Wrapper)(nil)
	_ caddyfile.Unmarshaler = (*Wrapper)(nil)
)

// CaddyModule implements caddy.Module.
func (Wrapper) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "caddy.listeners.penstock", New: func() caddy.Module { return new(Wrapper) }}
}

// Provision implements caddy.Provisioner. It refuses algorithms and rates that there are not.
func (w *Wrapper) Provision(caddy.Context) error {
	w.options = alcc.Options{Algorithm: w.Algorithm}
	if w.MaxRate != "" {
		var err error
		if w.options.MaxRate, err = cc.ParseRate(w.MaxRate); err != nil {
			return fmt.Errorf("max_rate: %w", err)
		}
	}
	return w.options.Validate()
}

// WrapListener implements caddy.ListenerWrapper.
func (w *Wrapper) WrapListener(ln net.Listener) net.Listener { return &listener{ln, w.options} }

// UnmarshalCaddyfile implements caddyfile.Unmarshaler.
func (w *Wrapper) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the name
	for d.NextBlock(0) {
		keys := map[string]*string{"algorithm": &w.Algorithm, "max_rate": &w.MaxRate}
		value := keys[d.Val()]
		if value == nil {
			return d.Errf("penstock has no option %q; it takes algorithm and max_rate", d.Val())
		}
		if !d.AllArgs(value) {
			return d.ArgErr()
		}
	}
	return nil
}

// listener puts TCP connections under a controller, and lets others pass, such as those of a Unix socket.
type listener struct {
	net.Listener
	options alcc.Options
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if managed, err := alcc.Wrap(conn, l.options); err == nil {
		return managed, nil
	}
	return conn, nil
}
