package proxy

import (
	"maps"
	"net/netip"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// Endpoints are where the peers of tunnels were last heard from, by listener and by
// public key as wg writes it.
type Endpoints map[string]map[string]netip.AddrPort

// Equal tells whether both have the same peers at the same addresses.
func (e Endpoints) Equal(other Endpoints) bool { return maps.EqualFunc(e, other, maps.Equal) }

// Endpoints returns where peers are, or were when Resume was called. A tunnel that cannot list its
// peers at present has those that it had before.
func (s *Server) Endpoints(before Endpoints) Endpoints {
	all := Endpoints{}
	for _, l := range s.currentSettings().listeners {
		t := l.Tunnel()
		if t == nil {
			continue
		}
		at := map[string]netip.AddrPort{}
		status, err := t.Status()
		if err != nil || t.Health() != nil {
			maps.Copy(at, before[l.cfg.Name])
		}
		for key, where := range tunnel.Endpoints(status.Peers) {
			at[key.String()] = where
		}
		if len(at) > 0 {
			all[l.cfg.Name] = at
		}
	}
	return all
}

// Resume has the peers of tunnels found where a process before this one heard from
// them last. What does not fit the configuration does not count.
func (s *Server) Resume(all Endpoints) {
	for _, l := range s.currentSettings().listeners {
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
