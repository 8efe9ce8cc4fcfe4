package netstack

import (
	"context"
	"fmt"
	"net/netip"
	"os"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// Dial opens a connection into the tunnel, with the source address from.
func (s *Stack) Dial(ctx context.Context, from netip.Addr, to netip.AddrPort) (*Conn, error) {
	c, err := s.connectEndpoint(ctx, from, to)
	if err != nil {
		return nil, fmt.Errorf("netstack: dial %v: %w", to, err)
	}
	return c, nil
}

func (s *Stack) connectEndpoint(ctx context.Context, from netip.Addr, to netip.AddrPort) (*Conn, error) {
	select {
	case <-s.closed:
		return nil, os.ErrClosed
	default:
	}
	network := header.IPv4ProtocolNumber
	if from.Is6() {
		network = header.IPv6ProtocolNumber
	}
	c := newConn(s, stack.TransportEndpointID{})
	endpoint, failed := s.net.NewEndpoint(tcp.ProtocolNumber, network, &c.queue)
	if failed != nil {
		return nil, kernelError(failed)
	}
	remote := tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFromSlice(to.Addr().AsSlice()), Port: to.Port()}
	failed = endpoint.Bind(tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFromSlice(from.AsSlice())})
	var local tcpip.FullAddress
	if failed == nil {
		local, failed = endpoint.GetLocalAddress()
	}
	if failed != nil {
		endpoint.Close()
		return nil, kernelError(failed)
	}
	c.id = stack.TransportEndpointID{
		LocalAddress: local.Addr, LocalPort: local.Port, RemoteAddress: remote.Addr, RemotePort: remote.Port,
	}
	s.conns.addConn(c) // before its SYN leaves
	entry, connected := waiter.NewChannelEntry(waiter.WritableEvents | waiter.EventHUp | waiter.EventErr)
	c.queue.EventRegister(&entry)
	defer c.queue.EventUnregister(&entry)
	failed = endpoint.Connect(remote)
	if _, started := failed.(*tcpip.ErrConnectStarted); started {
		select {
		case <-connected:
			failed = endpoint.LastError()
		case <-ctx.Done():
			c.removeFromTable()
			endpoint.Abort()
			return nil, ctx.Err()
		}
	}
	if failed != nil {
		c.removeFromTable()
		endpoint.Close()
		return nil, kernelError(failed)
	}
	if err := c.adoptEndpoint(ctx, endpoint); err != nil {
		return nil, err
	}
	return c, nil
}
