package hold

import (
	"encoding/hex"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/flow"
)

// fromHex joins the octets of a packet that are written in groups.
func fromHex(t testing.TB, text ...string) []byte {
	t.Helper()
	var packet []byte
	for _, group := range text {
		part, err := hex.DecodeString(group)
		require.NoError(t, err)
		packet = append(packet, part...)
	}
	return packet
}

const (
	ipv4ToUDP   = "4502003000010000401100000a4d0202cb007109" // from 10.77.2.2 to 203.0.113.9, ECT(0)
	ipv6Address = "fd770002000000000000000000000002fd770001000000000000000000000002"
	udpHeader   = "01bb30390010abcd" // from port 443 to port 12345
)

func TestAHeaderNamesItsFlow(t *testing.T) {
	udp4 := FlowKey{netip.MustParseAddrPort("10.77.2.2:443"), netip.MustParseAddrPort("203.0.113.9:12345"), protocolUDP}
	udp6 := FlowKey{netip.MustParseAddrPort("[fd77:2::2]:443"), netip.MustParseAddrPort("[fd77:1::2]:12345"), protocolUDP}
	without := func(f FlowKey, protocol uint8) FlowKey {
		return FlowKey{netip.AddrPortFrom(f.Source.Addr(), 0), netip.AddrPortFrom(f.Target.Addr(), 0), protocol}
	}
	noPorts := without(udp4, protocolUDP)
	for name, c := range map[string]struct {
		packet []byte
		flow   FlowKey
		ecn    flow.ECN
	}{
		"UDP over IPv4":            {fromHex(t, ipv4ToUDP, udpHeader, "c3"), udp4, flow.ECT0},
		"with options":             {fromHex(t, "47"+ipv4ToUDP[2:], "0101010101010101", udpHeader), udp4, flow.ECT0},
		"cut within the transport": {fromHex(t, ipv4ToUDP, "01bb3039"), without(udp4, protocolUDP), flow.ECT0},
		"a first fragment":         {fromHex(t, ipv4ToUDP[:12]+"2000"+ipv4ToUDP[16:], udpHeader), noPorts, flow.ECT0},
		"a later fragment":         {fromHex(t, ipv4ToUDP[:12]+"00b9"+ipv4ToUDP[16:], udpHeader), noPorts, flow.ECT0},
		"ESP": {
			fromHex(t, ipv4ToUDP[:18]+"32"+ipv4ToUDP[20:], udpHeader),
			without(udp4, 50), flow.ECT0,
		},
		"UDP over IPv6, CE": {fromHex(t, "6030000000101140", ipv6Address, udpHeader), udp6, flow.CE},
		"behind a hop-by-hop header": {
			fromHex(t, "6010000000180040", ipv6Address, "1100010400000000", udpHeader),
			udp6, flow.ECT1,
		},
		"an IPv6 fragment": {
			fromHex(t, "6000000000182c40", ipv6Address, "11000001deadbeef", udpHeader),
			without(udp6, protocolUDP), 0,
		},
		"a header longer than the copy": {
			fromHex(t, "6000000000183c40", ipv6Address, "11ff010400000000", udpHeader),
			without(udp6, protocolUDP), 0,
		},
		"an IPv6 header and nothing else": {fromHex(t, "6000000000001140", ipv6Address), without(udp6, protocolUDP), 0},
	} {
		t.Run(name, func(t *testing.T) {
			h, ok := parseHeader(c.packet)
			require.True(t, ok)
			assert.Equal(t, c.flow, h.flow)
			assert.Equal(t, c.ecn, h.ecn)
		})
	}
}

func TestWhatIsNoIPPacketIsNotRead(t *testing.T) {
	for name, packet := range map[string][]byte{
		"nothing":              {},
		"another version":      fromHex(t, "5"+ipv4ToUDP[1:]),
		"IPv4, cut":            fromHex(t, ipv4ToUDP)[:19],
		"IPv4, length too low": fromHex(t, "44"+ipv4ToUDP[2:], udpHeader),
		"IPv6, cut":            fromHex(t, "6000000000101140", ipv6Address)[:39],
	} {
		_, ok := parseHeader(packet)
		assert.False(t, ok, name)
	}
}

func FuzzParseHeader(f *testing.F) {
	f.Add(fromHex(f, ipv4ToUDP, udpHeader))
	f.Add(fromHex(f, "6010000000180040", ipv6Address, "1100010400000000", udpHeader))
	f.Add(fromHex(f, "6000000000182c40", ipv6Address, "11000001deadbeef", udpHeader))
	f.Fuzz(func(t *testing.T, packet []byte) {
		h, ok := parseHeader(packet)
		if !ok {
			return
		}
		assert.True(t, h.flow.Source.Addr().IsValid() && h.flow.Target.Addr().IsValid())
		assert.LessOrEqual(t, h.ecn, flow.CE)
	})
}
