package netstack

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// family is what a test needs of IPv4 or IPv6.
type family struct {
	client netip.AddrPort
	server netip.AddrPort
	head   int
	hops   int // where the hop limit lies
	echo   byte
}

var families = map[string]family{
	"IPv4": {netip.AddrPortFrom(client, 5000), server, header.IPv4MinimumSize, 8, 8},
	"IPv6": {netip.AddrPortFrom(client6, 5000), server6, header.IPv6MinimumSize, 7, 128},
}

func (f family) syn() []byte {
	return tcpPacket(f.client, f.server, header.TCPFlagSyn, 100, 0, []byte{2, 4, 5, 0})
}

func (f family) udp() []byte { return udpPacket(f.client, f.server, []byte("hello")) }

func (f family) ping() []byte {
	return icmpPacket(f.client.Addr(), f.server.Addr(), []byte{f.echo, 0, 0, 0, 0, 7, 0, 1, 'x', 'y'})
}

// withHops changes the hop limit.
func (f family) withHops(p []byte, hops byte) []byte {
	p[f.hops] = hops
	if f.client.Addr().Is4() {
		header.IPv4(p).SetChecksum(0)
		header.IPv4(p).SetChecksum(^header.IPv4(p).CalculateChecksum())
	}
	return p
}

// parts cuts a packet's payload in two fragments.
func (f family) parts(p []byte, at int) [][]byte {
	var out [][]byte
	for _, part := range [][2]int{{0, at}, {at, len(p) - f.head}} {
		last := part[1] == len(p)-f.head
		q := append([]byte(nil), p[:f.head]...)
		if f.client.Addr().Is4() {
			q = append(q, p[f.head+part[0]:f.head+part[1]]...)
			ip := header.IPv4(q)
			flags := uint8(header.IPv4FlagMoreFragments)
			if last {
				flags = 0
			}
			ip.SetTotalLength(uint16(len(q)))
			ip.SetFlagsFragmentOffset(flags, uint16(part[0]))
			ip.SetID(7)
			out = append(out, f.withHops(q, 64))
			continue
		}
		more := byte(1)
		if last {
			more = 0
		}
		q = append(q, p[6], 0, byte(part[0]>>8), byte(part[0])|more, 0, 0, 0, 7)
		q = append(q, p[f.head+part[0]:f.head+part[1]]...)
		header.IPv6(q).SetPayloadLength(uint16(len(q) - f.head))
		q[6] = uint8(header.IPv6FragmentExtHdrIdentifier)
		out = append(out, q)
	}
	return out
}

// asked is how many connections were asked for.
func (a alone) asked() int {
	a.requests.mu.Lock()
	defer a.requests.mu.Unlock()
	return len(a.requests.waiting)
}

func TestWhatIsDamagedGoesNoFurther(t *testing.T) {
	flip := func(at int) func([]byte) []byte {
		return func(p []byte) []byte { p[len(p)-1-at] ^= 1; return p }
	}
	for name, f := range families {
		for what, packet := range map[string][]byte{
			"a SYN": flip(0)(f.syn()), "a datagram": flip(0)(f.udp()), "a datagram's head": flip(10)(f.udp()), "a ping": flip(0)(f.ping()),
		} {
			for how, deliver := range map[string]func(alone){
				"by itself":     func(a alone) { a.Deliver(packet) },
				"among others":  func(a alone) { a.Deliver(packet, packet, packet) },
				"as fragments":  func(a alone) { a.Deliver(f.parts(packet, 8)...) },
				"and too long":  func(a alone) { a.Deliver(append(append([]byte(nil), packet...), 0, 0)) },
				"and too short": func(a alone) { a.Deliver(packet[:len(packet)-1]) },
			} {
				t.Run(name+" "+what+" "+how, func(t *testing.T) {
					a := newAlone(t)
					var r taken
					a.SetDatagrams(&r)
					deliver(a)
					assert.Empty(t, r.what)
					assert.Zero(t, a.asked())
					a.silent()
					c := a.Counts()
					if name != "IPv6" || what != "a ping" || how != "as fragments" { // which the stack does not count
						assert.Positive(t, c.Damaged+c.Malformed)
					}
				})
			}
		}
	}
	t.Run("an IPv4 header", func(t *testing.T) {
		a := newAlone(t)
		p := families["IPv4"].syn()
		p[5] ^= 1
		a.Deliver(p)
		assert.Zero(t, a.asked())
		assert.Equal(t, uint64(1), a.Counts().Damaged)
	})
}

