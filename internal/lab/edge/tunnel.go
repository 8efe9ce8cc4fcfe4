package edge

import (
	"fmt"
	"net/netip"

	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/access"
)

const (
	tunnelDevice = "wg0"
	tunnelPort   = 51820
	tunnelMTU    = 1420

	// TunnelMSS is the payload of a packet inside: less IPv4's header and TCP's with
	// timestamps.
	TunnelMSS = tunnelMTU - 52
)

// TunnelHost is the host's address inside a Tunnel.
var TunnelHost = netip.MustParseAddr("10.9.0.2")

var tunnelEdge = netip.MustParseAddr("10.9.0.1")

// Tunnel is a WireGuard tunnel between a host and the edge: wireguard-go at the
// host, and at an edge that only routes. A proxy has its own.
type Tunnel struct {
	edge, host             access.Key // private
	edgePublic, hostPublic access.Key
	ends                   []*netlab.WireGuard
}

// NewTunnel makes the keys.
func NewTunnel() (t *Tunnel, err error) {
	t = &Tunnel{}
	for private, public := range map[*access.Key]*access.Key{&t.edge: &t.edgePublic, &t.host: &t.hostPublic} {
		if *private, err = access.GenerateKey(); err == nil {
			*public, err = private.Public()
		}
		if err != nil {
			return nil, err
		}
	}
	return t, nil
}

// Listener is a proxy's end, in YAML.
func (t *Tunnel) Listener() string {
	return fmt.Sprintf("{name: edge, mode: wireguard, address: \":%d\", tunnel: {mtu: %d}, wireguard: "+
		"{private_key: %q, peers: [{name: host, public_key: %q, allowed_ips: [%q]}]}}",
		tunnelPort, tunnelMTU, t.edge, t.hostPublic, netip.PrefixFrom(TunnelHost, TunnelHost.BitLen()))
}

// Route has the edge be the tunnel's end, and route.
func (t *Tunnel) Route(edge *netlab.Node) error {
	return t.open(edge, netlab.WireGuardConfig{
		Addrs: []netip.Prefix{netip.PrefixFrom(tunnelEdge, 24)}, PrivateKey: t.edge, Port: tunnelPort,
		Peers: []netlab.WireGuardPeer{{
			PublicKey: t.hostPublic,
			Allowed:   []netip.Prefix{netip.PrefixFrom(TunnelHost, TunnelHost.BitLen())},
		}},
	})
}

// Join brings the host's end up; all that is for the servers goes through it.
func (t *Tunnel) Join(lab *netlab.Cellular) error {
	return t.open(lab.Client, netlab.WireGuardConfig{
		Addrs: []netip.Prefix{netip.PrefixFrom(TunnelHost, TunnelHost.BitLen())}, PrivateKey: t.host,
		Peers: []netlab.WireGuardPeer{{
			PublicKey: t.edgePublic, Endpoint: netip.AddrPortFrom(lab.EdgeNear.V4, tunnelPort),
			Allowed: []netip.Prefix{netip.PrefixFrom(lab.ServerAddr.V4, 24)},
		}},
	})
}

func (t *Tunnel) open(node *netlab.Node, cfg netlab.WireGuardConfig) error {
	cfg.Device, cfg.MTU = tunnelDevice, tunnelMTU
	w, err := node.WireGuard(cfg)
	if err == nil {
		t.ends = append(t.ends, w)
	}
	return err
}

// Close ends the tunnel, before the lab.
func (t *Tunnel) Close() {
	for _, w := range t.ends {
		w.Close()
	}
}
