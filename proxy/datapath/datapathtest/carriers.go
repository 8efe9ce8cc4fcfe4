package datapathtest

import (
	"crypto/sha256"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// carriers are the ways to move bytes from one leg to another.
func carriers(dst, src datapath.Conn) map[string]datapath.Carrier {
	return map[string]datapath.Carrier{
		"copied":                      datapath.NewCopy(dst, src, &datapath.Buffers{}),
		"in the cheapest way":         datapath.NewCarrier(dst, src, &datapath.Buffers{}),
		"copied without ReadReady":    datapath.NewCopy(dst, struct{ io.Reader }{src}, &datapath.Buffers{}),
		"copied with little memory":   datapath.NewCopy(dst, src, starved()),
		"cheapest with little memory": datapath.NewCarrier(dst, src, starved()),
	}
}

// starved returns buffers without a large one.
func starved() *datapath.Buffers { return datapath.NewBuffers(datapath.SmallBuffer) }

// forward moves everything through the carrier in grants of the given size.
func forward(c datapath.Carrier, dst datapath.Conn, fill, grant int) error {
	defer c.Release()
	for {
		n, err := c.Fill(fill)
		if errors.Is(err, io.EOF) {
			return dst.CloseWrite()
		}
		if err != nil {
			return err
		}
		for left := n; left > 0; {
			k, err := c.Drain(grant)
			if err != nil {
				return err
			}
			left -= k
			if c.Buffered() != left {
				return errors.New("what is left is not what Buffered says")
			}
		}
	}
}

func (s suite) carry() {
	for name := range carriers(nil, nil) {
		for _, sizes := range []struct {
			name        string
			fill, grant int
		}{
			{"in large pieces", 1 << 20, 1 << 20},
			{"in grants of a few segments", 256 << 10, 4344},
			{"in odd pieces", 10_007, 3_001},
		} {
			s.Run(name+" "+sizes.name, func(t *testing.T) {
				s := suite{t, s.pair, s.mute}
				source, src := s.connect()
				dst, sink := s.connect()
				o := observe(dst, flow.Limit{Cwnd: cc.MaxCwnd})
				data := payload(1<<20, 8)
				wrote := inBackground(func() error { return send(source, data) })
				forwarded := inBackground(func() error {
					return forward(carriers(dst, src)[name], dst, sizes.fill, sizes.grant)
				})
				got, err := io.ReadAll(sink)
				require.NoError(s, err)
				require.NoError(s, wrote())
				require.NoError(s, forwarded())
				require.Equal(s, sha256.Sum256(data), sha256.Sum256(got))
				o.until(s.T, "everything arrived", arrived(len(data)))
				o.all(s.T)
			})
		}
	}
}

func (s suite) idleCarrier() {
	source, src := s.connect()
	dst, sink := s.connect()
	for name, c := range carriers(dst, src) {
		require.NoError(s, src.SetReadDeadline(in(time.Millisecond)))
		_, err := c.Fill(1 << 20)
		assert.True(s, isTimeout(err), "%s: %v", name, err)
		assert.Zero(s, c.Buffered(), name)

		// And it works on when there is something after all.
		require.NoError(s, src.SetReadDeadline(in(patience)))
		_, err = source.Write([]byte("late"))
		require.NoError(s, err)
		n, err := c.Fill(1 << 20)
		require.NoError(s, err, name)
		require.Equal(s, 4, n, name)
		n, err = c.Fill(1 << 20)
		require.NoError(s, err, name)
		assert.Zero(s, n, "%s: the store is not empty", name)
		n, err = c.Drain(1 << 20)
		require.NoError(s, err, name)
		assert.Equal(s, 4, n, name)
		_, err = io.ReadFull(sink, make([]byte, 4))
		require.NoError(s, err, name)
		c.Release()
	}
}
