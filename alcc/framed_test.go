//go:build linux

package alcc

import (
	"bytes"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/alcc/frame"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// bare returns our end of a framed connection, and the stream below the other.
func bare(t *testing.T) (*Conn, *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	raw, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	accepted, err := ln.Accept()
	require.NoError(t, err)
	ours, err := Wrap(accepted, Options{OwnAcks: true})
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = raw.Close()
		_ = ours.Close()
	})
	return ours, raw.(*net.TCPConn)
}

func TestWhatIsNoFramingEndsWithItsReason(t *testing.T) {
	hello := frame.AppendHello(nil, false)
	for name, c := range map[string]struct {
		sends []byte
		want  error
	}{
		"another protocol":        {[]byte("GET / HTTP/1.1\r\nHost: server.test\r\n\r\n"), frame.ErrNoHello},
		"another version":         {append(append(hello[:8:8], 9), hello[9:]...), frame.VersionError{Peer: 9}},
		"an end without a fin":    {frame.AppendData(hello[:len(hello):len(hello)], []byte("x")), io.ErrUnexpectedEOF},
		"an end within a record":  {append(hello[:len(hello):len(hello)], 1, 200), io.ErrUnexpectedEOF},
		"an end within the hello": {hello[:5], io.ErrUnexpectedEOF},
		"an acknowledgement of what was never sent": {
			frame.AppendAck(hello[:len(hello):len(hello)], frame.Acknowledgement{Offset: 1}), frame.ErrFormat,
		},
		"data after the end": {
			frame.AppendData(frame.AppendFin(hello[:len(hello):len(hello)]), []byte("x")), frame.ErrFormat,
		},
	} {
		t.Run(name, func(t *testing.T) {
			ours, raw := bare(t)
			_, err := raw.Write(c.sends)
			require.NoError(t, err)
			_ = raw.CloseWrite() // we may have closed it by now
			_, err = io.ReadAll(ours)
			if name == "data after the end" { // what was read before it is whole
				require.NoError(t, err)
				_, err = ours.Write(make([]byte, 1<<20))
			}
			require.ErrorIs(t, err, c.want)
			greeting := make([]byte, frame.HelloBytes)
			_, err = io.ReadFull(raw, greeting)
			require.NoError(t, err)
			assert.Equal(t, hello, greeting, "the peer learns our version")
		})
	}
}

// TestTwoEndsThatWriteAndDoNotReadGoOnLater fills both receivers, and then reads all.
func TestTwoEndsThatWriteAndDoNotReadGoOnLater(t *testing.T) {
	both := tier{ownAcks: true}
	ours, peer := both.connect(t, Options{})
	content := noise(20 << 20)
	var wg sync.WaitGroup
	for _, end := range []peerConn{ours, peer} {
		wg.Go(func() {
			_, err := end.Write(content)
			assert.NoError(t, err)
			assert.NoError(t, end.CloseWrite())
		})
	}
	state := func(c *Conn) (receivesNoMore, sendsNoMore bool) {
		f := c.leg.(*framed)
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.received.Full, f.out.length() == sendQueue
	}
	require.Eventually(t, func() bool {
		full, stuck := state(ours)
		otherFull, otherStuck := state(peer.(*Conn))
		return (full || otherFull) && stuck && otherStuck
	}, 20*time.Second, time.Millisecond)
	for _, end := range []peerConn{ours, peer} {
		wg.Go(func() {
			got, err := io.ReadAll(end)
			assert.NoError(t, err)
			assert.True(t, bytes.Equal(content, got))
		})
	}
	wg.Wait()
}

func TestCloseDeliversAllThatWasWritten(t *testing.T) {
	both := tier{ownAcks: true}
	ours, peer := both.connect(t, Options{})
	content := noise(3 << 20)
	go func() {
		_, err := ours.Write(content)
		assert.NoError(t, err)
		assert.NoError(t, ours.Close())
	}()
	got, err := io.ReadAll(peer)
	require.NoError(t, err)
	assert.True(t, bytes.Equal(content, got))
}

func TestSproutIsFedByItsReceiversForecasts(t *testing.T) {
	both := tier{ownAcks: true}
	ours, peer := both.connect(t, Options{Algorithm: "sprout"})
	go func() {
		_, err := ours.Write(noise(1 << 20))
		assert.NoError(t, err)
	}()
	_, err := io.ReadFull(peer, make([]byte, 1<<20))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return ours.Stats().Phase == "fed" }, 10*time.Second, time.Millisecond)
	assert.NotEqual(t, "127.0.0.1", ours.Stats().Group, "forecasts are of one connection")
}

// TestWhatTheKernelSeesBelowReachesTheFlow has the stream below lose a segment behind which others arrive.
func TestWhatTheKernelSeesBelowReachesTheFlow(t *testing.T) {
	ours, raw := bare(t)
	_, err := raw.Write(frame.AppendHello(nil, false))
	require.NoError(t, err)
	const sent = 4 * frame.DataBytes
	_, err = ours.Write(make([]byte, sent))
	require.NoError(t, err)
	f := ours.leg.(*framed)
	inFlight := func() int64 { return int64(ours.Stats().Inflight) }
	isHandedOver := func() bool { // what is in flight counts before the stream below has taken it
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.handedOver == sent
	}
	require.Eventually(t, isHandedOver, 10*time.Second, time.Millisecond)
	require.EqualValues(t, sent, inFlight())

	if below, ok := f.inner.(datapath.Conn); ok {
		below.Observe(nil) // the kernel says what follows no more
	}
	const header = 3
	k := flow.Report{At: f.engine.now(), Written: 4 * (frame.DataBytes + header), RTT: 20 * time.Millisecond}
	k.Acked, k.Sacked, k.Lost = k.Written/2, k.Written/2, frame.DataBytes+header
	f.processKernelReport(k)
	assert.InDelta(t, sent/2, inFlight(), 2*header, "what came behind the hole is in flight no more")
	assert.EqualValues(t, k.Lost, ours.Stats().Lost)

	_, err = raw.Write(frame.AppendAck(nil, frame.Acknowledgement{Offset: frame.DataBytes, Records: 1}))
	require.NoError(t, err)
	time.Sleep(20 * time.Millisecond) //nolint:forbidigo // nothing is to happen
	assert.InDelta(t, sent/2, inFlight(), 2*header, "nor does an older acknowledgement bring it back")
	_, err = raw.Write(frame.AppendAck(nil, frame.Acknowledgement{Offset: sent, Records: 3}))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return inFlight() == 0 }, 10*time.Second, time.Millisecond)
}
