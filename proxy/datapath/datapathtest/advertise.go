package datapathtest

import (
	"crypto/sha256"
	"errors"
	"io"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
)

var held = []row{
	{"a bounded receive window loses nothing", suite.heldWindow},
	{"a reader stalls behind a bounded receive window", suite.heldStall},
}

// Held checks only that a datapath's receive windows can be bounded, of pairs between which
// packets get lost, for example.
func Held(t *testing.T, pair Pair) {
	t.Helper()
	run(t, pair, nil, held)
}

// advertiser returns a pair; b bounds the window that it advertises.
func (s suite) advertiser() (a, b datapath.Conn, window datapath.Advertiser) {
	a, b = s.connect()
	window, ok := b.(datapath.Advertiser)
	if !ok {
		s.Skip("its receive window cannot be bounded")
	}
	return a, b, window
}

// heldWindow has the window change with every read, from the least to all there is room for.
// Nothing is lost, taken back or held up for good.
func (s suite) heldWindow() {
	a, b, window := s.advertiser()
	before, err := window.Arrivals()
	require.NoError(s, err)
	data := payload(2<<20, 9)
	wrote := inBackground(func() error { return send(a, data) })
	sum, got, last := sha256.New(), 0, before
	windows := []cc.Bytes{1, 3000, 100e3, 0, 20e3, 1e6, 2896, cc.MaxCwnd}
	buf := make([]byte, 64<<10)
	for i := 0; ; i++ {
		n, err := b.Read(buf)
		got += n
		sum.Write(buf[:n])
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(s, err)
		now, err := window.Arrivals()
		require.NoError(s, err)
		assert.GreaterOrEqual(s, now.Received, last.Received)
		assert.GreaterOrEqual(s, now.Holes, last.Holes)
		assert.GreaterOrEqual(s, now.Window, cc.Bytes(0))
		last = now
		require.NoError(s, window.Advertise(windows[i/2%len(windows)]))
	}
	require.NoError(s, wrote())
	assert.Equal(s, len(data), got)
	assert.Equal(s, sha256.Sum256(data), [32]byte(sum.Sum(nil)))
	now, err := window.Arrivals()
	require.NoError(s, err)
	assert.InDelta(s, len(data), float64(now.Received-before.Received), 1, "but for the stream's end")
	assert.Positive(s, now.RTT)
	assert.Positive(s, now.MSS)
}

// heldStall has the reader of a small window stall until it is closed, and read on.
func (s suite) heldStall() {
	a, b, window := s.advertiser()
	_, err := window.Arrivals()
	require.NoError(s, err)
	require.NoError(s, window.Advertise(20e3))
	s.stallReader(a, b, func() { require.NoError(s, window.Advertise(0)) })
}