func TestADatagramNeedsNoChecksumOverIPv4(t *testing.T) {
	for name, f := range families {
		a := newAlone(t)
		var r taken
		a.SetDatagrams(&r)
		p := f.udp()
		binary.BigEndian.PutUint16(p[f.head+6:], 0)
		a.Deliver(p)
		assert.Len(t, r.what, map[string]int{"IPv4": 1, "IPv6": 0}[name], name)
	}
}

func TestFragmentsOfWhatIsWholeArePutTogether(t *testing.T) {
	for name, f := range families {
		t.Run(name, func(t *testing.T) {
			a := newAlone(t)
			var r taken
			a.SetDatagrams(&r)
			a.Deliver(f.parts(f.udp(), 8)...)
			a.Deliver(f.parts(f.ping(), 8)...)
			assert.Len(t, r.what, 2)
			options := make([]byte, 12)
			a.Deliver(f.parts(tcpPacket(f.client, f.server, header.TCPFlagSyn, 100, 0, options), 24)...)
			assert.Equal(t, 1, a.asked())
			conn, err := a.Accept()
			require.NoError(t, err)
			require.NoError(t, conn.Reset())
		})
	}
}

func TestADamagedSegmentIsNotMergedWithOthers(t *testing.T) {
	for name, f := range families {
		t.Run(name, func(t *testing.T) {
			const size = 100
			a := newAlone(t)
			conn, answer := a.admit(f.client, f.server, nil)
			var together [][]byte
			for i := range uint32(3) {
				together = append(together, tcpPacket(f.client, f.server, header.TCPFlagAck, 101+i*size,
					answer.SequenceNumber()+1, nil, make([]byte, size)...))
			}
			together[1][len(together[1])-1] ^= 1
			a.Deliver(together...)
			for segment(a.next()).AckNumber() != 101+size {
			}
			n, err := conn.Read(make([]byte, 3*size))
			require.NoError(t, err)
			assert.Equal(t, size, n)
			assert.Equal(t, uint64(1), a.Counts().Damaged)
			require.NoError(t, conn.Reset())
		})
	}
}

func TestSegmentsWithSenselessFlagsAreDropped(t *testing.T) {
	const relevant = header.TCPFlagSyn | header.TCPFlagAck | header.TCPFlagFin | header.TCPFlagRst
	known := map[header.TCPFlags]bool{
		header.TCPFlagSyn: true, header.TCPFlagSyn | header.TCPFlagAck: true, header.TCPFlagAck: true,
		header.TCPFlagFin | header.TCPFlagAck: true, header.TCPFlagRst: true, header.TCPFlagRst | header.TCPFlagAck: true,
	}
	for name, f := range families {
		t.Run(name, func(t *testing.T) {
			a := newAlone(t)
			senseless := uint64(0)
			for flags := range header.TCPFlags(1 << 6) {
				f.client = netip.AddrPortFrom(f.client.Addr(), 5000+uint16(flags))
				before := a.asked()
				p := tcpPacket(f.client, f.server, flags, 100, 0, make([]byte, 4))
				a.Deliver(p)
				a.Deliver(f.parts(p, 8)...) // the flags are not even in the first of them
				if !known[flags&relevant] {
					senseless++
					a.silent()
				}
				a.wire.queue.dropAll()
				assert.Equal(t, flags&relevant == header.TCPFlagSyn, a.asked() > before, flags)
			}
			assert.Equal(t, senseless, a.Counts().Senseless)
		})
	}
}

