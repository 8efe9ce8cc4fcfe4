//go:build linux

package netlab

import (
	"errors"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc/sim"
)

// Addrs are a device's addresses.
type Addrs struct{ V4, V6 netip.Addr }

func (a Addrs) prefixes() []netip.Prefix {
	return []netip.Prefix{netip.PrefixFrom(a.V4, 24), netip.PrefixFrom(a.V6, 64)}
}

// Routed is client, edge and server in a row, joined by veth pairs; the edge
// forwards. The package comment draws it.
type Routed struct {
	*Lab
	Client, Edge, Server *Node

	ClientAddr Addrs
	EdgeNear   Addrs // the edge's, towards the client
	EdgeFar    Addrs // the edge's, towards the server
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
	Spin     time.Duration // as in PathConfig
}

// Devices of the edge, and of the nodes they lead to.
const (
	NearDevice = "cell0"
	FarDevice  = "wan0"
)

// NewRouted builds a network without any emulated link.
func NewRouted() (*Routed, error) {
	return routed(func(r *Routed, client, edge End) error { return r.Veth(client, edge) })
}

// NewCellular builds a network whose near link is emulated.
func NewCellular(cfg CellularConfig) (*Cellular, error) {
	c := &Cellular{}
	var err error
	c.Routed, err = routed(func(r *Routed, client, edge End) (err error) {
		c.Path, err = r.Path(PathConfig{Near: client, Far: edge, Down: cfg.Down, Up: cfg.Up, Spin: cfg.Spin})
		return err
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

func routed(near func(r *Routed, client, edge End) error) (*Routed, error) {
	r := &Routed{
		Lab:        New(),
		ClientAddr: addrs("10.77.1.2", "fd77:1::2"),
		EdgeNear:   addrs("10.77.1.1", "fd77:1::1"),
		EdgeFar:    addrs("10.77.2.1", "fd77:2::1"),
		ServerAddr: addrs("10.77.2.2", "fd77:2::2"),
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
	if err := near(r, End{r.Client, NearDevice, r.ClientAddr.prefixes()}, End{r.Edge, NearDevice, r.EdgeNear.prefixes()}); err != nil {
		return err
	}
	if err := r.Veth(End{r.Edge, FarDevice, r.EdgeFar.prefixes()}, End{r.Server, FarDevice, r.ServerAddr.prefixes()}); err != nil {
		return err
	}
	// Last, as a router's device is born into multicast groups, which it reports.
	if err := r.Edge.Forward(); err != nil {
		return err
	}
	for _, route := range []struct {
		node *Node
		via  netip.Addr
	}{
		{r.Client, r.EdgeNear.V4},
		{r.Client, r.EdgeNear.V6},
		{r.Server, r.EdgeFar.V4},
		{r.Server, r.EdgeFar.V6},
	} {
		if err := route.node.Route(netip.Prefix{}, route.via); err != nil {
			return err
		}
	}
	return nil
}

func addrs(v4, v6 string) Addrs {
	return Addrs{V4: netip.MustParseAddr(v4), V6: netip.MustParseAddr(v6)}
}
