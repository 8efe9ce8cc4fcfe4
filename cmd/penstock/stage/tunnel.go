package stage

import (
	"fmt"
	"net/netip"

	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// Tunnel is a VPN between the hosts and the edge.
type Tunnel string

// WireGuard is wireguard-go: at the host, and at an edge that only routes. A
// proxy has its own.
const WireGuard Tunnel = "wireguard"

const (
	tunnelDevice = "wg0"
	tunnelPort   = 51820
	tunnelMTU    = 1420
)

var (
	tunnelEdge = netip.MustParseAddr("10.9.0.1")
	tunnelHost = netip.MustParseAddr("10.9.0.2")
)

// vpn is the tunnel of a run.
type vpn struct {
	edge, host             tunnel.Key // private
	edgePublic, hostPublic tunnel.Key
	ends                   []*netlab.WireGuard
}

func newVPN() (v *vpn, err error) {
	v = &vpn{}
	for private, public := range map[*tunnel.Key]*tunnel.Key{&v.edge: &v.edgePublic, &v.host: &v.hostPublic} {
		if *private, err = tunnel.GenerateKey(); err == nil {
			*public, err = private.Public()
		}
		if err != nil {
			return nil, err
		}
	}
	return v, nil
}

// listener is the proxy's, in YAML.
func (v *vpn) listener() string {
	return fmt.Sprintf("{name: edge, mode: wireguard, address: \":%d\", tunnel: {mtu: %d}, wireguard: {private_key: %q, peers: [{name: host, public_key: %q, allowed_ips: [%q]}]}}",
		tunnelPort, tunnelMTU, v.edge, v.hostPublic, netip.PrefixFrom(tunnelHost, tunnelHost.BitLen()))
}

// route has the edge be the tunnel's end, and route.
func (v *vpn) route(edge *netlab.Node) error {
	return v.open(edge, netlab.WireGuardConfig{
		Addrs: []netip.Prefix{netip.PrefixFrom(tunnelEdge, 24)}, PrivateKey: v.edge, Port: tunnelPort,
		Peers: []netlab.WireGuardPeer{{PublicKey: v.hostPublic, Allowed: []netip.Prefix{netip.PrefixFrom(tunnelHost, tunnelHost.BitLen())}}},
	})
}

// join brings the host's end up; all that is for the servers goes through it.
func (v *vpn) join(lab *netlab.Cellular) error {
	return v.open(lab.Client, netlab.WireGuardConfig{
		Addrs: []netip.Prefix{netip.PrefixFrom(tunnelHost, tunnelHost.BitLen())}, PrivateKey: v.host,
		Peers: []netlab.WireGuardPeer{{
			PublicKey: v.edgePublic, Endpoint: netip.AddrPortFrom(lab.EdgeNear.V4, tunnelPort),
			Allowed: []netip.Prefix{netip.PrefixFrom(lab.ServerAddr.V4, 24)},
		}},
	})
}

func (v *vpn) open(node *netlab.Node, cfg netlab.WireGuardConfig) error {
	cfg.Device, cfg.MTU = tunnelDevice, tunnelMTU
	w, err := node.WireGuard(cfg)
	if err == nil {
		v.ends = append(v.ends, w)
	}
	return err
}

func (v *vpn) close() {
	for _, w := range v.ends {
		w.Close()
	}
}
