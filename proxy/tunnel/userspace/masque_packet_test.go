package userspace

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip"
	gvsum "gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"pgregory.net/rapid"
)

var (
	server4 = netip.MustParseAddr("203.0.113.7")
	server6 = netip.MustParseAddr("2001:db8::7")
	client4 = netip.MustParseAddr("10.10.0.2")
	client6 = netip.MustParseAddr("fd00:10::2")
)

// ip returns a packet with this payload.
func ip(from, to netip.Addr, protocol tcpip.TransportProtocolNumber, payload []byte) []byte {
	src, dst := tcpip.AddrFromSlice(from.AsSlice()), tcpip.AddrFromSlice(to.AsSlice())
	if from.Is4() {
		b := header.IPv4(make([]byte, header.IPv4MinimumSize, header.IPv4MinimumSize+len(payload)))
		b.Encode(&header.IPv4Fields{
			TotalLength: uint16(cap(b)), TTL: 64, Protocol: uint8(protocol), SrcAddr: src,
			DstAddr: dst,
		})
		b.SetChecksum(^b.CalculateChecksum())
		return append(b, payload...)
	}
	b := header.IPv6(make([]byte, header.IPv6MinimumSize, header.IPv6MinimumSize+len(payload)))
	b.Encode(&header.IPv6Fields{
		PayloadLength: uint16(len(payload)), TransportProtocol: protocol, HopLimit: 64,
		SrcAddr: src, DstAddr: dst,
	})
	return append(b, payload...)
}

// udp returns a packet of size bytes.
func udp(from, to netip.Addr, size int) []byte {
	b := header.UDP(make([]byte, size-len(ip(from, to, 0, nil))))
	b.Encode(&header.UDPFields{SrcPort: 53, DstPort: 4000, Length: uint16(len(b))})
	return ip(from, to, header.UDPProtocolNumber, b)
}

// syn returns a SYN with these options.
func syn(from, to netip.Addr, flags header.TCPFlags, options []byte) []byte {
	b := header.TCP(make([]byte, header.TCPMinimumSize+len(options)))
	copy(b[header.TCPMinimumSize:], options)
	b.Encode(&header.TCPFields{
		SrcPort: 4000, DstPort: 443, SeqNum: 7, DataOffset: uint8(len(b)), Flags: flags,
		WindowSize: 1000,
	})
	b.SetChecksum(^b.CalculateChecksum(tcpSum(from, to, len(b))))
	return ip(from, to, header.TCPProtocolNumber, b)
}

func tcpSum(from, to netip.Addr, size int) uint16 {
	return header.PseudoHeaderChecksum(header.TCPProtocolNumber,
		tcpip.AddrFromSlice(from.AsSlice()), tcpip.AddrFromSlice(to.AsSlice()), uint16(size))
}

func TestEndsOfAPacket(t *testing.T) {
	for _, p := range [][]byte{udp(client4, server4, 100), ip(client4, server4, 17, nil)} {
		from, to, ok := endsOf(p)
		assert.True(t, ok)
		assert.Equal(t, [2]netip.Addr{client4, server4}, [2]netip.Addr{from, to})
	}
	from, to, ok := endsOf(udp(client6, server6, 100))
	assert.True(t, ok)
	assert.Equal(t, [2]netip.Addr{client6, server6}, [2]netip.Addr{from, to})
	for _, p := range [][]byte{
		nil,
		{0x45},
		udp(client4, server4, 100)[:19], udp(client6, server6, 100)[:39],
		append([]byte{0x55}, make([]byte, 60)...),
	} {
		_, _, ok := endsOf(p)
		assert.False(t, ok, p)
	}
}

