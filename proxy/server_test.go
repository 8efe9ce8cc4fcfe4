package proxy_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/policy"
)

func TestAnIdleConnectionIsReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(c *config.Config, _ *bench) { c.Limits.IdleTimeout = time.Minute })
		defer b.end()
		client, server := b.connect()
		for range 5 { // a little now and then keeps it alive
			time.Sleep(50 * time.Second)
			client.send([]byte("x"))
			got, err := server.take(1)
			require.NoError(t, err)
			require.Equal(t, "x", string(got))
		}
		began := time.Now()
		_, err := client.take(1)
		assert.ErrorIs(t, err, syscall.ECONNRESET)
		assert.InDelta(t, time.Minute.Seconds(), time.Since(began).Seconds(), 8)
		synctest.Wait()
		assert.True(t, server.wasReset())
		assert.Contains(t, b.logs.String(), "closed_by=proxy reason=idle_timeout")
	})
}

// A connection on which nothing can happen any more ends, by the timeout that fits.
func TestAConnectionWithoutAFutureIsReset(t *testing.T) {
	const halfClosed, nextLook = 5 * time.Minute, 10 * time.Second
	mortal := func(_ *config.Config, b *bench) { b.mortal = true }
	narrow := func(_ *config.Config, b *bench) { b.capacity = 1000 }
	for name, row := range map[string]struct {
		change  func(*config.Config, *bench)
		happens func(client, server *fakeLeg)
		after   time.Duration // until both legs are reset, but for a look
		logs    string
	}{
		"the client has finished, and the server says nothing": {
			nil, func(client, _ *fakeLeg) { client.sendFin() }, halfClosed, "closed_by=proxy reason=half_closed_timeout",
		},
		"the client never takes its last bytes": {mortal, func(client, server *fakeLeg) {
			server.send([]byte("left where it is"))
			server.sendFin()
			client.sendFin()
		}, halfClosed, "closed_by=proxy reason=half_closed_timeout"},
		"the client never takes what came before a reset": {nil, func(_, server *fakeLeg) {
			server.send([]byte("left where it is"))
			server.sendReset()
		}, halfClosed, "closed_by=server reason=reset"},
		"the client has finished and vanishes, which no read sees": {nil, func(client, _ *fakeLeg) {
			client.sendFin()
			synctest.Wait()
			client.sendReset()
		}, 0, "closed_by=client reason=reset"},
		"the client vanishes behind more than the server takes": {narrow, func(client, _ *fakeLeg) {
			client.send(make([]byte, 100_000))
			synctest.Wait()
			client.sendReset()
		}, halfClosed, "closed_by=client reason=reset"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, row.change)
				defer b.end()
				client, server := b.connect()
				row.happens(client, server)
				began := time.Now()
				for (!client.wasReset() || !server.wasReset()) && time.Since(began) < time.Hour {
					time.Sleep(time.Second)
				}
				assert.InDelta(t, row.after.Seconds(), time.Since(began).Seconds(), nextLook.Seconds()+1)
				synctest.Wait()
				assert.Contains(t, b.logs.String(), row.logs)
			})
		})
	}
}

func TestWhatIsNotRelayedHasItsReason(t *testing.T) {
	greet := func(how func(context.Context) error) func(*config.Config, *bench) {
		return func(_ *config.Config, b *bench) { b.listener.greet = how }
	}
	for reason, row := range map[proxy.Reason]struct {
		change func(*config.Config, *bench)
		after  time.Duration
	}{
		proxy.RejectedHandshake: {
			greet(func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) }), handshakeTimeout,
		},
		proxy.RejectedAuth: {
			greet(func(context.Context) error { return fmt.Errorf("socks5: %w", ingress.ErrUnauthorized) }), 0,
		},
		proxy.RejectedDialRefused: {
			func(_ *config.Config, b *bench) { b.dialErr = errors.Join(syscall.ECONNREFUSED) }, 0,
		},
	} {
		t.Run(string(reason), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, row.change)
				defer b.end()
				client := newFakeLeg(b.clock, 1, 1)
				began := time.Now()
				b.listener.legs <- client
				_, err := client.take(1)
				require.ErrorIs(t, err, syscall.ECONNRESET)
				assert.Equal(t, row.after, time.Since(began))
				synctest.Wait()
				assert.Equal(t, map[proxy.Reason]uint64{reason: 1}, b.server.Counters().Listeners[0].Rejected)
				assert.Zero(t, b.server.Counters().Active)
			})
		})
	}
}

func TestAHalfClosedConnectionLivesWhileTheOtherSideSends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil)
		defer b.end()
		client, server := b.connect()
		client.sendFin()
		for range 10 {
			time.Sleep(4 * time.Minute)
			server.send([]byte("x"))
			_, err := client.take(1)
			require.NoError(t, err)
		}
		server.sendFin()
		_, err := client.take(1)
		assert.ErrorIs(t, err, io.EOF)
	})
}

