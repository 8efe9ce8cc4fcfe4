//go:build linux

package e2e

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
)

func TestHalfCloseByTheClientAndTheServerGoesOn(t *testing.T) {
	eachWay(t, func(t *testing.T, s *scene, client, server *net.TCPConn) {
		_, err := client.Write([]byte("question"))
		require.NoError(t, err)
		require.NoError(t, client.CloseWrite())
		got, err := io.ReadAll(server)
		require.NoError(t, err)
		assert.Equal(t, "question", string(got))
		written := writing(server, 1)
		sum, n, err := digest(client)
		require.NoError(t, err)
		require.NoError(t, <-written)
		assert.Equal(t, int64(megabyte), n)
		assert.Equal(t, digestOf(1, megabyte), sum)
	})
}

// writing writes a megabyte and closes, while somebody reads: nothing on the way need hold
// all of it.
func writing(conn net.Conn, seed uint64) <-chan error {
	written := make(chan error, 1)
	go func() {
		_, err := io.Copy(struct{ io.Writer }{conn}, random(seed, megabyte))
		written <- errors.Join(err, conn.Close())
	}()
	return written
}

func TestTheServerFinishesFirstAndTheClientGoesOn(t *testing.T) {
	eachWay(t, func(t *testing.T, s *scene, client, server *net.TCPConn) {
		_, err := server.Write([]byte("banner"))
		require.NoError(t, err)
		require.NoError(t, server.CloseWrite())
		got, err := io.ReadAll(client)
		require.NoError(t, err)
		assert.Equal(t, "banner", string(got))
		written := writing(client, 2)
		sum, _, err := digest(server)
		require.NoError(t, err)
		require.NoError(t, <-written)
		assert.Equal(t, digestOf(2, megabyte), sum)
	})
}

func TestAResetByTheServerArrivesAsOneAfterWhatItHadSent(t *testing.T) {
	eachWay(t, func(t *testing.T, s *scene, client, server *net.TCPConn) {
		_, err := server.Write(make([]byte, 100_000))
		require.NoError(t, err)
		// The reset overtakes nothing that the proxy has: wait until it does.
		n, err := io.ReadFull(client, make([]byte, 50_000))
		require.NoError(t, err)
		awaitAcked(t, server)
		require.NoError(t, server.SetLinger(0))
		require.NoError(t, server.Close())
		rest, err := io.Copy(io.Discard, client)
		assert.ErrorIs(t, err, syscall.ECONNRESET, "an orderly end would make a cut transfer look complete")
		assert.Equal(t, int64(50_000), rest+int64(n-50_000))
	})
}

func TestAResetByTheClientArrivesAsOne(t *testing.T) {
	eachWay(t, func(t *testing.T, s *scene, client, server *net.TCPConn) {
		_, err := client.Write([]byte("half a mess"))
		require.NoError(t, err)
		_, err = io.ReadFull(server, make([]byte, 11))
		require.NoError(t, err)
		require.NoError(t, client.SetLinger(0))
		require.NoError(t, client.Close())
		_, err = io.Copy(io.Discard, server)
		assert.ErrorIs(t, err, syscall.ECONNRESET)
	})
}

// awaitAcked waits until the peer's kernel has everything conn wrote.
func awaitAcked(t *testing.T, conn *net.TCPConn) {
	t.Helper()
	raw, err := conn.SyscallConn()
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		queued := -1
		require.NoError(t, raw.Control(func(fd uintptr) { queued = outq(fd) }))
		return queued == 0
	}, patience, time.Millisecond)
}

func eachWay(t *testing.T, test func(t *testing.T, s *scene, client, server *net.TCPConn)) {
	for _, i := range []int{0, 1, 4, 6, 7, 9, 11, 14, 15} {
		w := ways[i]
		t.Run(w.name, func(t *testing.T) {
			s := w.open(t, "")
			client, server := w.pair(s)
			test(t, s, client, server)
			client.Close()
			server.Close()
			s.proxy.awaitMetric(0, "penstock_flows_active")
		})
	}
}

func TestRefusedServers(t *testing.T) {
	tests := []struct {
		way  way
		want func(t *testing.T, err error)
	}{
		{ways[0], isReset},
		{ways[1], isReset},
		{ways[4], isReset},
		{ways[6], func(t *testing.T, err error) { assert.ErrorIs(t, err, socksError(5)) }},
		{ways[7], func(t *testing.T, err error) { assert.ErrorIs(t, err, httpError(502)) }},
		{ways[11], isRefused},
		{ways[14], isRefused},
	}
	for _, tt := range tests {
		t.Run(tt.way.name, func(t *testing.T) {
			s := tt.way.open(t, "")
			conn, err := tt.way.connect(s, tt.way.target(s, 9)) // nobody listens there
			if err == nil {
				defer conn.Close()
				_, err = conn.Read(make([]byte, 1))
			}
			tt.want(t, err)
		})
	}
}