func TestPacketTooBigSaysWhatFitsToWhoSentIt(t *testing.T) {
	for _, size := range []int{1400, 1401, 9000} {
		b := header.IPv4(tooBig(udp(server4, client4, size), 1234))
		require.True(t, b.IsValid(len(b)))
		assert.True(t, b.IsChecksumValid())
		assert.Equal(t, client4.String(), b.SourceAddress().String())
		assert.Equal(t, server4.String(), b.DestinationAddress().String())
		assert.Len(t, b, 576)
		icmp := header.ICMPv4(b.Payload())
		assert.Equal(t, header.ICMPv4DstUnreachable, icmp.Type())
		assert.Equal(t, header.ICMPv4FragmentationNeeded, icmp.Code())
		assert.Equal(t, uint16(1234), icmp.MTU())
		assert.Equal(t, uint16(0xffff), gvsum.Checksum(icmp, 0))
		assert.Equal(t, udp(server4, client4, size)[:len(icmp)-8], icmp.Payload())

		p := header.IPv6(tooBig(udp(server6, client6, size), 1300))
		require.True(t, p.IsValid(len(p)))
		assert.Equal(t, client6.String(), p.SourceAddress().String())
		assert.Equal(t, server6.String(), p.DestinationAddress().String())
		assert.Len(t, p, 1280)
		six := header.ICMPv6(p.Payload())
		assert.Equal(t, header.ICMPv6PacketTooBig, six.Type())
		assert.Equal(t, uint32(1300), six.MTU())
		assert.Equal(t, six.Checksum(), header.ICMPv6Checksum(header.ICMPv6ChecksumParams{
			Header: six,
			Src:    p.SourceAddress(), Dst: p.DestinationAddress(),
		}))
	}
}

func TestThereIsNoErrorAboutAnError(t *testing.T) {
	for _, p := range [][]byte{udp(server4, client4, 1400), udp(server6, client6, 1400)} {
		about := tooBig(p, 1000)
		require.NotNil(t, about)
		assert.Nil(t, tooBig(about, 500))
	}
	echo := header.ICMPv4(make([]byte, 1400))
	echo.SetType(header.ICMPv4Echo)
	assert.NotNil(t, tooBig(ip(server4, client4, header.ICMPv4ProtocolNumber, echo), 1000), "a ping is none")
}

func TestASYNAsksForNoMoreThanFits(t *testing.T) {
	wide, pad := []byte{3, 3, 7}, []byte{1}
	mss := func(n uint16) []byte { return []byte{2, 4, byte(n >> 8), byte(n)} }
	for _, row := range []struct {
		name    string
		flags   header.TCPFlags
		options []byte
		asks    uint16 // of an IPv4 packet of 1300 bytes
	}{
		{"a SYN", header.TCPFlagSyn, mss(1460), 1260},
		{"the answer to it", header.TCPFlagSyn | header.TCPFlagAck, mss(8960), 1260},
		{"after other options", header.TCPFlagSyn, slices.Concat(wide, pad, mss(1460)), 1260},
		{"at an odd offset", header.TCPFlagSyn, slices.Concat(wide, mss(1460), pad), 1260},
		{"less already", header.TCPFlagSyn, mss(536), 536},
		{"exactly", header.TCPFlagSyn, mss(1260), 1260},
		{"no SYN", header.TCPFlagAck, mss(1460), 1460},
		{"behind the end", header.TCPFlagSyn, slices.Concat([]byte{0, 0, 0, 0}, mss(1460)), 0},
		{"none", header.TCPFlagSyn, nil, 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			for _, ends := range [][2]netip.Addr{{client4, server4}, {client6, server6}} {
				p := syn(ends[0], ends[1], row.flags, row.options)
				less := len(p) - header.TCPMinimumSize - len(row.options) - header.IPv4MinimumSize
				clampMSS(p, 1300+less)
				segment := header.TCP(p[len(p)-header.TCPMinimumSize-len(row.options):])
				if row.asks > 0 {
					found := slices.Index(segment.Options(), 2)
					if row.options[0] == 3 {
						found = slices.Index(segment.Options()[3:], 2) + 3
					}
					assert.Equal(t, row.asks, uint16(segment.Options()[found+2])<<8|uint16(segment.Options()[found+3]))
				} else {
					assert.Equal(t, row.options, append([]byte(nil), segment.Options()...))
				}
				assert.Equal(t, uint16(0xffff), gvsum.Checksum(segment, tcpSum(ends[0], ends[1], len(segment))))
			}
		})
	}
}

