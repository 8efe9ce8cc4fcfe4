package policy

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// direction is the way bytes go: down to the client, up to the server.
type direction string

const (
	down direction = "down"
	up   direction = "up"
)

// groupBy is the property that the flows of one group share.
type groupBy uint8

const (
	byPeer groupBy = iota // the host the bytes go to
	bySource
	byDestination
	byTunnel
	byListener
	byFlow
	byName
)

// Group is a template for flow.Terms.Group: which flows share one window. Only a literal name joins flows of several
// listeners, since different listeners have different last hops. The two directions have separate groups. The
// exception is what one peer of a tunnel sends to another: it joins the receiving peer's downloads.
type Group struct {
	by     groupBy
	v4, v6 int // prefix lengths for bySource; 0: the whole address
	name   string
}

// GroupForms lists what ParseGroup understands, for help and error messages.
const GroupForms = "peer, source, source/24, source/24/64, destination, tunnel, listener, flow, or a name of your own"

// ParseGroup reads a template:
//
//   - "peer" or nothing: the host the bytes go to. For downloads it is the client, or the tunnel's peer that it is
//     inside; for uploads the server.
//   - "source": the client's host in both directions.
//   - "source/24", "source/24/64": the client's network; /64 for IPv6 where no second length is given.
//   - "destination", "listener", "flow": what the word says.
//   - "tunnel": the tunnel's peer that the client comes through, else the client's host.
//   - any other word: one group of that name.
func ParseGroup(s string) (Group, error) {
	switch s {
	case "", "peer":
		return Group{}, nil
	case "source":
		return Group{by: bySource}, nil
	case "destination":
		return Group{by: byDestination}, nil
	case "tunnel":
		return Group{by: byTunnel}, nil
	case "listener":
		return Group{by: byListener}, nil
	case "flow":
		return Group{by: byFlow}, nil
	}
	lengths, ok := strings.CutPrefix(s, "source/")
	if !ok {
		if strings.ContainsAny(s, "/|{} ") || strings.ContainsFunc(s,
			func(r rune) bool { return !strconv.IsPrint(r) }) {
			return Group{}, fmt.Errorf("%q is no group; write %s", s, GroupForms)
		}
		return Group{by: byName, name: s}, nil
	}
	first, second, both := strings.Cut(lengths, "/")
	if !both {
		second = "64"
	}
	v4, err4 := strconv.ParseUint(first, 10, 8)
	v6, err6 := strconv.ParseUint(second, 10, 8)
	if err4 != nil || err6 != nil || v4 < 1 || v4 > 32 || v6 < 1 || v6 > 128 {
		return Group{}, fmt.Errorf("%q is no group; prefix lengths go from 1 to 32 (IPv4) and 1 to 128 (IPv6), as "+
			"in source/24/64", s)
	}
	return Group{by: bySource, v4: int(v4), v6: int(v6)}, nil
}

// expandFor returns the key of a connection's group, with | between its parts.
func (g Group) expandFor(f Facts, d direction) string {
	by := g.by
	switch {
	case by == byPeer && d == up && f.TargetPeer != "": // the last hop is that peer's, as for what it downloads
		return string(down) + "|" + f.TargetListener + "|through " + f.TargetPeer
	case by == byPeer && d == up:
		by = byDestination
	case by == byPeer && f.Inside:
		by = byTunnel
	case by == byPeer, by == byTunnel && f.Peer == "":
		by = bySource
	}
	key := ""
	switch by {
	case byName:
		return string(d) + "|" + g.name
	case bySource:
		key = g.maskAddr(f.Source.Addr())
	case byDestination:
		key = "to " + f.Target.Addr().WithZone("").String()
	case byFlow:
		key = f.Source.String() + " to " + f.Target.String()
	case byTunnel:
		key = "through " + f.Peer
	case byListener, byPeer:
	}
	return string(d) + "|" + f.Listener + "|" + key
}

// maskAddr returns the network of an address by the template's prefix lengths.
func (g Group) maskAddr(a netip.Addr) string {
	bits := g.v4
	if a.Is6() {
		bits = g.v6
	}
	if bits == 0 {
		return a.String()
	}
	p, err := a.Prefix(bits)
	if err != nil { // only an invalid address
		return a.String()
	}
	return p.String()
}
