//go:build linux

package e2e

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/penstock-net/penstock/internal/netlab"
)

// routedEdges is client and server with several edges side by side between them, which forward:
//
//	client ── near ══ edges side by side ══ far ── server
//
// Near and far are the routers that choose an edge for what comes from the client, and for what comes from the server.
// Neither has a route yet to what is behind the edges. Edge i is the neighbor EdgeNear(i) of Near and EdgeFar(i) of
// Far.
type routedEdges struct {
	*netlab.Lab
	Client, Near, Far, Server *netlab.Node
	Edges                     []*netlab.Node

	Hosts []netlab.Addrs // addresses of the client
}

// Addresses of neighbors, by the number of the edge, and of the server.
func (*routedEdges) NearAddr(edge int) netlab.Addrs { return between(78, edge, 1) }
func (*routedEdges) EdgeNear(edge int) netlab.Addrs { return between(78, edge, 2) }
func (*routedEdges) FarAddr(edge int) netlab.Addrs  { return between(79, edge, 1) }
func (*routedEdges) EdgeFar(edge int) netlab.Addrs  { return between(79, edge, 2) }
func (*routedEdges) ServerAddr() netlab.Addrs       { return addrsOf("10.77.2.2", "fd77:2::2") }

func between(side, edge, end int) netlab.Addrs {
	return addrsOf(fmt.Sprintf("10.%d.%d.%d", side, edge, end), fmt.Sprintf("fd%d:%d::%d", side, edge, end))
}

func addrsOf(v4, v6 string) netlab.Addrs {
	return netlab.Addrs{V4: netip.MustParseAddr(v4), V6: netip.MustParseAddr(v6)}
}

// newRoutedEdges builds a network of that many edges for a client of that many addresses.
func newRoutedEdges(edges, hosts int) (*routedEdges, error) {
	f := &routedEdges{Lab: netlab.New()}
	for i := range hosts {
		f.Hosts = append(f.Hosts, addrsOf(fmt.Sprintf("10.77.1.%d", 2+i), fmt.Sprintf("fd77:1::%x", 2+i)))
	}
	if err := f.build(edges); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (f *routedEdges) build(edges int) (err error) {
	for name, node := range map[string]**netlab.Node{
		"client": &f.Client, "near": &f.Near, "far": &f.Far, "server": &f.Server,
	} {
		if *node, err = f.Node(name); err != nil {
			return err
		}
	}
	gateway, exit := addrsOf("10.77.1.1", "fd77:1::1"), addrsOf("10.77.2.1", "fd77:2::1")
	err = errors.Join(
		f.Veth(end(f.Client, netlab.NearDevice, f.Hosts...), end(f.Near, netlab.NearDevice, gateway)),
		f.Veth(end(f.Far, netlab.FarDevice, exit), end(f.Server, netlab.FarDevice, f.ServerAddr())),
		f.Near.Forward(), f.Far.Forward(),
		f.Client.Route(netip.Prefix{}, gateway.V4), f.Client.Route(netip.Prefix{}, gateway.V6),
		f.Server.Route(netip.Prefix{}, exit.V4), f.Server.Route(netip.Prefix{}, exit.V6))
	for i := 0; i < edges && err == nil; i++ {
		err = f.addEdge(i)
	}
	return err
}

// addEdge joins one more edge with both routers, by devices that have its number there.
func (f *routedEdges) addEdge(i int) error {
	device := fmt.Sprintf("edge%d", i)
	edge, err := f.Node(device)
	if err != nil {
		return err
	}
	f.Edges = append(f.Edges, edge)
	if err := errors.Join(
		f.Veth(end(f.Near, device, f.NearAddr(i)), end(edge, netlab.NearDevice, f.EdgeNear(i))),
		f.Veth(end(edge, netlab.FarDevice, f.EdgeFar(i)), end(f.Far, device, f.FarAddr(i))),
		edge.Forward(),
		edge.Route(netip.Prefix{}, f.FarAddr(i).V4), edge.Route(netip.Prefix{}, f.FarAddr(i).V6)); err != nil {
		return err
	}
	return errors.Join(edge.Route(netip.MustParsePrefix("10.77.1.0/24"), f.NearAddr(i).V4),
		edge.Route(netip.MustParsePrefix("fd77:1::/64"), f.NearAddr(i).V6))
}

// end is a device of a node with such addresses.
func end(node *netlab.Node, device string, addrs ...netlab.Addrs) netlab.End {
	e := netlab.End{Node: node, Device: device}
	for _, a := range addrs {
		e.Addrs = append(e.Addrs, netip.PrefixFrom(a.V4, 24), netip.PrefixFrom(a.V6, 64))
	}
	return e
}
