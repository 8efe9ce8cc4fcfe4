//go:build linux

package netlab

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/penstock-net/penstock/cc/sim"
)

// Addrs are a device's addresses.
type Addrs struct{ V4, V6 netip.Addr }

func prefixes(addrs ...Addrs) (all []netip.Prefix) {
	for _, a := range addrs {
		all = append(all, netip.PrefixFrom(a.V4, 24), netip.PrefixFrom(a.V6, 64))
	}
	return all
}

// hostAddrs are those of host number i behind the emulated link.
func hostAddrs(i int) Addrs {
	return addrs(fmt.Sprintf("10.77.1.%d", 2+i), fmt.Sprintf("fd77:1::%x", 2+i))
}

// Routed is client, edge and server in a row, joined by veth pairs; the edge
// forwards. The package comment draws it.
type Routed struct {
	*Lab
	Client, Edge, Server *Node

	ClientAddr Addrs
	Hosts      []Addrs // all of the client's: those of a device that stands for several; ClientAddr is the first
	EdgeNear   Addrs   // the edge's, towards the client
	EdgeFar    Addrs   // the edge's, towards the server
	ServerAddr Addrs
}

// Cellular is Routed with an emulated link between client and edge.
type Cellular struct {
	*Routed
	Path *Path // Down is edge to client
}

// CellularConfig describes the emulated link of a Cellular.
type CellularConfig struct {
	Down, Up sim.LinkConfig
	Cell     *sim.CellConfig // in place of Down; nil: none
	Hosts    int             // addresses of the client, of each family, up to 100; 0: 1
}

// Devices of the edge, and of the nodes they lead to.
const (
	NearDevice = "cell0"
	FarDevice  = "wan0"
)

// NewRouted builds a network without any emulated link.
func NewRouted() (*Routed, error) {
	return routed(1, func(r *Routed, client, edge End) error { return r.Veth(client, edge) })
}

// NewCellular builds a network with an emulated near link.
func NewCellular(cfg CellularConfig) (*Cellular, error) {
	c := &Cellular{}
	var err error
	c.Routed, err = routed(cfg.Hosts, func(r *Routed, client, edge End) (err error) {
		c.Path, err = r.Path(PathConfig{
			Near: client, Far: edge, Down: cfg.Down, Up: cfg.Up, Cell: cfg.Cell,
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

func routed(hosts int, near func(r *Routed, client, edge End) error) (*Routed, error) {
	if hosts < 0 || hosts > maxHosts {
		return nil, fmt.Errorf("netlab: %d hosts; there may be up to %d", hosts, maxHosts)
	}
	r := &Routed{
		Lab:        New(),
		ClientAddr: hostAddrs(0),
		EdgeNear:   addrs("10.77.1.1", "fd77:1::1"),
		EdgeFar:    addrs("10.77.2.1", "fd77:2::1"),
		ServerAddr: addrs("10.77.2.2", "fd77:2::2"),
	}
	for host := range max(1, hosts) {
		r.Hosts = append(r.Hosts, hostAddrs(host))
	}
	if err := r.build(near); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

func (r *Routed) build(near func(r *Routed, client, edge End) error) (err error) {
	for _, n := range []struct {
		name string
		node **Node
	}{{"client", &r.Client}, {"edge", &r.Edge}, {"server", &r.Server}} {
		if *n.node, err = r.Node(n.name); err != nil {
			return err
		}
	}
	err = near(r, End{r.Client, NearDevice, prefixes(r.Hosts...)}, End{r.Edge, NearDevice, prefixes(r.EdgeNear)})
	if err != nil {
		return err
	}
	return errors.Join(
		r.Veth(End{r.Edge, FarDevice, prefixes(r.EdgeFar)}, End{r.Server, FarDevice, prefixes(r.ServerAddr)}),
		r.Edge.Forward(), // last, as a router's device is born into multicast groups, which it reports
		r.Client.Route(netip.Prefix{}, r.EdgeNear.V4), r.Client.Route(netip.Prefix{}, r.EdgeNear.V6),
		r.Server.Route(netip.Prefix{}, r.EdgeFar.V4), r.Server.Route(netip.Prefix{}, r.EdgeFar.V6))
}

func addrs(v4, v6 string) Addrs {
	return Addrs{V4: netip.MustParseAddr(v4), V6: netip.MustParseAddr(v6)}
}
