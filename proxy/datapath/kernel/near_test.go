//go:build linux

package kernel

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
)

// ended tells whether the leg's loop knows that the peer sends no more.
func (c *Conn) ended() bool {
	known := make(chan bool)
	c.raw.Loop().Do(func() { known <- c.raw.Ended() })
	return <-known
}

func TestADialEndsWhenTheLegThatItBelongsToIsReset(t *testing.T) {
	d := still(t, Config{})
	at := need.Silent(t)
	for name, cfg := range map[string]DialConfig{
		"an address": {Target: at.AddrPort()}, "a name": {Host: fmt.Sprintf("%s:%d", need.LoopbackName, at.Port)},
	} {
		for when, early := range map[string]bool{"reset before": true, "reset while it is dialled": false} {
			t.Run(name+", "+when, func(t *testing.T) {
				near, client := d.pair(t, loopback4)
				cfg.Near = near
				if early {
					require.NoError(t, client.Reset())
				} else {
					require.NoError(t, client.CloseWrite())
				}
				require.Eventually(t, near.ended, patience, time.Millisecond)
				over := make(chan error, 1)
				cancel := d.Connect(cfg, func(c *Conn, err error) {
					assert.Nil(t, c)
					over <- err
				})
				defer cancel()
				if !early {
					near.ended() // its loop has begun the dial,
					near.ended() // and looked what has become of it
					assert.Empty(t, over, "a client may end its request and wait for the answer")
					require.NoError(t, client.Reset())
				}
				select {
				case err := <-over:
					assert.ErrorIs(t, err, ErrNearReset)
				case <-time.After(patience): //nolint:forbidigo // nothing tells of what does not happen
					t.Fatal("it goes on")
				}
			})
		}
	}
}

func TestADialGoesOnForWhatALegHadSentBeforeItsReset(t *testing.T) {
	d := still(t, Config{})
	at := need.Silent(t)
	for name, cfg := range map[string]DialConfig{
		"an address": {Target: at.AddrPort()}, "a name": {Host: fmt.Sprintf("%s:%d", need.LoopbackName, at.Port)},
	} {
		t.Run(name, func(t *testing.T) {
			near, client := d.pair(t, loopback4)
			cfg.Near = near
			_, err := client.Write([]byte("x"))
			require.NoError(t, err)
			over := make(chan error, 1)
			cancel := d.Connect(cfg, func(_ *Conn, err error) { over <- err })
			require.NoError(t, client.Reset())
			require.Eventually(t, near.ended, patience, time.Millisecond)
			near.ended() // its loop has looked what has become of the dial
			assert.Empty(t, over)
			cancel()
			assert.NotErrorIs(t, <-over, ErrNearReset)
			got := make([]byte, 2)
			n, err := near.Read(got)
			require.NoError(t, err)
			assert.Equal(t, "x", string(got[:n]))
		})
	}
}