func isReset(t *testing.T, err error) { assert.ErrorIs(t, err, syscall.ECONNRESET) }

func isRefused(t *testing.T, err error) { assert.ErrorIs(t, err, syscall.ECONNREFUSED) }

func TestServersThatDoNotAnswer(t *testing.T) {
	tests := []struct {
		way  way
		want func(t *testing.T, err error)
	}{
		{ways[0], isReset},
		{ways[6], func(t *testing.T, err error) {
			var refused socksError
			assert.ErrorAs(t, err, &refused)
		}},
		{ways[7], func(t *testing.T, err error) { assert.ErrorIs(t, err, httpError(504)) }},
		{ways[11], isRefused},
		{ways[13], isRefused},
	}
	for _, tt := range tests {
		t.Run(tt.way.name, func(t *testing.T) {
			s := tt.way.open(t, "") // dial_timeout is 1s
			// Packets for this prefix reach the server, which neither owns nor
			// forwards it, and are dropped without a word.
			require.NoError(t, s.Edge.Route(netip.MustParsePrefix("10.99.0.0/16"), s.ServerAddr.V4))
			require.NoError(t, s.Server.Sysctl("net.ipv4.ip_forward", "0"))
			conn, err := tt.way.connect(s, netip.MustParseAddrPort("10.99.0.1:80"))
			if err == nil {
				defer conn.Close()
				_, err = conn.Read(make([]byte, 1))
			}
			tt.want(t, err)
			s.proxy.awaitMetric(0, "penstock_flows_active")
		})
	}
}

func TestASleepingReaderCostsBoundedMemory(t *testing.T) {
	const size = 64 * megabyte
	for _, algorithm := range []string{"copa", "none"} {
		t.Run(algorithm, func(t *testing.T) {
			w := ways[0]
			s := w.open(t, "defaults: {algorithm: "+algorithm+"}\n")
			client, server := w.pair(s)
			before := s.proxy.rss()
			sent := make(chan error, 1)
			go func() {
				_, err := io.Copy(struct{ io.Writer }{server}, random(9, size))
				server.Close()
				sent <- err
			}()
			// Once the counter stands still the reader's sleep has reached the server.
			stalled := func() float64 { return s.proxy.metric("penstock_bytes_total", `direction="down"`) }
			last, since := -1.0, time.Now()
			for time.Since(since) < time.Second {
				if now := stalled(); now != last {
					last, since = now, time.Now()
				}
				select {
				case err := <-sent:
					require.Fail(t, "all was taken although nobody reads", "%v", err)
				default:
				}
				time.Sleep(50 * time.Millisecond)
			}
			most := 24 * megabyte
			if raced() {
				most = 64 * megabyte // the race detector remembers who used it, garbage included
			}
			grown := s.proxy.rss() - before
			assert.Less(t, grown, most, "resident memory grew by %d bytes", grown)
			sum, n, err := digest(client)
			require.NoError(t, err)
			assert.Equal(t, int64(size), n, "nothing is lost when it wakes")
			assert.Equal(t, digestOf(9, size), sum)
			require.NoError(t, <-sent)
		})
	}
}

func TestDescriptorLimitReached(t *testing.T) {
	w := ways[9]
	s := newScene(t)
	s.start(w.yaml(""), "sh", "-c", `ulimit -n 64; exec "$@"`, "sh")
	need.Serve(t, s.listen(w.target(s, servicePort)), func(c net.Conn) { _, _ = io.Copy(c, c) })
	echo := func(c *net.TCPConn) bool {
		_ = c.SetDeadline(time.Now().Add(2 * time.Second))
		if _, err := c.Write([]byte("ping")); err != nil {
			return false
		}
		_, err := io.ReadFull(c, make([]byte, 4))
		return err == nil
	}
	first, err := w.connect(s, w.target(s, servicePort))
	require.NoError(t, err)
	defer first.Close()
	require.True(t, echo(first))
	var conns []*net.TCPConn
	for range 100 {
		c, err := w.connect(s, w.target(s, servicePort))
		if err == nil {
			conns = append(conns, c)
		}
	}
	assert.True(t, echo(first), "what is established goes on")
	for _, c := range conns {
		c.Close()
	}
	require.Eventually(t, func() bool {
		c, err := w.connect(s, w.target(s, servicePort))
		if err != nil {
			return false
		}
		defer c.Close()
		return echo(c)
	}, patience, 100*time.Millisecond, "once descriptors are free again, new connections are served")
}

