package userspace

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/proxy/tunnel"
)

// fakeKernel stands in for the kernel's side of a socket.
type fakeKernel struct {
	mtu     int
	gone    bool // the source address has left the machine
	fails   error
	refuses error // of segments larger than the MTU
	packets [][]byte
	cut     int // packets that came several in a message
	asked   int // how often the route's MTU was asked for
}

// refusal returns why the kernel would not take a message.
func (k *fakeKernel) refusal(m ipv4.Message) error {
	segment, pinned := 0, false
	for left := m.OOB; len(left) > 0; {
		h, data, rest, err := unix.ParseOneSocketControlMessage(left)
		if err != nil {
			return unix.EINVAL
		}
		if h.Type == unix.UDP_SEGMENT {
			segment = int(binary.NativeEndian.Uint16(data))
		} else {
			pinned = true
		}
		left = rest
	}
	switch {
	case k.fails != nil:
		return k.fails
	case k.gone && pinned:
		return unix.EINVAL
	case segment > 0 && segment > k.mtu-ipv4Header-udpHeader:
		return k.refuses
	case segment == 0 && len(m.Buffers) > 1, len(bytes.Join(m.Buffers, nil)) > maxMessage:
		return unix.EMSGSIZE
	}
	for i, p := range m.Buffers {
		if segment > 0 && (len(p) > segment || len(p) < segment && i < len(m.Buffers)-1) {
			return unix.EBADMSG // it would be cut elsewhere
		}
	}
	return nil
}

func (k *fakeKernel) write(ms []ipv4.Message, _ int) (int, error) {
	for i, m := range ms {
		if err := k.refusal(m); err != nil {
			if i > 0 {
				return i, nil // as sendmmsg
			}
			return -1, err
		}
		for _, p := range m.Buffers {
			k.packets = append(k.packets, bytes.Clone(p))
		}
		if len(m.Buffers) > 1 {
			k.cut += len(m.Buffers)
		}
	}
	return len(ms), nil
}

func (k *fakeKernel) bind() *udpBind {
	return &udpBind{paths: newPaths(func(netip.Addr, netip.AddrPort) (int, error) {
		k.asked++
		return k.mtu, nil
	}, pathPeriod)}
}

var peerOutside = net.UDPAddr{IP: net.IPv4(198, 51, 100, 9).To4(), Port: 4000}

func packetsOf(sizes ...int) (packets [][]byte) {
	for i, n := range sizes {
		packets = append(packets, bytes.Repeat([]byte{4, byte(i)}, n)[:n])
	}
	return packets
}

// Whatever the sizes of packets, and whenever the path's MTU and the source address change, each
// packet leaves once and in its place.
func TestEveryPacketLeavesOverAnyPath(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		k := &fakeKernel{refuses: rapid.SampledFrom([]error{unix.EINVAL, unix.EMSGSIZE}).Draw(t, "refuses")}
		b, e, whole := k.bind(), newEndpoint(&peerOutside), new(atomic.Bool)
		e.source = netip.MustParseAddr("192.0.2.1")
		var want [][]byte
		for range rapid.IntRange(1, 8).Draw(t, "sends") {
			k.mtu = rapid.SampledFrom([]int{1280, 1400, 1500}).Draw(t, "mtu")
			k.gone = rapid.Bool().Draw(t, "gone")
			packets := packetsOf(rapid.SliceOfN(rapid.SampledFrom([]int{32, 148, 1232, 1360, 1452}), 1,
				conn.IdealBatchSize).Draw(t, "sizes")...)
			require.NoError(t, b.sendPackets(k.write, whole, packets, e))
			want = append(want, packets...)
		}
		require.Equal(t, want, k.packets)
		require.Zero(t, b.errors.errorCounts())
	})
}

func TestAPathsMTUIsRemembered(t *testing.T) {
	k := &fakeKernel{mtu: 1500, refuses: unix.EINVAL}
	b, e, whole := k.bind(), newEndpoint(&peerOutside), new(atomic.Bool)
	large, small := packetsOf(1452, 1452, 1452, 1452), packetsOf(1360, 1360, 1360)
	send := func(packets [][]byte) {
		t.Helper()
		k.cut = 0
		require.NoError(t, b.sendPackets(k.write, whole, packets, e))
	}
	send(large)
	assert.Equal(t, 4, k.cut, "the path carries them")
	k.mtu = 1400
	send(large)
	assert.Zero(t, k.cut, "the path is narrower")
	assert.Equal(t, 2, k.asked)
	send(large)
	assert.Equal(t, 2, k.asked, "the answer counts for a time")
	send(small)
	assert.Equal(t, 3, k.cut, "what fits leaves in one message")
	assert.Equal(t, 1328, b.paths.largestInner(e.to), "1400 - 20 - 8 - 32, in blocks of 16")
}

