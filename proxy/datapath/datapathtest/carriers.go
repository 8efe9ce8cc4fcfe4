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

// starved returns buffers whose only large one is lent out for good.
func starved() *datapath.Buffers {
	b := datapath.NewBuffers(1)
	hog := datapath.NewCopy(io.Discard, zeros{}, b)
	_, _ = hog.Fill(1)
	return b
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

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
				return errors.New("Buffered does not say what is left")
			}
		}
	}
}

func carry(t *testing.T, pair Pair) {
	for name := range carriers(nil, nil) {
		for _, sizes := range []struct {
			name        string
			fill, grant int
		}{
			{"in large pieces", 1 << 20, 1 << 20},
			{"in grants of a few segments", 256 << 10, 4344},
			{"in odd pieces", 10_007, 3_001},
		} {
			t.Run(name+" "+sizes.name, func(t *testing.T) {
				source, in := connect(t, pair)
				out, sink := connect(t, pair)
				o := observe(out, flow.Limit{Cwnd: cc.MaxCwnd})
				data := payload(1<<20, 8)
				wrote := inBackground(func() error { return send(source, data) })
				forwarded := inBackground(func() error {
					return forward(carriers(out, in)[name], out, sizes.fill, sizes.grant)
				})
				got, err := io.ReadAll(sink)
				require.NoError(t, err)
				require.NoError(t, wrote())
				require.NoError(t, forwarded())
				require.Equal(t, sha256.Sum256(data), sha256.Sum256(got))
				o.until(t, "everything arrived", arrived(len(data)))
				o.all(t)
			})
		}
	}
}

func idleCarrier(t *testing.T, pair Pair) {
	source, in := connect(t, pair)
	out, sink := connect(t, pair)
	for name, c := range carriers(out, in) {
		require.NoError(t, in.SetReadDeadline(time.Now().Add(time.Millisecond)))
		_, err := c.Fill(1 << 20)
		assert.True(t, isTimeout(err), "%s: %v", name, err)
		assert.Zero(t, c.Buffered(), name)

		// And it works on when there is something after all.
		require.NoError(t, in.SetReadDeadline(time.Now().Add(patience)))
		_, err = source.Write([]byte("late"))
		require.NoError(t, err)
		n, err := c.Fill(1 << 20)
		require.NoError(t, err, name)
		require.Equal(t, 4, n, name)
		n, err = c.Fill(1 << 20)
		require.NoError(t, err, name)
		assert.Zero(t, n, "%s: the store is not empty", name)
		n, err = c.Drain(1 << 20)
		require.NoError(t, err, name)
		assert.Equal(t, 4, n, name)
		_, err = io.ReadFull(sink, make([]byte, 4))
		require.NoError(t, err, name)
		c.Release()
	}
}