// Whom a connection counts against is known late only behind a trusted proxy.
// Everybody else's silence would otherwise be free.
func TestSilentClientsCountAgainstTheirSource(t *testing.T) {
	for name, row := range map[string]struct {
		trusted string
		refused uint64
	}{
		"who is no trusted proxy": {"192.0.2.99/32", 1},
		"a trusted proxy":         {"0.0.0.0/0", 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, func(cfg *config.Config, b *bench) {
					cfg.Limits.PerSource = new(1)
					cfg.Listeners[0].ProxyProtocol.From = []netip.Prefix{netip.MustParsePrefix(row.trusted)}
					b.listener.greet = func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) }
				})
				defer b.end()
				for range 2 {
					b.listener.legs <- newFakeLeg(b.clock, 1, 1)
				}
				synctest.Wait()
				assert.Equal(t, row.refused, b.server.Counters().Listeners[0].Rejected[proxy.RejectedSourceLimit])
				time.Sleep(handshakeTimeout)
				synctest.Wait()
				assert.Zero(t, b.server.Counters().Active)
			})
		})
	}
}

func TestADrainLetsConnectionsFinishAndThenResetsThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil) // thirty seconds
		quick, quickServer := b.connect()
		stuck, _ := b.connect()
		began := time.Now()
		synctest.Wait()
		b.cancel()
		time.Sleep(20 * time.Second)
		assert.True(t, b.server.Counters().Draining)
		quick.send([]byte("still served"))
		quick.sendFin()
		got, err := quickServer.takeAll(100)
		require.NoError(t, err)
		assert.Equal(t, "still served", string(got))
		quickServer.sendFin()
		require.NoError(t, <-b.served)
		assert.Equal(t, 30*time.Second, time.Since(began))
		assert.True(t, stuck.wasReset())
		assert.False(t, quick.wasReset())
		assert.Contains(t, b.logs.String(), "reason=shutdown")
		assert.Contains(t, b.logs.String(), "draining", "progress is told")
	})
}

func TestADrainEndsWithItsLastConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil)
		client, server := b.connect()
		began := time.Now()
		b.cancel()
		time.Sleep(time.Second)
		client.sendFin()
		server.sendFin()
		require.NoError(t, <-b.served)
		assert.Equal(t, time.Second, time.Since(began))
	})
}

func TestTheEndOfADrainEndsDials(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(_ *config.Config, b *bench) { b.silent = true })
		client := newFakeLeg(b.clock, 10000, b.capacity)
		b.listener.legs <- client
		synctest.Wait()
		require.Len(t, flowsOf(b.server), 1)
		assert.Equal(t, proxy.StateDialing, flowsOf(b.server)[0].State)
		began := time.Now()
		b.cancel()
		require.NoError(t, <-b.served)
		assert.Equal(t, b.cfg.Shutdown.Drain, time.Since(began))
		assert.True(t, client.wasReset())
		assert.Contains(t, b.logs.String(), "reason=shutdown")
	})
}

// What the kernel has been given arrives without us. What a transport in this process
// has been given does not, so that a drain waits until it has arrived.
func TestADrainDeliversWhatEndsWithTheProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(_ *config.Config, b *bench) { b.mortal = true })
		client, server := b.connect()
		want := random(7, 50_000)
		server.send(want)
		server.sendFin()
		client.sendFin()
		synctest.Wait()
		began := time.Now()
		b.cancel()
		var got []byte
		for len(got) < len(want) {
			time.Sleep(time.Second)
			piece, err := client.take(10_000)
			require.NoError(t, err)
			got = append(got, piece...)
			require.Len(t, flowsOf(b.server), 1)
			assert.Equal(t, proxy.StateClosing, flowsOf(b.server)[0].State)
		}
		assert.True(t, bytes.Equal(want, got))
		require.NoError(t, <-b.served)
		assert.InDelta(t, 5, time.Since(began).Seconds(), 0.1)
		assert.False(t, client.wasReset())
		assert.Contains(t, b.logs.String(), "reason=eof")
	})
}

// A reader that takes nothing: the proxy holds a window and a piece, however
// much the other side has to say.
func TestAStalledReaderCostsAWindowAndAPiece(t *testing.T) {
	const window, piece, plenty = 20 * cc.DefaultMSS, 64 << 10, 64 << 20
	for _, row := range []struct {
		name      string
		algorithm policy.Algorithm
		atMost    int
	}{
		{"managed", "static:cwnd_packets=20", int(window) + piece},
		{"unmanaged", "none", 4<<20 + 256<<10}, // the leg's own buffer and a piece
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, func(c *config.Config, b *bench) {
					c.Defaults.Algorithm, c.Limits.Buffer = row.algorithm, piece
					c.Shutdown.Drain = time.Millisecond
					b.capacity = 4 << 20
				})
				client, server := b.connect()
				server.send(make([]byte, plenty))
				synctest.Wait()
				assert.LessOrEqual(t, plenty-server.unread(), row.atMost, "read from the server")
				if row.algorithm != "none" {
					assert.LessOrEqual(t, client.maxOut, int(window), "written to the client")
				}
				b.end()
				assert.True(t, client.wasReset())
			})
		})
	}
}

