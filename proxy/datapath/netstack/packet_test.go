package netstack

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

var (
	client6 = netip.MustParseAddr("fd00:9::2")
	server6 = netip.MustParseAddrPort("[2001:db8::7]:443")
)

// ipPacket wraps a transport segment, of which it sets the checksum at sumAt.
func ipPacket(from, to netip.Addr, protocol tcpip.TransportProtocolNumber, segment []byte, sumAt int) []byte {
	source, target := tcpip.AddrFromSlice(from.AsSlice()), tcpip.AddrFromSlice(to.AsSlice())
	var sum uint16
	if protocol != icmp.ProtocolNumber4 {
		sum = header.PseudoHeaderChecksum(protocol, source, target, uint16(len(segment)))
	}
	binary.BigEndian.PutUint16(segment[sumAt:], 0)
	binary.BigEndian.PutUint16(segment[sumAt:], ^checksum.Checksum(segment, sum))
	if to.Is6() {
		p := make([]byte, header.IPv6MinimumSize)
		header.IPv6(p).Encode(&header.IPv6Fields{
			PayloadLength: uint16(len(segment)), TransportProtocol: protocol, HopLimit: 64, SrcAddr: source, DstAddr: target,
		})
		return append(p, segment...)
	}
	p := make([]byte, header.IPv4MinimumSize)
	header.IPv4(p).Encode(&header.IPv4Fields{
		TotalLength: uint16(len(p) + len(segment)), TTL: 64, Protocol: uint8(protocol), SrcAddr: source, DstAddr: target,
	})
	header.IPv4(p).SetChecksum(^header.IPv4(p).CalculateChecksum())
	return append(p, segment...)
}

func tcpPacket(from, to netip.AddrPort, flags header.TCPFlags, seq, ack uint32, options []byte,
	payload ...byte,
) []byte {
	head := header.TCPMinimumSize + len(options)
	b := append(append(make([]byte, header.TCPMinimumSize), options...), payload...)
	header.TCP(b).Encode(&header.TCPFields{
		SrcPort: from.Port(), DstPort: to.Port(), SeqNum: seq, AckNum: ack, Flags: flags, WindowSize: 65535, DataOffset: uint8(head),
	})
	return ipPacket(from.Addr(), to.Addr(), tcp.ProtocolNumber, b, header.TCPChecksumOffset)
}

func udpPacket(from, to netip.AddrPort, payload []byte) []byte {
	b := append(make([]byte, header.UDPMinimumSize), payload...)
	header.UDP(b).Encode(&header.UDPFields{SrcPort: from.Port(), DstPort: to.Port(), Length: uint16(len(b))})
	return ipPacket(from.Addr(), to.Addr(), udp.ProtocolNumber, b, 6)
}

func icmpPacket(from, to netip.Addr, message []byte) []byte {
	if to.Is6() {
		return ipPacket(from, to, icmp.ProtocolNumber6, message, 2)
	}
	return ipPacket(from, to, icmp.ProtocolNumber4, message, 2)
}

// alone is a stack whose other end is the test.
type alone struct {
	*Stack
	t testing.TB
}

func newAlone(t testing.TB) alone {
	s, err := New(Config{Clock: clock(), MTU: mtu})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, s.Close()) })
	return alone{s, t}
}

// next is the next packet that the stack sends.
func (a alone) next() []byte {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	bufs, sizes := [][]byte{make([]byte, 1<<16)}, make([]int, 1)
	_, err := a.Collect(ctx, bufs, sizes, 0)
	require.NoError(a.t, err)
	return bufs[0][:sizes[0]]
}

// silent checks that the stack has sent nothing.
func (a alone) silent() {
	a.t.Helper()
	assert.Zero(a.t, a.wire.queue.dropAll())
}

// admit opens a connection, whose first byte is number 101, and returns the answer
// to its SYN.
func (a alone) admit(from, to netip.AddrPort, options []byte) (*Conn, header.TCP) {
	a.Deliver(tcpPacket(from, to, header.TCPFlagSyn, 100, 0, options))
	conn, err := a.Accept()
	require.NoError(a.t, err)
	admitted := make(chan error, 1)
	go func() { admitted <- conn.Admit(context.Background()) }()
	answer := segment(a.next())
	require.Equal(a.t, header.TCPFlagSyn|header.TCPFlagAck, answer.Flags())
	var stamped []byte
	if at := timestampIndex(answer); at >= 0 {
		stamped = append([]byte{1, 1}, stamps(0, binary.BigEndian.Uint32(answer[at:]))...)
	}
	a.Deliver(tcpPacket(from, to, header.TCPFlagAck, 101, answer.SequenceNumber()+1, stamped))
	require.NoError(a.t, <-admitted)
	return conn, answer
}

