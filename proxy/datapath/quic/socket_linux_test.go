package quic

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/proxy/datapath/udpbatch"
)

// cutter stands in for the kernel: it cuts what it is given into packets.
type cutter struct {
	packets map[netip.AddrPort][][]byte
	calls   int
	fails   func(segment int, to netip.AddrPort) error

	mtu       int // bytes of the largest payload; 0: any
	fragment  bool
	fragments int // packets that left in fragments
}

func (c *cutter) write(b, oob []byte, to *net.UDPAddr) error {
	segment, rest := splitSegmentSize(oob, nil)
	if err := c.fails(segment, to.AddrPort()); err != nil {
		return err
	}
	c.calls++
	switch {
	case segment > 0 && c.mtu > 0 && segment > c.mtu:
		return unix.EINVAL
	case segment == 0 && c.mtu > 0 && len(b) > c.mtu && !c.fragment:
		return unix.EMSGSIZE
	case segment == 0 && c.mtu > 0 && len(b) > c.mtu:
		c.fragments++
	}
	if segment == 0 {
		segment = len(b)
	}
	for len(b) > 0 {
		n := min(segment, len(b))
		c.packets[to.AddrPort()] = append(c.packets[to.AddrPort()], append(bytes.Clone(b[:n]), rest...))
		b = b[n:]
	}
	return nil
}

func newCutter(t require.TestingT, fails func(int, netip.AddrPort) error) (*cutter, *Socket) {
	if fails == nil {
		fails = func(int, netip.AddrPort) error { return nil }
	}
	conn, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	c := &cutter{packets: map[netip.AddrPort][][]byte{}, fails: fails}
	w := newSocket(conn, c.write)
	w.fragment = func(allow bool) error { c.fragment = allow; return nil }
	return c, w
}

// mark is a control message of so many, as those for ECN are.
func mark(value byte) []byte {
	b := udpbatch.AppendSegmentSize(nil, int(value)) // of the same shape
	b[8], b[12] = unix.IPPROTO_IP, unix.IP_TOS
	return b
}

// What is written to an address leaves as the same packets, in their order, with what
// was to be told of them: whatever their sizes, however they are written, and whether
// or not the kernel cuts packets.
func TestBatchesLeaveThePacketsAsTheyAre(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var fails func(int, netip.AddrPort) error
		if rapid.Bool().Draw(t, "whole") {
			fails = func(segment int, _ netip.AddrPort) error {
				if segment > 0 {
					return unix.EIO
				}
				return nil
			}
		}
		c, w := newCutter(t, fails)
		want := map[netip.AddrPort][][]byte{}
		next := byte(0)
		for range rapid.IntRange(1, 60).Draw(t, "writes") {
			to := &net.UDPAddr{IP: net.IPv4(192, 0, 2, 1).To4(), Port: rapid.IntRange(1, 2).Draw(t, "port")}
			size := rapid.SampledFrom([]int{40, 1280, 1452}).Draw(t, "size")
			segments, last := 1, size
			told := mark(rapid.SampledFrom([]byte{2, 2, 2, 3}).Draw(t, "mark"))
			oob := told
			if rapid.Bool().Draw(t, "sized") {
				segments = rapid.IntRange(1, 14).Draw(t, "segments")
				last = rapid.IntRange(1, size).Draw(t, "last")
				oob = udpbatch.AppendSegmentSize(bytes.Clone(told), size)
			}
			var b []byte
			for i := range segments {
				n := size
				if i == segments-1 {
					n = last
				}
				p := bytes.Repeat([]byte{next}, n)
				next++
				b = append(b, p...)
				want[to.AddrPort()] = append(want[to.AddrPort()], append(p, told...))
			}
			n, _, err := w.WriteMsgUDP(b, oob, to)
			require.NoError(t, err)
			require.Len(t, b, n)
		}
		require.NoError(t, w.Close())
		require.Equal(t, want, c.packets)
	})
}