func TestTheWindowIsNeverExceeded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const window = 10 * cc.DefaultMSS
		b := newBench(t, func(c *config.Config, b *bench) {
			c.Defaults.Algorithm = "static:cwnd_packets=10"
			b.capacity = 1 << 20
		})
		defer b.end()
		client, server := b.connect()
		want := random(7, 2<<20)
		server.send(want)
		server.sendFin()
		got, err := client.takeAll(3000)
		require.NoError(t, err)
		assert.True(t, bytes.Equal(want, got))
		assert.Equal(t, int(window), client.maxOut, "the window is used, and not exceeded")
		client.sendFin()
	})
}

// A transport that enforces the window is not gated: it would be gated twice.
func TestATransportThatHoldsTheWindowIsNotGated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(c *config.Config, b *bench) {
			c.Defaults.Algorithm = "static:cwnd_packets=10"
			b.capacity, b.holds = 1<<20, datapath.HoldWindow
			c.Shutdown.Drain = time.Millisecond
		})
		defer b.end()
		client, server := b.connect()
		server.send(make([]byte, 1<<20))
		synctest.Wait()
		assert.Equal(t, 1<<20, client.maxOut)
	})
}

// What came before a RST is delivered before the RST is passed on, however
// slowly it is taken.
func TestAResetWaitsForWhatCameBeforeIt(t *testing.T) {
	for _, algorithm := range []policy.Algorithm{"none", "static:cwnd_packets=10"} {
		t.Run(string(algorithm), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t, func(c *config.Config, _ *bench) { c.Defaults.Algorithm = algorithm })
				defer b.end()
				client, server := b.connect()
				want := random(5, 200_000)
				server.send(want)
				server.sendReset()
				var got []byte
				for len(got) < len(want) {
					time.Sleep(time.Second)
					piece, err := client.take(5000)
					require.NoError(t, err)
					got = append(got, piece...)
				}
				_, err := client.take(1)
				assert.ErrorIs(t, err, syscall.ECONNRESET, "and not a FIN")
				assert.True(t, bytes.Equal(want, got))
				synctest.Wait()
				assert.Contains(t, b.logs.String(), "closed_by=server reason=reset")
			})
		})
	}
}

// The proxy is writing to a leg when that is reset: the write learns of it,
// and the read of the same leg sees an end like any other.
func TestAResetThatAWriteHasLearntOfIsStillAReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, func(_ *config.Config, b *bench) { b.capacity = 1000 })
		defer b.end()
		client, server := b.connect()
		client.send([]byte("last words"))
		server.send(make([]byte, 100_000)) // more than the client takes: a write is waiting
		synctest.Wait()
		client.mu.Lock()
		client.robbed = true // as when the write comes first
		client.mu.Unlock()
		client.sendReset()
		got, err := server.takeAll(100)
		assert.ErrorIs(t, err, syscall.ECONNRESET)
		assert.Equal(t, "last words", string(got))
		synctest.Wait()
		assert.Contains(t, b.logs.String(), "closed_by=client reason=reset")
	})
}

// What the proxy has handed to the client's transport goes on arriving for longer than a connection may be quiet.
func TestAConnectionThatDeliversIsNotQuiet(t *testing.T) {
	for _, fin := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t, func(c *config.Config, _ *bench) {
				c.Limits.IdleTimeout = time.Minute
				c.Limits.HalfClosedTimeout = time.Minute
			})
			defer b.end()
			client, server := b.connect()
			server.send(make([]byte, 60_000))
			if fin {
				server.sendFin()
			}
			for range 60 {
				time.Sleep(10 * time.Second)
				got, err := client.take(1000)
				require.NoError(t, err)
				require.Len(t, got, 1000)
			}
			began := time.Now()
			for !client.wasReset() { // now it is
				time.Sleep(time.Second)
			}
			// A look in half of that time finds that something has moved.
			assert.InDelta(t, 75, time.Since(began).Seconds(), 25)
		})
	}
}

// The server has finished, and the client's leg is reset first: the server must not be told of an end before its turn.
func TestNoLegEndsInGoodOrderWhileTheOtherIsReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, nil)
		defer b.end()
		client, server := b.connect()
		client.slow = true
		server.sendFin()
		_, err := client.take(1)
		require.ErrorIs(t, err, io.EOF)
		_, err = server.take(1)
		assert.ErrorIs(t, err, syscall.ECONNRESET)
		assert.True(t, client.wasReset())
	})
}