// A client that does not complete its handshake would be waited for until the stack gives up, two
// minutes later.
func TestAConnectionThatIsClosedWaitsForNoHandshake(t *testing.T) {
	for name, end := range map[string]func(*Conn) error{"closed": (*Conn).Close, "reset": (*Conn).Reset} {
		for _, answered := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, answered: %v", name, answered), func(t *testing.T) {
				a := newAlone(t)
				a.Deliver(tcpPacket(netip.AddrPortFrom(client, 40000), server, header.TCPFlagSyn, 100, 0, nil))
				conn, err := a.Accept()
				require.NoError(t, err)
				admitted := make(chan error, 1)
				go func() { admitted <- conn.Admit(context.Background()) }()
				if answered {
					a.next()
				}
				require.NoError(t, end(conn))
				select {
				case err := <-admitted:
					require.Error(t, err)
				case <-time.After(time.Minute):
					require.Fail(t, "it waits")
				}
				assert.Empty(t, a.conns.allConns())
			})
		}
	}
}

// segment is the TCP segment in a packet.
func segment(p []byte) header.TCP {
	if p[0]>>4 == 6 {
		return header.TCP(p[header.IPv6MinimumSize:])
	}
	return header.TCP(p[header.IPv4(p).HeaderLength():])
}

func TestSegmentsFitTheTunnelAndThePathBehindIt(t *testing.T) {
	for _, c := range []struct {
		name         string
		from         netip.Addr
		to           netip.AddrPort
		headers      int
		less         int // MTU of the path
		errorType    byte
		errorCode    byte
		peersMSS     uint16
		beforeAtMost int
	}{
		{"IPv4", client, server, 40, 1000, 3, 4, 1460, mtu - 40},
		{"IPv6", client6, server6, 60, 1300, 2, 0, 1440, mtu - 60},
		{"a peer with less", client, server, 40, 600, 3, 4, 900, 900},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := newAlone(t)
			from := netip.AddrPortFrom(c.from, 40000)
			conn, answer := a.admit(from, c.to, []byte{2, 4, byte(c.peersMSS >> 8), byte(c.peersMSS)})
			assert.Equal(t, uint16(mtu-c.headers), header.ParseSynOptions(answer.Options(), true).MSS)
			seq := answer.SequenceNumber()

			_, err := conn.Write(make([]byte, 8000))
			require.NoError(t, err)
			first := a.next()
			assert.Len(t, segment(first).Payload(), c.beforeAtMost)
			for sent := len(segment(first).Payload()); sent < 8000; {
				p := a.next()
				assert.LessOrEqual(t, len(segment(p).Payload()), c.beforeAtMost)
				sent += len(segment(p).Payload())
			}

			tooBig := make([]byte, echoHeader)
			tooBig[0], tooBig[1] = c.errorType, c.errorCode
			binary.BigEndian.PutUint32(tooBig[4:], uint32(c.less)) // IPv4 has it in the lower half
			a.Deliver(icmpPacket(c.from, c.to.Addr(), append(tooBig, first[:min(len(first), 200)]...)))
			again := segment(a.next())
			assert.Equal(t, seq+1, again.SequenceNumber(), "what was too big is sent again")
			assert.Equal(t, c.less-c.headers, len(again.Payload()))
			require.NoError(t, conn.Reset())
		})
	}
}

// The ports are such that what merges them has the connections in one list.
func TestSegmentsThatComeTogetherGoThroughTheStackAsOne(t *testing.T) {
	const each, size, tail = 9, 1000, 10
	for _, c := range []struct {
		name string
		from netip.Addr
		to   netip.AddrPort
	}{{"IPv4", client, server}, {"IPv6", client6, server6}} {
		t.Run(c.name, func(t *testing.T) {
			a := newAlone(t)
			var conns []*Conn
			var together [][]byte
			want := bytes.Repeat([]byte("0123456789"), each*size/10)
			for i := range 3 {
				from := netip.AddrPortFrom(c.from, 40000+8*uint16(i))
				conn, answer := a.admit(from, c.to, nil)
				conns = append(conns, conn)
				for at := 0; at < len(want); at += size {
					p := tcpPacket(from, c.to, header.TCPFlagAck, 101+uint32(at), answer.SequenceNumber()+1, nil,
						want[at:at+size]...)
					if at == 0 { // longer than it says: the rest is nobody's
						p = append(p, make([]byte, tail)...)
					}
					together = append(together, p)
				}
			}
			before := a.net.Stats().TCP.ValidSegmentsReceived.Value()
			a.Deliver(together...)
			for _, conn := range conns {
				got := make([]byte, len(want))
				_, err := io.ReadFull(conn, got)
				require.NoError(t, err)
				assert.Equal(t, want, got)
			}
			assert.Equal(t, uint64(len(conns)), a.net.Stats().TCP.ValidSegmentsReceived.Value()-before)
			for _, conn := range conns {
				require.NoError(t, conn.Reset())
			}
		})
	}
}

