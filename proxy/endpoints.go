package proxy

import (
	"net/netip"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// Endpoints are where the peers of tunnels were last heard from, by listener and by
// public key as wg writes it.
type Endpoints map[string]map[string]netip.AddrPort

// Endpoints returns those of peers with whom there has been a handshake.
func (s *Server) Endpoints() Endpoints {
	all := Endpoints{}
	for _, t := range s.Tunnels() {
		for key, at := range tunnel.Endpoints(t.Peers) {
			if all[t.Listener] == nil {
				all[t.Listener] = map[string]netip.AddrPort{}
			}
			all[t.Listener][key.String()] = at
		}
	}
	return all
}

// Resume has the peers of tunnels found where a process before this one heard from
// them last. What does not fit the configuration does not count.
func (s *Server) Resume(all Endpoints) {
	for _, l := range s.settings().listeners {
		t := l.Tunnel()
		if t == nil {
			continue
		}
		at := map[access.Key]netip.AddrPort{}
		for key, where := range all[l.cfg.Name] {
			if k, err := access.ParseKey(key); err == nil && where.IsValid() {
				at[k] = where
			}
		}
		t.Resume(at)
	}
}
