package netstack

import (
	"fmt"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/penstock-net/penstock/proxy/datapath"
)

var _ datapath.Marker = (*Conn)(nil)

// dscpShift is how many bits of the TOS byte, or traffic class, are ECN's.
const dscpShift = 2

// dscpOf is the DSCP of a packet.
func dscpOf(pkt *stack.PacketBuffer) uint8 {
	var tos uint8
	if pkt.NetworkProtocolNumber == header.IPv6ProtocolNumber {
		tos, _ = header.IPv6(pkt.NetworkHeader().Slice()).TOS()
	} else {
		tos, _ = header.IPv4(pkt.NetworkHeader().Slice()).TOS()
	}
	return tos >> dscpShift
}

// ReceivedDSCP implements datapath.Marker. It is that of the client's SYN; of a connection into the tunnel it is not
// known.
func (c *Conn) ReceivedDSCP() uint8 { return c.dscp }

// SetDSCP implements datapath.Marker.
func (c *Conn) SetDSCP(dscp uint8) error {
	endpoint, err := c.liveEndpoint()
	if err != nil {
		return err
	}
	option := tcpip.IPv4TOSOption
	if c.Source().Addr().Is6() {
		option = tcpip.IPv6TrafficClassOption
	}
	if err := endpoint.SetSockOptInt(option, int(dscp)<<dscpShift); err != nil {
		return fmt.Errorf("netstack: set a DSCP of %d: %w", dscp, kernelError(err))
	}
	return nil
}