func FuzzPackets(f *testing.F) {
	f.Add(udp(client4, server4, 100), 1300)
	f.Add(syn(client6, server6, header.TCPFlagSyn, []byte{2, 4, 5, 180}), 1300)
	f.Add(tooBig(udp(client4, server4, 1000), 500), 68)
	f.Add([]byte{0x4f}, 0)
	f.Fuzz(func(t *testing.T, p []byte, mtu int) {
		if _, _, ok := endsOf(p); !ok {
			return
		}
		size := len(p)
		clampMSS(p, mtu)
		assert.Len(t, p, size)
		if icmp := tooBig(p, mtu); icmp != nil {
			_, to, ok := endsOf(icmp)
			from, _, _ := endsOf(p)
			assert.True(t, ok)
			assert.Equal(t, from, to)
			assert.LessOrEqual(t, len(icmp), 1280)
		}
	})
}

func TestAPoolGivesNobodyWhatIsSomebodysAndEverythingOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		bits := rapid.IntRange(24, 30).Draw(t, "bits")
		prefixes := []netip.Prefix{
			netip.PrefixFrom(netip.MustParseAddr("10.10.0.0"), bits),
			netip.MustParsePrefix("fd00:10::/64"),
		}
		p, err := newPool(prefixes)
		require.NoError(t, err)
		p.reserveFor([]string{"phone", "tablet", "laptop"})
		room := 1<<(32-bits) - 3 // less its own, the gateway's and everybody's
		var out [][]netip.Addr
		held := map[netip.Addr]bool{}
		for range rapid.IntRange(1, 600).Draw(t, "steps") {
			if len(out) > 0 && rapid.IntRange(0, 2).Draw(t, "give") == 0 {
				i := rapid.IntRange(0, len(out)-1).Draw(t, "which")
				p.returnAddresses(out[i])
				for _, a := range out[i] {
					delete(held, a)
				}
				out = slices.Delete(out, i, i+1)
				continue
			}
			got, err := p.takeAddresses(rapid.SampledFrom([]string{"phone", "tablet", "nobody"}).Draw(t, "name"))
			if len(out) == room {
				require.ErrorIs(t, err, errPoolExhausted)
				require.Len(t, p.used, 2*room)
				continue
			}
			require.NoError(t, err)
			require.Len(t, got, 2)
			for i, a := range got {
				require.True(t, prefixes[i].Contains(a))
				require.False(t, held[a], "%v is somebody's", a)
				held[a] = true
			}
			out = append(out, got)
		}
	})
}

func TestANameHasTheSameAddressesEachTime(t *testing.T) {
	prefixes := []netip.Prefix{netip.MustParsePrefix("10.10.0.0/24"), netip.MustParsePrefix("fd00:10::/64")}
	names := []string{"phone", "tablet"}
	for i := range 150 {
		names = append(names, fmt.Sprint("other", i))
	}
	taken := func(p *pool, name string) []netip.Addr {
		a, err := p.takeAddresses(name)
		require.NoError(t, err)
		return a
	}
	p, err := newPool(prefixes)
	require.NoError(t, err)
	p.reserveFor(names)
	phone := taken(p, "phone")
	assert.NotEqual(t, phone, taken(p, "phone"), "a second session beside the first")
	p.returnAddresses(phone)
	for _, name := range names[1:] {
		assert.NotEqual(t, phone, taken(p, name), "it is kept for its owner")
	}
	assert.Equal(t, phone, taken(p, "phone"))
	p.returnAddresses(phone)
	p.reserveFor(append([]string{"new"}, names[:2]...))
	assert.Equal(t, phone, taken(p, "phone"), "after a reload")

	again, err := newPool(prefixes)
	require.NoError(t, err)
	again.reserveFor(names)
	assert.Equal(t, phone, taken(again, "phone"), "in another process")
}

func TestMoreNamesThanAddressesShareThem(t *testing.T) {
	p, err := newPool([]netip.Prefix{netip.MustParsePrefix("10.10.0.0/30")}) // one for clients
	require.NoError(t, err)
	p.reserveFor([]string{"phone", "tablet"})
	for _, name := range []string{"tablet", "phone", "guest"} {
		a, err := p.takeAddresses(name)
		require.NoError(t, err)
		_, err = p.takeAddresses("phone")
		require.ErrorIs(t, err, errPoolExhausted)
		p.returnAddresses(a)
	}
}