// Some networks refuse UDP_SEGMENT for a reason of their own (IPsec).
func TestARefusalThatIsNotTheMTUsEndsSegmentsToThatPeer(t *testing.T) {
	k := &fakeKernel{mtu: 1500, refuses: unix.EINVAL}
	b := k.bind()
	b.paths.readMTU = func(netip.Addr, netip.AddrPort) (int, error) { return 9000, nil }
	k.mtu = 1
	require.NoError(t, b.sendPackets(k.write, new(atomic.Bool), packetsOf(100, 100, 100), newEndpoint(&peerOutside)))
	assert.Len(t, k.packets, 3)
	assert.Zero(t, b.paths.largestPayload(newEndpoint(&peerOutside)))
}

func TestADeviceWithoutChecksumsEndsSegmentsOfTheSocket(t *testing.T) {
	k := &fakeKernel{mtu: 1, refuses: unix.EIO}
	b, whole := k.bind(), new(atomic.Bool)
	b.paths.readMTU = func(netip.Addr, netip.AddrPort) (int, error) { return 1500, nil }
	require.NoError(t, b.sendPackets(k.write, whole, packetsOf(100, 100, 100), newEndpoint(&peerOutside)))
	assert.Len(t, k.packets, 3)
	assert.True(t, whole.Load())
}

func TestWhatTheKernelDoesNotTakeIsCounted(t *testing.T) {
	for _, c := range []struct {
		err  error
		want tunnel.SendErrors
	}{
		{unix.EMSGSIZE, tunnel.SendErrors{TooLarge: 3}},
		{unix.ENETUNREACH, tunnel.SendErrors{Unreachable: 3}},
		{unix.EPERM, tunnel.SendErrors{Forbidden: 3}},
		{unix.ENOBUFS, tunnel.SendErrors{NoBuffer: 3}},
		{unix.EDOM, tunnel.SendErrors{Other: 3}},
	} {
		k := &fakeKernel{mtu: 1500, fails: c.err}
		b := k.bind()
		err := b.sendPackets(k.write, new(atomic.Bool), packetsOf(1452, 1452, 32), newEndpoint(&peerOutside))
		assert.ErrorIs(t, err, c.err)
		assert.Equal(t, c.want, b.errors.errorCounts(), "%v", c.err)
	}
}

// A cookie reply goes to whoever sends, under whatever address.
func TestAStrangerTakesNoPlaceAmongThePaths(t *testing.T) {
	k := &fakeKernel{mtu: 1500}
	b := k.bind()
	cookie := [][]byte{{cookieReply, 0, 0, 0}}
	require.NoError(t, b.sendPackets(k.write, new(atomic.Bool), cookie, newEndpoint(&peerOutside)))
	assert.Empty(t, b.paths.byEndpoint)
}

func TestPathsAreBounded(t *testing.T) {
	p := newPaths(func(netip.Addr, netip.AddrPort) (int, error) { return 1500, nil }, pathPeriod)
	for i := range maxPaths + 10 {
		p.largestPayload(newEndpoint(&net.UDPAddr{IP: net.IPv4(10, 0, byte(i>>8), byte(i)).To4(), Port: 1}))
	}
	assert.Len(t, p.byEndpoint, maxPaths)
}

// Two binds exchange packets over real sockets: each arrives as it was sent, and is answered from the
// address that it was sent to.
func TestABindsPacketsArrive(t *testing.T) {
	needNamespace(t)
	for _, to := range []netip.Addr{outside4, outside6} {
		near, far := newUDPBind(), newUDPBind()
		receive, port, err := far.Open(0)
		require.NoError(t, err)
		require.Len(t, receive, 2)
		_, _, err = near.Open(0)
		require.NoError(t, err)
		_, _, err = near.Open(0)
		require.ErrorIs(t, err, conn.ErrBindAlreadyOpen)
		e, err := near.ParseEndpoint(netip.AddrPortFrom(to, port).String())
		require.NoError(t, err)
		want := packetsOf(1452, 1452, 1452, 148, 32, 1452, 9000)
		require.NoError(t, near.Send(want, e))

		from := receive[0]
		if to.Is6() {
			from = receive[1]
		}
		var got [][]byte
		var at conn.Endpoint
		for len(got) < len(want) {
			bufs, sizes := makeBuffers(far.BatchSize(), largestPacket)
			ends := make([]conn.Endpoint, len(bufs))
			n, err := from(bufs, sizes, ends)
			require.NoError(t, err)
			for i := range n {
				got, at = append(got, bufs[i][:sizes[i]]), ends[i]
			}
		}
		assert.Equal(t, want, got)
		assert.Equal(t, to, at.SrcIP())
		assert.Equal(t, to, at.DstIP(), "the namespace's own address")
		require.NoError(t, far.Send(packetsOf(32), at))
		require.NoError(t, near.Close())
		require.NoError(t, far.Close())
		_, err = from(make([][]byte, 1), make([]int, 1), make([]conn.Endpoint, 1))
		require.ErrorIs(t, err, net.ErrClosed)
	}
}