func TestShutdownLetsTransfersFinish(t *testing.T) {
	w := ways[0]
	s := w.open(t, "")
	client, server := w.pair(s)
	_, err := server.Write([]byte("begin"))
	require.NoError(t, err)
	_, err = io.ReadFull(client, make([]byte, 5))
	require.NoError(t, err)
	require.NoError(t, s.proxy.cmd.Process.Signal(syscall.SIGTERM))
	s.proxy.awaitSaid("drain")
	_, err = io.Copy(struct{ io.Writer }{server}, random(3, megabyte))
	require.NoError(t, err)
	server.Close()
	sum, _, err := digest(client)
	require.NoError(t, err)
	assert.Equal(t, digestOf(3, megabyte), sum)
	client.Close()
	s.proxy.wait()
	assert.Equal(t, 0, s.proxy.cmd.ProcessState.ExitCode(), s.proxy.said.String())
}

func TestASecondSignalEndsTheDrain(t *testing.T) {
	w := ways[0]
	s := w.open(t, "")
	client, _ := w.pair(s)
	require.NoError(t, s.proxy.cmd.Process.Signal(os.Interrupt))
	s.proxy.awaitSaid("drain")
	require.NoError(t, s.proxy.cmd.Process.Signal(os.Interrupt))
	_, err := client.Read(make([]byte, 1))
	assert.ErrorIs(t, err, syscall.ECONNRESET)
	s.proxy.wait()
}

func TestExplicitListenersDoNotReachInside(t *testing.T) {
	for _, target := range []string{
		"127.0.0.1:9464", "[::1]:9464", "169.254.169.254:80", "100.64.0.1:80",
		"224.0.0.1:80", "0.0.0.0:9464", "[::ffff:127.0.0.1]:9464",
	} {
		t.Run(target, func(t *testing.T) {
			s := ways[6].open(t, "")
			_, err := ways[6].connect(s, netip.MustParseAddrPort(target))
			assert.True(t, errors.Is(err, socksError(2)), "%v", err)
		})
	}
}

func TestTheProxyDoesNotTalkToItself(t *testing.T) {
	s := ways[6].open(t, "")
	for _, own := range []netip.Addr{s.EdgeNear.V4, s.EdgeFar.V4} {
		_, err := ways[6].connect(s, netip.AddrPortFrom(own, port))
		var refused socksError
		assert.ErrorAs(t, err, &refused)
	}
}

// TestACrashLooksLikeOne kills the program during transfers: everybody sees a reset
// behind a part of what was sent.
func TestACrashLooksLikeOne(t *testing.T) {
	for _, extra := range []string{"", "defaults: {algorithm: none}\n"} {
		for _, i := range []int{0, 1, 4, 6, 7, 9} {
			w := ways[i]
			t.Run(w.name+" "+strings.TrimSpace(extra), func(t *testing.T) {
				s := w.open(t, extra)
				reading := w.download(s, 1, 64*megabyte)
				reading.reaches(megabyte)
				late, server := w.pair(s) // its client reads only afterwards
				_, err := server.Write(make([]byte, 100_000))
				require.NoError(t, err)
				upload, receiver := w.pair(s)
				_, err = upload.Write(make([]byte, 100_000))
				require.NoError(t, err)
				_, err = io.ReadFull(receiver, make([]byte, 100_000))
				require.NoError(t, err)

				s.proxy.signal(syscall.SIGKILL)
				got := reading.ends()
				assert.ErrorIs(t, got.err, syscall.ECONNRESET)
				assert.Equal(t, digestOf(reading.seed, got.n), got.sum)
				assert.Error(t, <-reading.sent)
				for _, conn := range []*net.TCPConn{late, server, upload, receiver} {
					_, err = io.Copy(io.Discard, conn)
					assert.ErrorIs(t, err, syscall.ECONNRESET)
				}
			})
		}
	}
}

// TestWhatHasEndedSurvivesACrash kills the program when a transfer is over for it, its
// client has read nothing yet.
func TestWhatHasEndedSurvivesACrash(t *testing.T) {
	w := ways[0]
	s := w.open(t, "")
	client, server := w.pair(s)
	_, err := io.Copy(struct{ io.Writer }{server}, random(5, megabyte/8))
	require.NoError(t, err)
	require.NoError(t, client.CloseWrite())
	require.NoError(t, server.Close())
	s.proxy.awaitMetric(1, "penstock_flow_closes_total")
	s.proxy.signal(syscall.SIGKILL)
	<-s.proxy.ended
	sum, n, err := digest(client)
	require.NoError(t, err)
	assert.Equal(t, int64(megabyte/8), n)
	assert.Equal(t, digestOf(5, megabyte/8), sum)
}
