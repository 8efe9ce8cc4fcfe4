//go:build linux

package netlab

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/penstock-net/penstock/cc/sim"
)

func TestMarksAreSetInTheHeader(t *testing.T) {
	for _, ecn := range []sim.Codepoint{sim.NotECT, sim.ECT0, sim.ECT1, sim.CE} {
		for _, dscp := range []uint8{0, 46, 63} {
			v4 := func(ecn sim.Codepoint) []byte {
				ip := header.IPv4(append(make([]byte, header.IPv4MinimumSize), "payload"...))
				ip.Encode(&header.IPv4Fields{
					TOS: dscp<<2 | uint8(ecn), TotalLength: uint16(len(ip)), ID: 4711, TTL: 64, Protocol: 6,
					SrcAddr: tcpip.AddrFrom4([4]byte{10, 0, 0, 1}),
					DstAddr: tcpip.AddrFrom4([4]byte{192, 168, 254, 255}),
				})
				ip.SetChecksum(^ip.CalculateChecksum())
				return ip
			}
			v6 := func(ecn sim.Codepoint) []byte {
				ip := header.IPv6(append(make([]byte, header.IPv6MinimumSize), "payload"...))
				ip.Encode(&header.IPv6Fields{
					TrafficClass: dscp<<2 | uint8(ecn), FlowLabel: 0xabcde, PayloadLength: 7, TransportProtocol: 6,
					HopLimit: 64, SrcAddr: tcpip.AddrFrom16([16]byte{0x20, 1}),
					DstAddr: tcpip.AddrFrom16([16]byte{0xfd}),
				})
				return ip
			}
			for _, packet := range []func(sim.Codepoint) []byte{v4, v6} {
				b := packet(ecn)
				require.Equal(t, ecn, codepoint(b))
				want := b
				if ecn != sim.NotECT {
					want = packet(sim.CE)
				}
				mark(b)
				assert.Equal(t, want, b, "codepoint %d, dscp %d", ecn, dscp)
			}
		}
	}
	assert.Equal(t, sim.NotECT, codepoint(nil))
}
