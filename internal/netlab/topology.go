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

// Fleet is client and server with several edges side by side between them, which forward. Near and Far are the routers
// that choose an edge for what comes from the client, and for what comes from the server. Neither has a route yet to
// what is behind the edges. Edge i is the neighbor EdgeNear(i) of Near and EdgeFar(i) of Far.
type Fleet struct {
	*Lab
	Client, Near, Far, Server *Node
	Edges                     []*Node

	Hosts      []Addrs // addresses of the client
	NearAddr   func(edge int) Addrs
	EdgeNear   func(edge int) Addrs
	EdgeFar    func(edge int) Addrs
	FarAddr    func(edge int) Addrs
	ServerAddr Addrs
}

// ClientNets are the networks of a Fleet's client.
var ClientNets = prefixes(addrs("10.77.1.0", "fd77:1::"))

// NewFleet builds a network of that many edges for a client of that many addresses.
func NewFleet(edges, hosts int) (*Fleet, error) {
	between := func(v4, v6 string) func(int) Addrs {
		return func(i int) Addrs { return addrs(fmt.Sprintf(v4, i), fmt.Sprintf(v6, i)) }
	}
	f := &Fleet{
		Lab: New(), ServerAddr: addrs("10.77.2.2", "fd77:2::2"),
		NearAddr: between("10.78.%d.1", "fd78:%d::1"), EdgeNear: between("10.78.%d.2", "fd78:%d::2"),
		EdgeFar: between("10.79.%d.2", "fd79:%d::2"), FarAddr: between("10.79.%d.1", "fd79:%d::1"),
	}
	if edges < 1 || edges > maxHosts || hosts < 1 || hosts > maxHosts {
		return nil, fmt.Errorf("netlab: %d edges and %d hosts; there may be 1 to %d", edges, hosts, maxHosts)
	}
	for i := range hosts {
		f.Hosts = append(f.Hosts, hostAddrs(i))
	}
	if err := f.build(edges); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (f *Fleet) build(edges int) (err error) {
	for name, node := range map[string]**Node{
		"client": &f.Client, "near": &f.Near, "far": &f.Far, "server": &f.Server,
	} {
		if *node, err = f.Node(name); err != nil {
			return err
		}
	}
	gateway, exit := addrs("10.77.1.1", "fd77:1::1"), addrs("10.77.2.1", "fd77:2::1")
	err = errors.Join(
		f.Veth(End{f.Client, NearDevice, prefixes(f.Hosts...)}, End{f.Near, NearDevice, prefixes(gateway)}),
		f.Veth(End{f.Far, FarDevice, prefixes(exit)}, End{f.Server, FarDevice, prefixes(f.ServerAddr)}),
		f.Near.Forward(), f.Far.Forward(),
		f.Client.Route(netip.Prefix{}, gateway.V4), f.Client.Route(netip.Prefix{}, gateway.V6),
		f.Server.Route(netip.Prefix{}, exit.V4), f.Server.Route(netip.Prefix{}, exit.V6))
	for i := 0; i < edges && err == nil; i++ {
		err = f.addEdge(i)
	}
	return err
}

// addEdge joins one more edge with both routers, by devices that have its number there.
func (f *Fleet) addEdge(i int) error {
	edge, err := f.Node(fmt.Sprintf("edge%d", i))
	if err != nil {
		return err
	}
	f.Edges = append(f.Edges, edge)
	device := fmt.Sprintf("edge%d", i)
	if err := errors.Join(
		f.Veth(End{f.Near, device, prefixes(f.NearAddr(i))}, End{edge, NearDevice, prefixes(f.EdgeNear(i))}),
		f.Veth(End{edge, FarDevice, prefixes(f.EdgeFar(i))}, End{f.Far, device, prefixes(f.FarAddr(i))}),
		edge.Forward(),
		edge.Route(netip.Prefix{}, f.FarAddr(i).V4), edge.Route(netip.Prefix{}, f.FarAddr(i).V6)); err != nil {
		return err
	}
	return errors.Join(edge.Route(ClientNets[0], f.NearAddr(i).V4), edge.Route(ClientNets[1], f.NearAddr(i).V6))
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
