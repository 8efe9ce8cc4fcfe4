package proxy

import (
	"fmt"
	"net"
	"strconv"

	"github.com/penstock-net/penstock/proxy/tunnel"
)

// tunnelSettings are what may change of the tunnel while it runs.
func (l WayConfig) tunnelSettings() (s tunnel.Settings, err error) {
	s = tunnel.Settings{
		Datagrams: l.Listener.Tunnel.Datagrams(), Allow: l.Allow,
		Pool: l.WireGuard.Pool, Peers: l.WireGuard.Access(), Tokens: l.MASQUE.Access(),
	}
	s.Datagrams.Most = l.Datagrams
	if l.TLS.Certificate != "" {
		if s.Certificate, err = l.TLS.Pair(); err != nil {
			return s, fmt.Errorf("tls: %w", err)
		}
	}
	if s.Authorities, err = l.TLS.Authorities(); err != nil {
		return s, fmt.Errorf("tls.client_ca: %w", err)
	}
	return s, nil
}

// listenPort is that of a UDP listener.
func (l WayConfig) listenPort() (uint16, error) {
	_, port, _ := net.SplitHostPort(l.Address) // it has been checked, as the port has been
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return 0, fmt.Errorf("proxy: listener %q: %w", l.Name, err)
	}
	return uint16(n), nil
}
