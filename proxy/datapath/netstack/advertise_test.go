package netstack

import (
	"encoding/binary"
	"io"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/penstock-net/penstock/cc"
)

// uploader is a client whose segments the test writes, at times of its own.
type uploader struct {
	alone
	now   *cc.Time
	conn  *Conn
	from  netip.AddrPort
	scale uint8  // of the stack's windows
	ack   uint32 // of what the stack sends
	sent  int
	echo  uint32 // the stack's newest timestamp
	edge  int    // up to which it has let the client send
}

// startUpload connects a client, with scaled windows and timestamps or not.
func startUpload(t *testing.T, scaled, stamped bool) *uploader {
	now := cc.Time(1e9)
	s, err := New(Config{Clock: func() cc.Time { return now }, MTU: mtu})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, s.Close()) })
	u := &uploader{alone: alone{s, t}, now: &now, from: netip.AddrPortFrom(client, 40000)}
	options := []byte{2, 4, 5, 100}
	if scaled {
		options = append(options, 1, 3, 3, 14)
	}
	if stamped {
		options = append(append(options, 1, 1), stamps(0, 0)...)
	}
	conn, answer := u.admit(u.from, server, options)
	u.conn, u.ack = conn, answer.SequenceNumber()+1
	if parsed := header.ParseSynOptions(answer.Options(), true); scaled {
		u.scale = uint8(parsed.WS)
	}
	u.edge = int(answer.WindowSize())
	return u
}

// stamps is the option of a timestamp and of the one that it echoes.
func stamps(value, echo uint32) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32([]byte{8, 10}, value), echo)
}

// send has the client send n bytes from an offset of its stream, and takes the answer in:
// its acknowledgement and what it lets the client send, as offsets of the stream.
func (u *uploader) send(at, n int, stamped bool) (acked, edge int) {
	var options []byte
	if stamped {
		options = append([]byte{1, 1}, stamps(uint32(*u.now/1e6), u.echo)...)
	}
	u.wire.queue.dropAll() // a reader makes room, which the stack tells
	u.Deliver(tcpPacket(u.from, server, header.TCPFlagAck, 101+uint32(at), u.ack, options, make([]byte, n)...))
	p := u.next()
	_, verdict := inspectPacket(p)
	require.Equal(u.t, valid, verdict, "its checksum is right")
	s := segment(p)
	if i := timestampIndex(s); i >= 0 {
		u.echo = binary.BigEndian.Uint32(s[i:])
	}
	acked = int(s.AckNumber() - 101)
	edge = acked + int(s.WindowSize())<<u.scale
	return acked, edge
}

// upload has the client send so many segments, which are read at once, and checks that
// nothing is taken back; it returns the window that is left.
func (u *uploader) upload(segments int) (window int) {
	const size = 1300
	for range segments {
		acked, edge := u.send(u.sent, size, true)
		_, err := io.ReadFull(u.conn, make([]byte, size))
		require.NoError(u.t, err)
		u.sent += size
		require.Equal(u.t, u.sent, acked)
		require.GreaterOrEqual(u.t, edge, u.edge, "what was advertised is not taken back")
		u.edge, window = edge, edge-acked
	}
	return window
}

func TestAnAdvertisedWindowIsBoundedAndNothingIsTakenBack(t *testing.T) {
	for name, scaled := range map[string]bool{"a window without a scale": false, "a window with a scale": true} {
		t.Run(name, func(t *testing.T) {
			u := startUpload(t, scaled, true)
			step := 1 << u.scale
			assert.Equal(t, scaled, step > 1)
			free := u.upload(20)
			require.Greater(t, free, 50000)
			_, err := u.conn.Arrivals()
			require.NoError(t, err)
			for _, window := range []int{20e3, 40e3, 6e3} {
				require.NoError(t, u.conn.Advertise(cc.Bytes(window)))
				got := u.upload(free/1300 + 100)
				assert.GreaterOrEqual(t, got, window)
				assert.Less(t, got, window+step)
				a, err := u.conn.Arrivals()
				require.NoError(t, err)
				assert.EqualValues(t, got, a.Window)
				assert.EqualValues(t, u.sent, a.Received)
			}
			require.NoError(t, u.conn.Advertise(1))
			assert.Less(t, u.upload(100), 2*1300+step, "two segments are the least")
			require.NoError(t, u.conn.Advertise(0))
			assert.GreaterOrEqual(t, u.upload(1), free)
		})
	}
}

// Segments overtake each other and get lost, and each takes a time that the test says.
func TestArrivalsTellRoundTripsAndHoles(t *testing.T) {
	u := startUpload(t, true, true)
	_, err := u.conn.Arrivals()
	require.NoError(t, err)
	u.upload(1)
	const ms = time.Millisecond
	for _, rtt := range []time.Duration{20 * ms, 31500 * time.Microsecond, time.Second, 3 * ms} {
		before := u.echo
		for u.echo == before { // the stack's timestamps are of real milliseconds
			u.upload(1)
		}
		*u.now = u.now.Add(rtt)
		u.upload(1)
		a, err := u.conn.Arrivals()
		require.NoError(t, err)
		assert.Equal(t, rtt, a.RTT)
		assert.Equal(t, uint32((*u.now-cc.Time(0))/1e6), a.Peer.Value)
		assert.Equal(t, *u.now, a.Peer.At)
		assert.EqualValues(t, 1300, a.MSS)
		assert.Zero(t, a.Holes)
	}
	for i, at := range []int{1, 2, 4, 0, 3} { // in segments
		acked, _ := u.send(u.sent+1300*at, 1300, true)
		a, err := u.conn.Arrivals()
		require.NoError(t, err)
		assert.EqualValues(t, acked, a.Received)
		assert.Equal(t, []int{1, 1, 2, 2, 2}[i], a.Holes, "after number %d", at)
	}
	_, err = io.ReadFull(u.conn, make([]byte, 5*1300))
	require.NoError(t, err)
}

func TestWithoutTimestampsNothingIsKnown(t *testing.T) {
	u := startUpload(t, true, false)
	_, err := u.conn.Arrivals()
	assert.ErrorIs(t, err, errNoTimestamps)
	assert.Zero(t, u.conns.counting.Load())
}

// A client that sends what it likes has no more of it kept than any other.
func TestWhatComesBeyondTheWindowIsBounded(t *testing.T) {
	u := startUpload(t, true, true)
	_, err := u.conn.Arrivals()
	require.NoError(t, err)
	require.NoError(t, u.conn.Advertise(20e3))
	for u.sent < maxBuffer {
		acked, _ := u.send(u.sent, 1300, true)
		if acked < u.sent+1300 {
			break
		}
		u.sent = acked
	}
	assert.Less(t, u.sent, maxBuffer/4, "nobody reads")
	assert.LessOrEqual(t, len(u.conn.incoming.stamps), maxStamps)
	require.NoError(t, u.conn.Advertise(0))
	_, err = io.ReadFull(u.conn, make([]byte, u.sent))
	require.NoError(t, err)
	u.upload(10)
}

func TestConnectionsThatEndAreLookedAtNoMore(t *testing.T) {
	u := startUpload(t, true, true)
	_, err := u.conn.Arrivals()
	require.NoError(t, err)
	assert.EqualValues(t, 1, u.conns.counting.Load())
	require.NoError(t, u.conn.Reset())
	assert.Zero(t, u.conns.counting.Load())
	_, err = u.conn.Arrivals()
	require.NoError(t, err)
	assert.Zero(t, u.conns.counting.Load())
}