func TestTheStackAnswersNoEchoItself(t *testing.T) {
	a := newAlone(t)
	a.Deliver(icmpPacket(client, server.Addr(), []byte{8, 0, 0, 0, 0, 1, 0, 1}))
	a.Deliver(icmpPacket(client6, server6.Addr(), []byte{128, 0, 0, 0, 0, 1, 0, 1}))
	a.silent()
}

// taken records what a stack hands over.
type taken struct{ what, replies []string }

func (r *taken) UDP(source, target netip.AddrPort, _ uint8, payload []byte) {
	r.what = append(r.what, source.String()+" "+target.String()+" "+string(payload))
}

func (r *taken) Echo(source, target netip.Addr, _ uint8, message []byte) {
	r.what = append(r.what, source.String()+" "+target.String()+" "+string(message[echoHeader:]))
}

func (r *taken) EchoReply(source, target netip.Addr, message []byte) {
	r.replies = append(r.replies, source.String()+" "+target.String()+" "+string(message[echoHeader:]))
}

func TestDatagramsAreHandedOverWholeAndOnceOnly(t *testing.T) {
	a := newAlone(t)
	var r taken
	a.SetDatagrams(&r)
	a.Deliver(udpPacket(netip.AddrPortFrom(client, 5000), server, []byte("four")))
	a.Deliver(udpPacket(netip.AddrPortFrom(client6, 5000), server6, []byte("six")))
	a.Deliver(icmpPacket(client, server.Addr(), append([]byte{8, 0, 0, 0, 0, 1, 0, 1}, "echo"...)))
	a.Deliver(icmpPacket(client, server.Addr(), append([]byte{0, 0, 0, 0, 0, 1, 0, 1}, "reply"...)))
	broken := udpPacket(netip.AddrPortFrom(client, 5000), server, []byte("broken"))
	broken[25]++ // its length is more than there is
	a.Deliver(broken)
	mapped := netip.AddrFrom16(netip.MustParseAddr("::ffff:127.0.0.1").As16())
	disguised := udpPacket(netip.AddrPortFrom(client6, 5000), server6, []byte("disguised"))
	copy(disguised[24:], mapped.AsSlice())
	a.Deliver(disguised)

	whole := udpPacket(netip.AddrPortFrom(client, 5000), server, bytes.Repeat([]byte("x"), 1000))
	for _, part := range [][2]int{{0, 504}, {504, 1008}} {
		p := append(append([]byte(nil), whole[:20]...), whole[20+part[0]:20+part[1]]...)
		ip := header.IPv4(p)
		flags := uint8(header.IPv4FlagMoreFragments)
		if part[1] == 1008 {
			flags = 0
		}
		ip.SetTotalLength(uint16(len(p)))
		ip.SetFlagsFragmentOffset(flags, uint16(part[0]))
		ip.SetID(7)
		ip.SetChecksum(0)
		ip.SetChecksum(^ip.CalculateChecksum())
		a.Deliver(p)
	}
	assert.Equal(t, []string{
		"10.9.0.2:5000 203.0.113.7:443 four",
		"[fd00:9::2]:5000 [2001:db8::7]:443 six",
		"10.9.0.2 203.0.113.7 echo",
		"10.9.0.2:5000 203.0.113.7:443 " + string(bytes.Repeat([]byte("x"), 1000)),
	}, r.what)
	assert.Equal(t, []string{"10.9.0.2 203.0.113.7 reply"}, r.replies)
}

