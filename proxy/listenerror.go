package proxy

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/penstock-net/penstock/proxy/config"
)

// ListenError says that an address cannot be listened at, and what to do about it: another socket has it, or the
// machine has not.
type ListenError struct {
	Key     string // of the configuration: listeners[0].address
	Network string // tcp or udp
	Address string
	Owner   string // in words, who has the address that is in use; empty: not known
	Cure    string
	Err     error
}

// InUse reports whether another socket has the address.
func (e *ListenError) InUse() bool { return errors.Is(e.Err, syscall.EADDRINUSE) }

func (e *ListenError) Error() string {
	host, port, _ := net.SplitHostPort(e.Address) // it has been checked
	what := fmt.Sprintf("port %s (%s %s) is in use", port, e.Network, e.Address)
	switch {
	case !e.InUse():
		what = host + " is not an address of this machine"
	case e.Owner != "":
		what += " by " + e.Owner
	}
	return e.Key + ": " + what + "; " + e.Cure
}

func (e *ListenError) Unwrap() error { return e.Err }

// cannotOpen says what keeps listener i from being opened. present are the listeners in force.
func cannotOpen(i int, cfg config.Listener, present []*listenerState, err error) error {
	e := &ListenError{Key: fmt.Sprintf("listeners[%d].address", i), Network: cfg.Network(), Address: cfg.Address, Err: err}
	switch {
	case cfg.Address != "" && e.InUse():
		e.Cure = "choose another port, or end what has it"
		if heldByTunnel(cfg, present) {
			e.Cure = "a tunnel has it until its connections have ended; restart the proxy, or choose another port"
		}
	case cfg.Address != "" && errors.Is(err, syscall.EADDRNOTAVAIL):
		e.Cure = "write one that it has, or " + everyAddress(cfg.Address) + " for all of them"
	default:
		return fmt.Errorf("listeners[%d]: %w", i, err)
	}
	return e
}

// heldByTunnel reports whether a tunnel in force has the port of a listener.
func heldByTunnel(cfg config.Listener, present []*listenerState) bool {
	_, port, _ := net.SplitHostPort(cfg.Address)
	for _, l := range present {
		if _, theirs, _ := net.SplitHostPort(l.cfg.Address); l.cfg.Mode.Tunnels() && theirs == port &&
			l.cfg.Network() == cfg.Network() {
			return true
		}
	}
	return false
}

// everyAddress is an address with the same port that stands for all of the machine's.
func everyAddress(address string) string {
	host, port, _ := net.SplitHostPort(address)
	if addr, err := netip.ParseAddr(host); err == nil && addr.Is4() {
		return net.JoinHostPort("0.0.0.0", port)
	}
	return net.JoinHostPort("::", port)
}
