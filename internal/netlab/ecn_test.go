//go:build linux

package netlab

import (
	"net"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/sim"
)

// serialized is an IP packet, its checksum as it should be.
func serialized(t *testing.T, ip gopacket.SerializableLayer) []byte {
	t.Helper()
	b := gopacket.NewSerializeBuffer()
	opts := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
	require.NoError(t, gopacket.SerializeLayers(b, opts, ip, gopacket.Payload("payload")))
	return b.Bytes()
}

func TestMarksAreSetInTheHeader(t *testing.T) {
	for _, ecn := range []sim.Codepoint{sim.NotECT, sim.ECT0, sim.ECT1, sim.CE} {
		for _, dscp := range []uint8{0, 46, 63} {
			v4 := func(ecn sim.Codepoint) []byte {
				return serialized(t, &layers.IPv4{
					Version: 4, TTL: 64, Id: 4711, TOS: dscp<<2 | uint8(ecn), Protocol: layers.IPProtocolTCP,
					SrcIP: net.IPv4(10, 0, 0, 1), DstIP: net.IPv4(192, 168, 254, 255),
				})
			}
			v6 := func(ecn sim.Codepoint) []byte {
				return serialized(t, &layers.IPv6{
					Version: 6, HopLimit: 64, FlowLabel: 0xabcde, TrafficClass: dscp<<2 | uint8(ecn),
					NextHeader: layers.IPProtocolTCP, SrcIP: net.ParseIP("2001:db8::1"), DstIP: net.ParseIP("2001:db8::2"),
				})
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
