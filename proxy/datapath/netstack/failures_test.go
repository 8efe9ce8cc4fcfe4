package netstack

import (
	"encoding/binary"
	"io"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// tooBig says of a packet that only those of mtu bytes get through.
func (f family) tooBig(from netip.Addr, about []byte, mtu int) []byte {
	message := make([]byte, echoHeader, echoHeader+len(about))
	if f.client.Addr().Is6() {
		message[0] = uint8(header.ICMPv6PacketTooBig)
	} else {
		message[0], message[1] = uint8(header.ICMPv4DstUnreachable), uint8(header.ICMPv4FragmentationNeeded)
	}
	binary.BigEndian.PutUint32(message[4:], uint32(mtu))
	return icmpPacket(from, f.server.Addr(), append(message, about...))
}

func TestSegmentsAreCutSmallerOnlyForAnErrorAboutThem(t *testing.T) {
	for name, f := range families {
		t.Run(name, func(t *testing.T) {
			a := newAlone(t)
			conn, answer := a.admit(f.client, f.server, []byte{2, 4, 5, 80})
			_, err := conn.Write(make([]byte, 2000))
			require.NoError(t, err)
			first, whole := a.next(), conn.mostBytes(t)
			require.Greater(t, whole+f.head+header.TCPMinimumSize, MinMTU)
			about := func(client, server netip.AddrPort, seq uint32) []byte {
				return tcpPacket(server, client, header.TCPFlagAck, seq, 101, nil, make([]byte, 8)...)
			}
			seq := answer.SequenceNumber() + 1
			other := netip.AddrPortFrom(f.client.Addr(), f.client.Port()+1)
			for what, p := range map[string][]byte{
				"less than any path carries":  f.tooBig(f.client.Addr(), first, minBelievedMTU-1),
				"nothing at all gets through": f.tooBig(f.client.Addr(), first, 0),
				"not sent yet":                f.tooBig(f.client.Addr(), about(f.client, f.server, seq+3000), MinMTU),
				"of long ago":                 f.tooBig(f.client.Addr(), about(f.client, f.server, seq-3000), MinMTU),
				"another connection":          f.tooBig(f.client.Addr(), about(other, f.server, seq), MinMTU),
				"too short to tell":           f.tooBig(f.client.Addr(), first[:f.head+4], MinMTU),
			} {
				a.Deliver(p)
				a.Deliver(f.parts(p, 8)...)
				if f.client.Addr().Is6() {
					a.Deliver(behind(p, 253, []byte{58, 0, 0, 0, 0, 0, 0, 0}),
						behind(p, 44, []byte{60, 0, 0, 0, 0, 0, 0, 7, 58, 0, 1, 4, 0, 0, 0, 0}))
				}
				require.Equal(t, whole, conn.mostBytes(t), what)
			}
			a.Deliver(f.tooBig(f.client.Addr(), first, MinMTU))
			assert.Equal(t, MinMTU-f.head-header.TCPMinimumSize, conn.mostBytes(t))
		})
	}
}

// behind puts headers between that of an IPv6 packet and its payload, the first of them of a type.
func behind(p []byte, first uint8, headers []byte) []byte {
	q := slices.Concat(p[:header.IPv6MinimumSize], headers, p[header.IPv6MinimumSize:])
	q[6] = first
	header.IPv6(q).SetPayloadLength(uint16(len(q) - header.IPv6MinimumSize))
	return q
}

// The stack keeps what an ICMP error says of a connection that goes on all the same.
func TestAnErrorThatPassedIsNoReset(t *testing.T) {
	for name, f := range families {
		t.Run(name, func(t *testing.T) {
			a := newAlone(t)
			conn, answer := a.admit(f.client, f.server, nil)
			_, err := conn.Write([]byte("hello"))
			require.NoError(t, err)
			message := []byte{uint8(header.ICMPv4DstUnreachable), uint8(header.ICMPv4HostUnreachable), 0, 0, 0, 0, 0, 0}
			if f.client.Addr().Is6() {
				message[0], message[1] = uint8(header.ICMPv6DstUnreachable), uint8(header.ICMPv6AddressUnreachable)
			}
			a.Deliver(icmpPacket(f.client.Addr(), f.server.Addr(), append(message, a.next()...)))
			ends := answer.SequenceNumber() + 1 + 5
			a.Deliver(tcpPacket(f.client, f.server, header.TCPFlagFin|header.TCPFlagAck, 101, ends, nil))
			_, err = conn.Read(make([]byte, 1))
			require.ErrorIs(t, err, io.EOF)
			require.NoError(t, conn.CloseWrite())
			a.Deliver(tcpPacket(f.client, f.server, header.TCPFlagAck, 102, ends+1, nil))
			require.Eventually(t, conn.hasEnded, time.Minute, time.Millisecond)
			assert.False(t, conn.Aborted())
		})
	}
}

// mostBytes is what a segment has at most.
func (c *Conn) mostBytes(t *testing.T) int {
	e := c.tcpEndpoint()
	e.LockUser()
	defer e.UnlockUser()
	snd, ok := senderOf(e)
	require.True(t, ok)
	return snd.MaxPayloadSize
}
