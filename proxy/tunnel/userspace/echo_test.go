package userspace

import (
	"bytes"
	"context"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// takePackets takes what has come into the tunnel so far: the number of datagrams, and the echo requests.
func (f *forwarder) takePackets(quiet time.Duration) (datagrams int, requests [][]byte) {
	b, sizes := [][]byte{make([]byte, 2*mtu)}, make([]int, 1)
	for {
		ctx, cancel := context.WithTimeout(f.t.Context(), quiet)
		n, err := f.stack.Collect(ctx, b, sizes, 0)
		cancel()
		if err != nil || n == 0 {
			return datagrams, requests
		}
		if p := header.IPv4(b[0][:sizes[0]]); p.Protocol() == protocolICMP {
			requests = append(requests, bytes.Clone(p))
		} else {
			datagrams++
		}
	}
}

// answerRequest has the peer answer an echo request. spoil changes the answer before it is sealed.
func (f *forwarder) answerRequest(request []byte, spoil func(header.IPv4)) {
	p := header.IPv4(bytes.Clone(request))
	from, to := p.SourceAddress(), p.DestinationAddress()
	p.SetSourceAddress(to)
	p.SetDestinationAddress(from)
	p[ipv4Header] = echoReply4
	spoil(p)
	p.SetChecksum(0)
	p.SetChecksum(^p.CalculateChecksum())
	icmp := header.ICMPv4(p[ipv4Header:])
	icmp.SetChecksum(0)
	icmp.SetChecksum(^checksum.Checksum(icmp, 0))
	f.stack.Deliver(p)
}

// flood opens a session of the peer at inner, and returns how to send it packets from outside.
func (f *forwarder) flood() (send func(n int), server netip.AddrPort) {
	out, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(outside4, 0)))
	require.NoError(f.t, err)
	f.t.Cleanup(func() { _ = out.Close() })
	server = out.LocalAddr().(*net.UDPAddr).AddrPort()
	f.UDP(netip.AddrPortFrom(inner, 5000), server, 63, []byte("go"))
	_, to, err := out.ReadFromUDPAddrPort(make([]byte, 10))
	require.NoError(f.t, err)
	return func(n int) {
		for range n {
			_, err := out.WriteToUDPAddrPort(make([]byte, benchPayload), to)
			require.NoError(f.t, err)
		}
	}, server
}

func TestAPeerThatAnswersPingsHasAWindowWithoutTCP(t *testing.T) {
	f := newForwarder(t, 1000)
	f.down = flow.Terms{Group: "phone", Algorithm: "static", Params: cc.Params{"cwnd_packets": 10}}
	send, server := f.flood()
	send(20)
	passed, requests := f.takePackets(now)
	assert.Equal(t, 20, passed, "nothing acknowledges them, so all pass")
	require.Len(t, requests, 1, "the peer is asked")
	assert.Equal(t, server.Addr().AsSlice(), header.IPv4(requests[0]).SourceAddressSlice(), "in the server's name")

	for name, spoil := range map[string]func(header.IPv4){
		"another content": func(p header.IPv4) { p[len(p)-1]++ },
		"another peer":    func(p header.IPv4) { p[15]++ },
	} {
		f.answerRequest(requests[0], spoil)
		assert.Equal(t, flow.ByTransport, f.peers[f.outside.Peer(inner)].window.Source(), name)
	}
	f.answerRequest(requests[0], func(header.IPv4) {})
	require.Equal(t, flow.ByEcho, f.peers[f.outside.Peer(inner)].window.Source())
	send(30)
	passed, requests = f.takePackets(now)
	assert.InDelta(t, 12, passed, 2, "15,000 bytes are its window")
	require.NotEmpty(t, requests)
	f.answerRequest(requests[len(requests)-1], func(header.IPv4) {})
	passed, _ = f.takePackets(now)
	assert.InDelta(t, 12, passed, 2, "the answer makes room for as much")
}

func TestDatagramsFollowTheTCPOfAPeerThatAnswersNoPing(t *testing.T) {
	f := newForwarder(t, 1000)
	f.down = flow.Terms{Group: "phone", Algorithm: "static", Params: cc.Params{"cwnd_packets": 10}}
	busy, err := f.flows.Open(f.with.Clock(), f.down, flow.Leg{})
	require.NoError(t, err)
	granted := busy.Take(f.with.Clock(), 1<<20).Bytes
	send, _ := f.flood()
	send(20)
	passed, _ := f.takePackets(now)
	assert.InDelta(t, 5, passed, 2, "half the window is theirs")
	granted += busy.Take(f.with.Clock(), 1<<20).Bytes
	arrive := func() {
		busy.Report(flow.Report{At: f.with.Clock(), Written: granted, Acked: granted, MSS: cc.DefaultMSS})
		granted += busy.Take(f.with.Clock(), 1<<20).Bytes
	}
	arrive() // what had left before them
	arrive()
	passed, _ = f.takePackets(now)
	assert.InDelta(t, 4, passed, 3, "they arrive with what left after them, and are paced")
	busy.Close(f.with.Clock())
	passed, _ = f.takePackets(time.Second)
	assert.InDelta(t, 10, passed, 4, "the window is theirs")
}