// While the kernel is busy, packets of one size become one batch.
func TestPacketsLeaveTogether(t *testing.T) {
	begun, goOn := make(chan bool), make(chan bool)
	first := true
	c, w := newCutter(t, func(int, netip.AddrPort) error {
		if first {
			first = false
			close(begun)
			<-goOn
		}
		return nil
	})
	to := &net.UDPAddr{IP: net.IPv4(192, 0, 2, 1).To4(), Port: 1}
	write := func(size int) {
		_, _, err := w.WriteMsgUDP(make([]byte, size), nil, to)
		require.NoError(t, err)
	}
	write(1300)
	<-begun
	for range 10 {
		write(1300)
	}
	write(100) // ends a batch
	for range maxSegments {
		write(1300)
	}
	close(goOn)
	require.NoError(t, w.Close())
	assert.Len(t, c.packets[to.AddrPort()], 12+maxSegments)
	assert.Equal(t, 3, c.calls)
	_, _, err := w.WriteMsgUDP(nil, nil, to)
	assert.ErrorIs(t, err, net.ErrClosed)
}

// What joins a batch allocates nothing: quic-go writes each packet around a tunnel's by itself.
func TestPacketsJoinWithoutAllocations(t *testing.T) {
	begun, goOn := make(chan bool, 1), make(chan bool)
	_, w := newCutter(t, func(int, netip.AddrPort) error {
		begun <- true
		<-goOn
		return nil
	})
	to, oob := &net.UDPAddr{IP: net.IPv4(192, 0, 2, 1).To4(), Port: 1}, append(udpbatch.AppendSegmentSize(nil, 1452), mark(2)...)
	write := func() {
		_, _, err := w.WriteMsgUDP(make([]byte, 1300), oob, to)
		require.NoError(t, err)
	}
	write()
	<-begun
	write() // what others join
	assert.Zero(t, testing.AllocsPerRun(maxSegments/2, write))
	close(goOn)
	require.NoError(t, w.Close())
}

// An error is told to who writes to its address next; a probe that is too large is none.
func TestErrorsOfBatchesAreTold(t *testing.T) {
	refused := errors.New("refused")
	told := make(chan bool, 8)
	_, w := newCutter(t, func(_ int, to netip.AddrPort) error {
		defer func() { told <- true }()
		switch to.Port() {
		case 1:
			return refused
		case 2:
			return unix.EMSGSIZE
		}
		return nil
	})
	write := func(port int) error {
		_, _, err := w.WriteMsgUDP([]byte{1}, nil, &net.UDPAddr{IP: net.IPv4(192, 0, 2, 1).To4(), Port: port})
		return err
	}
	for _, port := range []int{1, 2, 3} {
		require.NoError(t, write(port))
		<-told
	}
	assert.NoError(t, write(2))
	<-told
	assert.NoError(t, write(3))
	<-told // that of 1 has been taken in
	assert.ErrorIs(t, write(1), refused)
	assert.NoError(t, write(1))
	require.NoError(t, w.Close())
}

// quic-go does not lower the size of its packets. What the path has carried leaves in fragments then; larger
// packets are probes, which fail as they should, and packets to others leave together.
func TestAPathThatBecomesNarrowStillCarries(t *testing.T) {
	c, w := newCutter(t, nil)
	near, far := netip.MustParseAddrPort("192.0.2.1:1"), netip.MustParseAddrPort("192.0.2.2:1")
	send := func(to netip.AddrPort, size, packets int) error {
		return w.sendBatch(&batch{to: to, addr: net.UDPAddrFromAddrPort(to), segment: size, data: make([]byte, packets*size)})
	}
	require.NoError(t, send(near, 1452, 3))
	c.mtu, c.packets = 1372, map[netip.AddrPort][][]byte{}
	require.NoError(t, send(near, 1452, 3))
	assert.Len(t, c.packets[near], 3)
	assert.Equal(t, 3, c.fragments)
	assert.False(t, c.fragment, "the next probe is to fail")
	require.NoError(t, send(near, 1452, 1))
	assert.Equal(t, 4, c.fragments)
	require.ErrorIs(t, send(near, 1492, 1), unix.EMSGSIZE)
	require.ErrorIs(t, send(far, 1452, 1), unix.EMSGSIZE, "a probe of another path")

	calls := c.calls
	require.NoError(t, send(far, 1300, 10))
	assert.Equal(t, 1, c.calls-calls)
	require.NoError(t, w.Close())
}
