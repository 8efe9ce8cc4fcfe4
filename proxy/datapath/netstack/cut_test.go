package netstack

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"pgregory.net/rapid"
)

// sums checks a packet's checksums, and returns its segment.
func sums(t require.TestingT, p []byte) header.TCP {
	var from, to tcpip.Address
	if p[0]>>4 == 4 {
		ip := header.IPv4(p)
		require.True(t, ip.IsChecksumValid())
		require.Len(t, p, int(ip.TotalLength()))
		from, to = ip.SourceAddress(), ip.DestinationAddress()
	} else {
		ip := header.IPv6(p)
		require.Len(t, p[header.IPv6MinimumSize:], int(ip.PayloadLength()))
		from, to = ip.SourceAddress(), ip.DestinationAddress()
	}
	tcp := segment(p)
	sum := header.PseudoHeaderChecksum(header.TCPProtocolNumber, from, to, uint16(len(tcp)))
	require.EqualValues(t, 0xffff, checksum.Checksum(tcp, sum))
	return tcp
}

// What the stack sends as one leaves as segments that each stand by themselves, in
// however many pieces they are collected, without those that need not leave.
func TestWhatIsSentAsOneLeavesAsSegments(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		from, to := netip.MustParseAddrPort("10.9.0.2:1000"), netip.MustParseAddrPort("203.0.113.7:443")
		gso := stack.GSO{Type: stack.GSOTCPv4, NeedsCsum: true}
		if rapid.Bool().Draw(t, "six") {
			from, to = netip.MustParseAddrPort("[fd00::2]:1000"), netip.MustParseAddrPort("[2001:db8::7]:443")
			gso.Type = stack.GSOTCPv6
		}
		mss := rapid.IntRange(1, 1400).Draw(t, "mss")
		gso.MSS = uint16(mss)
		payload := rapid.SliceOfN(rapid.Byte(), 0, 12*mss).Draw(t, "payload")
		whole := tcpPacket(from, to, header.TCPFlagAck|header.TCPFlagPsh, 77, 5, nil)
		head := len(whole)
		parts := buffer.MakeWithData(whole)
		for rest := payload; len(rest) > 0; { // however it lies in memory
			n := rapid.IntRange(1, len(rest)).Draw(t, "part")
			require.NoError(t, parts.Append(buffer.NewViewWithData(rest[:n])))
			rest = rest[n:]
		}
		pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: parts})
		defer pkt.DecRef()
		_, ok := pkt.NetworkHeader().Consume(head - header.TCPMinimumSize)
		require.True(t, ok)
		_, ok = pkt.TransportHeader().Consume(header.TCPMinimumSize)
		require.True(t, ok)
		pkt.GSOOptions = gso
		count := max(1, (len(payload)+mss-1)/mss)
		omit := rapid.SliceOfN(rapid.Bool(), count, count).Draw(t, "omit")

		const offset = 3
		for next := 0; next < count; {
			o := segmentRange{pkt: pkt, next: next, end: rapid.IntRange(next+1, count).Draw(t, "end"), omit: omit}
			bufs, sizes := make([][]byte, count), make([]int, count)
			for i := range bufs {
				bufs[i] = make([]byte, 2000)
			}
			n := o.copySegments(bufs, sizes, offset)
			k := 0
			for i := next; i < o.end; i++ {
				if omit[i] {
					continue
				}
				tcp := sums(t, bufs[k][offset:offset+sizes[k]])
				want := payload[min(len(payload), i*mss):min(len(payload), (i+1)*mss)]
				require.True(t, bytes.Equal(want, tcp.Payload()))
				require.EqualValues(t, 77+i*mss, tcp.SequenceNumber())
				require.EqualValues(t, 5, tcp.AckNumber())
				require.Equal(t, i == count-1, tcp.Flags().Contains(header.TCPFlagPsh))
				k++
			}
			require.Equal(t, k, n)
			next = o.end
		}
	})
}

// The queue is bounded by the packets that leave, not by those that the stack has sent as one;
// what is collected in parts leaves once, in order.
func TestTheQueueCountsSegments(t *testing.T) {
	const segments = 100
	a := newAlone(t)
	put := 0
	for ; put*segments < queuePackets; put++ {
		pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Mark: uint32(put)})
		_, over := a.wire.queue.enqueue(segmentRange{pkt: pkt, end: segments})
		require.False(t, over)
		pkt.DecRef()
	}
	require.EqualValues(t, put*segments-queuePackets, a.wire.drops.Load())
	next := 0
	var pieces [3]segmentRange
	for !a.wire.isEmpty() {
		n := a.wire.queue.dequeue(pieces[:], 64)
		require.Positive(t, n)
		for _, o := range pieces[:n] {
			require.Equal(t, next, int(o.pkt.Mark)*segments+o.next)
			next += o.end - o.next
			o.pkt.DecRef()
		}
	}
	require.Equal(t, queuePackets, next)
}