func TestAPacketWhoseHopsHaveRunOutIsAnswered(t *testing.T) {
	gateway := map[string]netip.Addr{"IPv4": netip.MustParseAddr("10.9.0.1"), "IPv6": netip.MustParseAddr("fd00:9::1")}
	for name, f := range families {
		for _, known := range []bool{true, false} {
			t.Run(name, func(t *testing.T) {
				a := newAlone(t)
				var r taken
				a.SetDatagrams(&r)
				from := map[string]netip.Addr{"IPv4": routerIPv4, "IPv6": routerIPv6}[name]
				if known {
					from = gateway[name]
					a.SetGateway(func(netip.Addr) netip.Addr { return from })
					a.Deliver(f.withHops(udpPacket(f.client, netip.AddrPortFrom(from, 53), nil), 1))
					assert.Len(t, r.what, 1, "it has arrived")
					r.what = nil
					a.Deliver(f.withHops(udpPacket(f.client, netip.AddrPortFrom(from, 53), nil), 0))
					a.next()
				}
				before := a.Counts().Expired
				for _, packet := range [][]byte{f.syn(), f.udp(), f.ping()} {
					for _, hops := range []byte{1, 0} {
						p := f.withHops(packet, hops)
						a.Deliver(p)
						answer := a.next()
						var source, target netip.Addr
						if name == "IPv4" {
							source, target = addrPortOf(header.IPv4(answer).SourceAddress(),
								0).Addr(), addrPortOf(header.IPv4(answer).DestinationAddress(), 0).Addr()
							assert.Equal(t, []byte{11, 0}, answer[f.head:f.head+2])
						} else {
							source, target = addrPortOf(header.IPv6(answer).SourceAddress(),
								0).Addr(), addrPortOf(header.IPv6(answer).DestinationAddress(), 0).Addr()
							assert.Equal(t, []byte{3, 0}, answer[f.head:f.head+2])
						}
						assert.Equal(t, from, source)
						assert.Equal(t, f.client.Addr(), target)
						assert.Equal(t, p, answer[f.head+echoHeader:])
						_, v := inspectPacket(answer)
						assert.Equal(t, icmpError, v)
					}
				}
				assert.Empty(t, r.what)
				assert.Zero(t, a.asked())
				assert.Equal(t, before+6, a.Counts().Expired)

				group := map[string]netip.Addr{
					"IPv4": netip.MustParseAddr("224.0.0.251"),
					"IPv6": netip.MustParseAddr("ff02::fb"),
				}[name]
				a.Deliver(f.withHops(udpPacket(f.client, netip.AddrPortFrom(group, 5353), nil), 1))
				failure := icmpPacket(f.client.Addr(), f.server.Addr(),
					append([]byte{3, 0, 0, 0, 0, 0, 0, 0}, f.udp()...))
				a.Deliver(f.withHops(failure, 1))
				a.silent()

				const many = 1000
				for range many {
					a.Deliver(f.withHops(f.udp(), 1))
				}
				assert.Less(t, a.wire.queue.dropAll(), many, "there is a limit to answers")
			})
		}
	}
}

// hopsTaken notes the hop limits of what it takes.
type hopsTaken struct{ hops []uint8 }

func (h *hopsTaken) UDP(_, _ netip.AddrPort, hops uint8, _ []byte) { h.hops = append(h.hops, hops) }
func (h *hopsTaken) Echo(_, _ netip.Addr, hops uint8, _ []byte)    { h.hops = append(h.hops, hops) }

func (h *hopsTaken) EchoReply(_, _ netip.Addr, _ []byte) {}

func TestEachGatewayIsAHop(t *testing.T) {
	for name, f := range families {
		t.Run(name, func(t *testing.T) {
			a := newAlone(t)
			var h hopsTaken
			a.SetDatagrams(&h)
			a.Deliver(f.withHops(f.udp(), 2))
			a.Deliver(f.withHops(f.ping(), 255))
			assert.Equal(t, []uint8{1, 254}, h.hops)
			a.Deliver(f.withHops(f.syn(), 33))
			conn, err := a.Accept()
			require.NoError(t, err)
			assert.Equal(t, uint8(32), conn.Hops())
			require.NoError(t, conn.Reset())
			assert.Zero(t, a.asked(), "nothing is kept of a request that has ended")
		})
	}
}

func TestRequestsAreBoundedForEachPeer(t *testing.T) {
	s, err := New(Config{Clock: clock(), MTU: mtu, Handshakes: 6})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, s.Close()) })
	a, f := alone{s, t}, families["IPv4"]
	network, other := netip.MustParsePrefix("10.9.0.0/28"), netip.MustParseAddr("10.9.0.99")
	s.SetPeer(func(inner netip.Addr) string {
		if network.Contains(inner) {
			return "site"
		}
		return inner.String()
	})
	ask := func(from netip.Addr, port uint16) {
		f.client = netip.AddrPortFrom(from, port)
		a.Deliver(f.syn())
		a.Deliver(f.syn()) // again
	}
	from := network.Addr()
	for i := range uint16(5) {
		from = from.Next()
		ask(from, 5000+i)
	}
	assert.Equal(t, 3, a.asked(), "one peer has half, whatever its addresses")
	assert.Equal(t, uint64(4), a.Counts().Handshakes)
	ask(other, 5000)
	assert.Equal(t, 4, a.asked(), "there is room for another")
	conn, err := a.Accept()
	require.NoError(t, err)
	require.NoError(t, conn.Reset())
	assert.Equal(t, 3, a.asked())
	for range 3 {
		conn, err := a.Accept()
		require.NoError(t, err)
		require.NoError(t, conn.Reset())
	}
	assert.Zero(t, a.requests.places.Taken(), "nothing is kept of requests that have ended")
}
