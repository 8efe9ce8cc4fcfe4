package userspace

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// Place implements tunnel.Inside.
func (l *Listener) Place(addr netip.Addr) tunnel.Place { return l.outside.Place(addr) }

// Name implements tunnel.Listener.
func (l *Listener) Name() string { return l.name }

// Peer implements tunnel.Inside.
func (l *Listener) Peer(inner netip.Addr) string { return l.outside.Peer(inner) }

// Gateway implements tunnel.Inside.
func (l *Listener) Gateway(inner netip.Addr) netip.Addr { return l.outside.Gateway(inner) }

// Own implements tunnel.Inside.
func (l *Listener) Own(like netip.Addr) netip.Addr { return l.outside.Own(like) }

// Dial implements tunnel.Listener.
func (l *Listener) Dial(ctx context.Context, source netip.Addr, target netip.AddrPort) (datapath.Conn, error) {
	if source.Is4() != target.Addr().Is4() || l.outside.Place(source) != tunnel.OfPeer {
		source = l.outside.Gateway(target.Addr())
		if !source.IsValid() { // of a network behind a peer
			source = l.outside.Own(target.Addr())
		}
		if !source.IsValid() {
			return nil, fmt.Errorf("tunnel: listener %q: dial %v: the gateway has no address inside", l.name, target)
		}
	}
	c, err := l.stack.Dial(ctx, source, target)
	if err != nil {
		return nil, fmt.Errorf("tunnel: listener %q: %w", l.name, err) // not a nil *netstack.Conn in an interface
	}
	return c, nil
}
