//go:build linux

package netlab

import (
	"bytes"
	"encoding/binary"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/sim"
)

// The file has all that a link got, as on a wire; that it is one which others read the tests of shell say.
func TestAFileHasAllThatPassedADevice(t *testing.T) {
	const size = 2 << 20
	link := sim.LinkConfig{Rate: 50e6, Delay: 5 * time.Millisecond, QueuePackets: 100, Loss: 0.02, Seed: 1}
	c := newCellular(t, CellularConfig{Down: link, Up: sim.LinkConfig{Delay: 5 * time.Millisecond}})
	c.Path.Start()
	var file bytes.Buffer
	s, err := c.Edge.Dump(NearDevice, &file)
	require.NoError(t, err)
	out, in := connect(t, c.Edge, c.Client, c.ClientAddr.V4)
	sent, received, err := transfer(out, in, size, 1)
	require.NoError(t, err)
	require.Equal(t, sent, received)
	for range 2 { // stopping twice is stopping once
		missed, err := s.Stop()
		require.NoError(t, err)
		require.Zero(t, missed)
	}
	down := 0
	for pcap := file.Bytes()[24:]; len(pcap) > 0; {
		kept, whole := binary.NativeEndian.Uint32(pcap[8:]), binary.NativeEndian.Uint32(pcap[12:])
		assert.LessOrEqual(t, whole, uint32(MTU))
		if src, _ := addresses(pcap[16:]); src == c.EdgeNear.V4 {
			down++
		}
		pcap = pcap[16+kept:]
	}
	assert.Equal(t, c.Path.Report(0, c.Path.Elapsed()).Down.Sent, down)
}

func TestTheSnifferCountsWhatItMissed(t *testing.T) {
	needPath(t)
	r, err := NewRouted()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	full, wrote := io.Pipe() // a writer that keeps the sniffer from reading
	s, err := r.Server.Dump(FarDevice, wrote)
	require.NoError(t, err)
	conn, err := r.Server.Dial("udp", port(r.EdgeFar.V4, 9))
	require.NoError(t, err)
	defer conn.Close()

	const ring = sniffBlocks * sniffBlock / sniffFrame
	const excess = 2000 // more than the buffer of the file holds
	for sent := 0; sent < ring+excess; {
		if _, err := conn.Write([]byte("x")); err == nil { // else the edge said that nobody listens
			sent++
		}
	}
	go func() { _, _ = io.Copy(io.Discard, full) }()
	missed, err := s.Stop()
	require.NoError(t, err)
	assert.Positive(t, missed)
	require.NoError(t, full.Close())
}

func TestSniffingNamesTheDeviceThatIsMissing(t *testing.T) {
	lab := newLab(t)
	n, err := lab.Node("alone")
	require.NoError(t, err)
	_, err = n.Dump("cell9", io.Discard)
	assert.ErrorContains(t, err, "netlab: sniff at cell9 in alone")
	require.NoError(t, lab.Close())
	_, err = n.Dump("lo", io.Discard)
	assert.ErrorContains(t, err, "closed")
}
