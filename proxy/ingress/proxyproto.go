package ingress

import (
	"fmt"
	"io"
	"net"
	"net/netip"

	proxyproto "github.com/pires/go-proxyproto"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// WriteProxyHeader writes the header of version 1 or 2 with the client's address. A header has
// addresses of one family. Where target is of another than source, cameTo takes its place. If
// that is of another family as well, IPv4 addresses are written in their IPv6 form. Without
// source or target the header has no addresses (LOCAL, UNKNOWN).
func WriteProxyHeader(w io.Writer, version int, source, target, cameTo netip.AddrPort) error {
	if version != 1 && version != 2 {
		return fmt.Errorf("ingress: proxy protocol: version %d is neither 1 nor 2", version)
	}
	h := &proxyproto.Header{Version: byte(version), Command: proxyproto.LOCAL, TransportProtocol: proxyproto.UNSPEC}
	source, target, cameTo = datapath.PlainAddr(source), datapath.PlainAddr(target), datapath.PlainAddr(cameTo)
	if source.Addr().Is4() != target.Addr().Is4() && cameTo.IsValid() {
		target = cameTo
	}
	if source.IsValid() && target.IsValid() {
		h.Command, h.TransportProtocol = proxyproto.PROXY, proxyproto.TCPv6
		if source.Addr().Is4() && target.Addr().Is4() {
			h.TransportProtocol = proxyproto.TCPv4
		}
		h.SourceAddr, h.DestinationAddr = net.TCPAddrFromAddrPort(source), net.TCPAddrFromAddrPort(target)
	}
	if _, err := h.WriteTo(w); err != nil {
		return fmt.Errorf("ingress: proxy protocol: write header: %w", err)
	}
	return nil
}