func TestWhatIsSentIntoTheTunnelFitsAndIsValid(t *testing.T) {
	a := newAlone(t)
	for _, c := range []struct {
		source, target netip.AddrPort
		size, packets  int
	}{
		{server, netip.AddrPortFrom(client, 5000), 1200, 1},
		{server, netip.AddrPortFrom(client, 5000), 5000, 4},
		{server6, netip.AddrPortFrom(client6, 5000), 1200, 1},
		{server6, netip.AddrPortFrom(client6, 5000), 5000, 4},
	} {
		require.NoError(t, a.SendUDP(c.source, c.target, make([]byte, c.size)))
		for range c.packets {
			assert.LessOrEqual(t, len(a.next()), mtu)
		}
		a.silent()
	}
	require.NoError(t, a.SendICMP(server.Addr(), client, []byte{0, 0, 0, 0, 0, 1, 0, 1, 'x'}))
	assert.Equal(t, uint16(0xffff), checksum.Checksum(a.next()[header.IPv4MinimumSize:], 0))
	assert.Error(t, a.SendICMP(server.Addr(), client, nil))
}

func TestAnErrorFromOutsideQuotesWhatItIsAbout(t *testing.T) {
	a := newAlone(t)
	from, router := netip.AddrPortFrom(client, 5000), netip.MustParseAddr("198.51.100.1")
	told, err := a.SendUnreachable(Unreachable{
		Type: 3, Code: 4, MTU: 1280, From: router, Source: from,
		Target: server, Length: 1300,
	})
	require.NoError(t, err)
	assert.True(t, told)
	p := a.next()
	ip := header.IPv4(p)
	assert.Equal(t, router.String(), ip.SourceAddress().String())
	message := header.ICMPv4(ip.Payload())
	assert.Equal(t, header.ICMPv4DstUnreachable, message.Type())
	assert.Equal(t, uint16(1280), message.MTU())
	quoted := header.IPv4(message.Payload())
	assert.Equal(t, "10.9.0.2", quoted.SourceAddress().String())
	assert.Equal(t, uint16(1328), quoted.TotalLength())
	assert.Equal(t, uint16(5000), header.UDP(quoted[quoted.HeaderLength():]).SourcePort())

	told, err = a.SendUnreachable(Unreachable{
		Type: 2, MTU: 1280, Source: netip.AddrPortFrom(client6, 77),
		Target: server6, Echo: true, Sequence: 3,
	})
	require.NoError(t, err)
	assert.True(t, told)
	p = a.next()
	assert.Equal(t, server6.Addr().String(), header.IPv6(p).SourceAddress().String(), "who is unknown is the target")
	inner := p[header.IPv6MinimumSize+echoHeader+header.IPv6MinimumSize:]
	assert.Equal(t, []byte{128, 0, 0, 0, 0, 77, 0, 3}, inner)
}

// FuzzDeliver looks for packets that the stack, or what is around it, does not survive.
func FuzzDeliver(f *testing.F) {
	from, from6 := netip.AddrPortFrom(client, 5000), netip.AddrPortFrom(client6, 5000)
	for _, p := range [][]byte{
		tcpPacket(from, server, header.TCPFlagSyn, 1, 0,
			[]byte{2, 4, 5, 180, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, 7}),
		tcpPacket(from, server, header.TCPFlagAck, 2, 1, nil), tcpPacket(from, server, header.TCPFlagRst, 2, 1, nil),
		tcpPacket(from6, server6, header.TCPFlagSyn, 1, 0, []byte{2, 4, 5, 160}),
		udpPacket(from, server, []byte("hello")), udpPacket(from6, server6, []byte("hello")),
		icmpPacket(client, server.Addr(), []byte{8, 0, 0, 0, 0, 1, 0, 1}), icmpPacket(client6, server6.Addr(),
			[]byte{128, 0, 0, 0, 0, 1, 0, 1}),
		icmpPacket(client, server.Addr(), append([]byte{3, 4, 0, 0, 0, 0, 2, 88},
			tcpPacket(server, from, header.TCPFlagAck, 1, 1, nil)...)),
		icmpPacket(client6, server6.Addr(), append([]byte{2, 0, 0, 0, 0, 0, 5, 0},
			tcpPacket(server6, from6, header.TCPFlagAck, 1, 1, nil)...)),
		{},
		{0x45},
		{0x60},
		{0},
	} {
		f.Add(p, p)
	}
	a := newAlone(f)
	var r taken
	a.SetDatagrams(&r)
	f.Fuzz(func(t *testing.T, one, two []byte) {
		a.Deliver(one, two)
		for ended := false; !ended; {
			select {
			case c := <-a.pending:
				require.NoError(t, c.Reset())
			default:
				ended = true
			}
		}
		a.wire.queue.dropAll()
		r.what, r.replies = r.what[:0], r.replies[:0]
	})
	assert.Empty(f, a.conns.allConns(), "connections that nobody has asked for any more")
}
