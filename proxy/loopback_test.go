package proxy_test

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/policy"
)

// The tests here run a whole server over the kernel's TCP on the loopback
// interface:
//
//	test's client ──▶ forward listener ──▶ Server ──▶ test's server
//
// Nothing in them waits for a time to pass; patience only bounds a failure.
// patience bounds every wait; only a hang reaches it.
const patience = time.Minute

// nobody is an address at which nobody listens, nor will but for the test that asks.
var nobody = need.Host() + ":7408"

var epoch = time.Now()

func clock() cc.Time { return cc.Time(time.Since(epoch)) + 1 }

// rig is a proxy in front of a listener of the test's.
type rig struct {
	tb      testing.TB
	proxy   *proxy.Kernel
	cfg     config.Config // it started with
	backend *net.TCPListener
	logs    *need.Output
	stop    func() error // ends Serve and returns its error
}

// newRig starts a proxy whose one listener forwards to the backend. change may
// edit the configuration.
func newRig(tb testing.TB, change func(*config.Config)) *rig {
	tb.Helper()
	backend, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(tb, err)
	cfg := config.Default()
	cfg.Listeners = []access.Listener{{
		Name: "fwd", Mode: "forward", Address: "127.0.0.1:0",
		Target: backend.Addr().String(),
	}}
	cfg.Shutdown.Drain = time.Millisecond
	if change != nil {
		change(&cfg)
	}
	r := &rig{tb: tb, cfg: cfg, backend: backend, logs: &need.Output{}}
	log := slog.New(slog.NewTextHandler(r.logs, nil))
	ctx, cancel := context.WithCancel(context.Background())
	r.proxy, err = proxy.Open(ctx, cfg, nil, &flow.Manager{}, clock, log)
	require.NoError(tb, err)
	served := make(chan error, 1)
	go func() { served <- r.proxy.Serve(ctx) }()
	r.stop = sync.OnceValue(func() error {
		cancel()
		err := <-served
		if r.backend != nil {
			err = errors.Join(err, r.backend.Close())
		}
		return errors.Join(err, r.proxy.Close())
	})
	tb.Cleanup(func() { assert.NoError(tb, r.stop()) })
	return r
}

func (r *rig) addr() string { return r.proxy.Addrs()["fwd"].String() }

// pair is a client's connection and the one it led to at the backend.
func (r *rig) pair() (client, server *net.TCPConn) {
	r.tb.Helper()
	return r.pairBy(net.Dialer{})
}

func (r *rig) pairBy(dialer net.Dialer) (client, server *net.TCPConn) {
	r.tb.Helper()
	c, err := dialer.Dial("tcp", r.addr())
	require.NoError(r.tb, err)
	require.NoError(r.tb, r.backend.SetDeadline(time.Now().Add(patience)))
	server, err = r.backend.AcceptTCP()
	require.NoError(r.tb, err)
	client = c.(*net.TCPConn)
	for _, conn := range []*net.TCPConn{client, server} {
		require.NoError(r.tb, conn.SetDeadline(time.Now().Add(patience)))
		r.tb.Cleanup(func() { _ = conn.Close() })
	}
	return client, server
}

// narrowPair is a pair whose client has room for little that it has not read.
func (r *rig) narrowPair() (client, server *net.TCPConn) {
	r.tb.Helper()
	return r.pairBy(net.Dialer{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		_ = raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 4096) })
		return err
	}})
}

// unmanaged leaves both directions to the kernel.
func unmanaged(cfg *config.Config) { cfg.Defaults.Algorithm = "none" }

func TestBothDirectionsCarryTheSameBytes(t *testing.T) {
	for _, algorithm := range []policy.Algorithm{"copa", "none", "cubic", "static:cwnd_packets=64"} {
		t.Run(string(algorithm), func(t *testing.T) {
			r := newRig(t, func(cfg *config.Config) { cfg.Defaults.Algorithm = algorithm })
			client, server := r.pair()
			const size = 16 << 20
			up, down := random(1, size), random(2, size)
			var wg sync.WaitGroup
			exchange := func(conn *net.TCPConn, send, want []byte) {
				wg.Go(func() {
					_, err := conn.Write(send)
					assert.NoError(t, err)
					assert.NoError(t, conn.CloseWrite())
				})
				wg.Go(func() {
					got, err := io.ReadAll(conn)
					assert.NoError(t, err)
					assert.Equal(t, sha256.Sum256(want), sha256.Sum256(got), "%d of %d bytes", len(got), len(want))
				})
			}
			exchange(client, up, down)
			exchange(server, down, up)
			wg.Wait()
			require.NoError(t, r.stop())
			route := r.proxy.Counters().Routes[0]
			assert.Equal(t, cc.Bytes(size), route.Up.Written)
			assert.Equal(t, cc.Bytes(size), route.Down.Written)
			assert.Contains(t, r.logs.String(), "reason=eof")
		})
	}
}

func random(seed uint64, n int) []byte {
	b := make([]byte, n)
	src := rand.NewChaCha8([32]byte{byte(seed)})
	_, _ = src.Read(b)
	return b
}

func TestHalfCloses(t *testing.T) {
	for name, change := range map[string]func(*config.Config){"managed": nil, "unmanaged": unmanaged} {
		t.Run(name+": the answer comes after the client's end", func(t *testing.T) {
			client, server := newRig(t, change).pair()
			send(t, client, "question")
			require.NoError(t, client.CloseWrite())
			assert.Equal(t, "question", receive(t, server))
			send(t, server, "answer")
			require.NoError(t, server.Close())
			assert.Equal(t, "answer", receive(t, client))
		})
		t.Run(name+": the client goes on after the server's end", func(t *testing.T) {
			client, server := newRig(t, change).pair()
			send(t, server, "hello")
			require.NoError(t, server.CloseWrite())
			assert.Equal(t, "hello", receive(t, client))
			send(t, client, "and goodbye")
			require.NoError(t, client.Close())
			assert.Equal(t, "and goodbye", receive(t, server))
		})
	}
}

func TestResetsArriveAsResetsAfterTheData(t *testing.T) {
	for name, change := range map[string]func(*config.Config){"managed": nil, "unmanaged": unmanaged} {
		for _, from := range []string{"client", "server"} {
			t.Run(name+" from the "+from, func(t *testing.T) {
				r := newRig(t, change)
				sender, receiver := r.pair()
				if from == "server" {
					sender, receiver = receiver, sender
				}
				want := random(3, 100_000)
				_, err := sender.Write(want)
				require.NoError(t, err)
				// A reset before the proxy has read everything takes the rest with it.
				first := make([]byte, len(want))
				_, err = io.ReadFull(receiver, first)
				require.NoError(t, err)
				require.NoError(t, sender.SetLinger(0))
				require.NoError(t, sender.Close())
				rest, err := io.ReadAll(receiver)
				require.ErrorIs(t, err, syscall.ECONNRESET, "a FIN would make a cut transfer look whole")
				assert.Empty(t, rest)
				assert.Equal(t, want, first)
				require.NoError(t, r.stop())
				assert.Contains(t, r.logs.String(), "closed_by="+from+" reason=reset")
			})
		}
	}
}

// A reset reaches the other side although the proxy was writing to the leg
// that was reset and so met the error in its write: the read then sees a
// plain end of stream.
func TestResetWhileWritingIsNotTakenForAnEnd(t *testing.T) {
	for name, change := range map[string]func(*config.Config){"managed": nil, "unmanaged": unmanaged} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, change)
			for range 20 {
				client, server := r.pair()
				written := make(chan error)
				go func() { // keeps the proxy writing to the client
					_, err := io.Copy(server, neverEnding{})
					written <- err
				}()
				_, err := io.CopyN(io.Discard, client, 1<<20)
				require.NoError(t, err)
				require.NoError(t, client.SetLinger(0))
				require.NoError(t, client.Close())
				_, err = io.Copy(io.Discard, server)
				// Here too the write may be the one that learns of it. After a
				// FIN it would say EPIPE.
				assert.ErrorIs(t, errors.Join(err, <-written), syscall.ECONNRESET)
			}
		})
	}
}

// The last bytes for a client that is gone hold nothing up, although nobody reads from it any more.
func TestLastBytesForAClientThatIsGoneAreGivenUp(t *testing.T) {
	r := newRig(t, unmanaged)
	client, server := r.narrowPair()
	require.NoError(t, client.CloseWrite())
	require.Empty(t, receive(t, server))
	const waiting = 50_000
	send(t, server, string(random(1, waiting)))
	is := func(state proxy.State, down cc.Bytes) func() bool {
		return func() bool {
			f := flowsOf(r.proxy)
			return len(f) == 1 && f[0].State == state && f[0].Down.Written == down
		}
	}
	require.Eventually(t, is(proxy.StateHalfClosed, waiting), patience, time.Millisecond)
	require.NoError(t, server.SetLinger(0))
	require.NoError(t, server.Close())
	require.Eventually(t, is(proxy.StateClosing, waiting), patience, time.Millisecond)
	require.NoError(t, client.SetLinger(0))
	require.NoError(t, client.Close())
	require.Eventually(t, func() bool { return r.proxy.Counters().Active == 0 }, patience, time.Millisecond)
}

type neverEnding struct{}

func (neverEnding) Read(b []byte) (int, error) { return len(b), nil }

func TestAServerThatRefusesResetsACapturedClient(t *testing.T) {
	r := newRig(t, func(c *config.Config) { c.Listeners[0].Target = nobody })
	refused(t, r.addr())
	require.Eventually(t, func() bool { return r.proxy.Counters().Active == 0 }, patience, time.Millisecond)
	assert.Equal(t, uint64(1), r.proxy.Counters().Listeners[0].Rejected[proxy.RejectedDialRefused])
	require.Eventually(t, func() bool { return strings.Contains(r.logs.String(), "reason=dial_refused") }, patience,
		time.Millisecond, "a line is written where nobody waits for it")
}

func TestCountersMoveWhileAConnectionLives(t *testing.T) {
	for name, change := range map[string]func(*config.Config){"managed": nil, "unmanaged": unmanaged} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, change)
			client, server := r.pair()
			send(t, client, "ping")
			buf := make([]byte, 4)
			_, err := io.ReadFull(server, buf)
			require.NoError(t, err)
			require.Eventually(t, func() bool {
				c := r.proxy.Counters()
				return len(c.Routes) == 1 && c.Routes[0].Up.Written == 4
			}, patience, time.Millisecond)
			c := r.proxy.Counters()
			assert.Equal(t, 1, c.Active)
			assert.Equal(t, 1, c.Routes[0].Active)
			flows := flowsOf(r.proxy)
			require.Len(t, flows, 1)
			assert.Equal(t, proxy.StateOpen, flows[0].State)
			assert.Equal(t, cc.Bytes(4), flows[0].Up.Written)
			assert.False(t, flows[0].Up.Managed, "as little as any sender may have underway")
			assert.False(t, flows[0].Down.Managed)
			const bulk = 100_000
			send(t, client, string(random(1, bulk)))
			_, err = io.CopyN(io.Discard, server, bulk)
			require.NoError(t, err)
			flows = flowsOf(r.proxy)
			assert.Equal(t, change == nil, flows[0].Up.Managed)
			assert.False(t, flows[0].Down.Managed, "nothing goes that way")
			assert.Equal(t, server.LocalAddr().String(), flows[0].Target.String())
			assert.Equal(t, client.LocalAddr().String(), flows[0].Source.String())
		})
	}
}

func TestShutdownResetsWhatIsLeft(t *testing.T) {
	r := newRig(t, nil)
	client, server := r.pair()
	// A connection whose dial is not back yet has nothing that could be cut.
	require.Eventually(t, func() bool { f := flowsOf(r.proxy); return len(f) == 1 && f[0].State == proxy.StateOpen }, patience, time.Millisecond)
	require.NoError(t, r.stop())
	for _, conn := range []net.Conn{client, server} {
		_, err := conn.Read(make([]byte, 1))
		assert.ErrorIs(t, err, syscall.ECONNRESET)
	}
	assert.Contains(t, r.logs.String(), "reason=shutdown")
}

func TestLimits(t *testing.T) {
	for _, row := range []struct {
		name   string
		change func(*config.Config)
		reason proxy.Reason
	}{
		{"all together", func(c *config.Config) { c.Limits.Connections = 1 }, proxy.RejectedGlobalLimit},
		{"one listener", func(c *config.Config) { c.Listeners[0].Connections = 1 }, proxy.RejectedListenerLimit},
		{"one client host", func(c *config.Config) { c.Limits.PerSource = new(1) }, proxy.RejectedSourceLimit},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := newRig(t, row.change)
			client, server := r.pair()
			refused(t, r.addr())
			assert.Equal(t, uint64(1), r.proxy.Counters().Listeners[0].Rejected[row.reason])
			require.NoError(t, client.Close())
			require.NoError(t, server.Close())
			require.Eventually(t, func() bool { return r.proxy.Counters().Active == 0 }, patience, time.Millisecond)
			r.pair() // there is room again
		})
	}
}

// A forward listener whose target is the listener itself dials itself once.
func TestTheProxyDoesNotTalkToItself(t *testing.T) {
	r := newRig(t, func(c *config.Config) { c.Listeners[0].Address, c.Listeners[0].Target = nobody, nobody })
	refused(t, nobody)
	require.Eventually(t, func() bool { return r.proxy.Counters().Active == 0 }, patience, time.Millisecond)
	assert.Equal(t, uint64(1), r.proxy.Counters().Listeners[0].Rejected[proxy.RejectedLoop])
	assert.Equal(t, uint64(1), r.proxy.Counters().Listeners[0].Accepted)
}

// refused expects a connection to be reset, be it before connect returns.
func refused(t *testing.T, addr string) {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err == nil {
		defer conn.Close() //nolint:errcheck // it is gone already
		require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
		_, err = conn.Read(make([]byte, 1))
	}
	require.ErrorIs(t, err, syscall.ECONNRESET)
}

func send(t *testing.T, conn net.Conn, s string) {
	t.Helper()
	_, err := io.WriteString(conn, s)
	require.NoError(t, err)
}

func receive(t *testing.T, conn net.Conn) string {
	t.Helper()
	b, err := io.ReadAll(conn)
	require.NoError(t, err)
	return string(b)
}

// A firewall before a service of this machine takes what the proxy sends there
// for its own traffic.
func TestClientsThatAskDoNotReachServicesOfThisMachine(t *testing.T) {
	service := listenHere(t).Addr().String()
	r := newRig(t, func(cfg *config.Config) {
		cfg.Listeners = []access.Listener{{Name: "fwd", Mode: "mixed", Address: "127.0.0.1:0"}}
	})
	ask := func() string {
		c, err := net.Dial("tcp", r.addr())
		require.NoError(t, err)
		defer c.Close()                                             //nolint:errcheck // it has answered
		require.NoError(t, c.SetDeadline(time.Now().Add(patience))) //nolint:forbidigo // a deadline is by the clock
		_, err = fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", service, service)
		require.NoError(t, err)
		answer, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: http.MethodConnect})
		require.NoError(t, err)
		require.NoError(t, answer.Body.Close())
		return answer.Status
	}
	assert.Contains(t, ask(), "403")
	require.Eventually(t, r.rejected(proxy.RejectedDenied), patience, time.Millisecond)

	cfg := r.cfg
	cfg.Listeners = slices.Clone(cfg.Listeners)
	cfg.Listeners[0].Allow = []netip.Prefix{netip.PrefixFrom(netip.MustParseAddrPort(service).Addr(),
		32)}
	_, err := r.proxy.Reload(cfg)
	require.NoError(t, err)
	assert.Contains(t, ask(), "200")
}

// A connection whose flow has refused to grant more is ended like any other.
func TestAConnectionThatWaitsForItsFlowEndsAtOnce(t *testing.T) {
	for name, change := range map[string]func(*config.Config){
		"a window":       func(c *config.Config) { c.Defaults.Algorithm = "static:cwnd_packets=1" },
		"a maximum rate": func(c *config.Config) { c.Defaults.MaxRate = 8000 },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(c *config.Config) {
				c.Envelope = "reno" // the relay keeps the window
				c.Shutdown.Drain = time.Millisecond
				change(c)
			})
			_, server := r.narrowPair()
			go func() { _, _ = server.Write(make([]byte, 64<<20)) }() // until the reset
			require.Eventually(t, func() bool {
				flows := flowsOf(r.proxy)
				return len(flows) == 1 && flows[0].Down.Read > flows[0].Down.Written
			}, patience, time.Millisecond)
			require.NoError(t, r.stop())
		})
	}
}

// An urgent byte that comes together with what is in front of it does not wait for more.
func TestAnUrgentByteInOneSegmentGoesOn(t *testing.T) {
	r := newRig(t, nil)
	client, server := r.pair()
	_, err := client.Write([]byte("-")) // the loop serves it, and the urgent byte is news
	require.NoError(t, err)
	got := make([]byte, 5)
	require.NoError(t, server.SetReadDeadline(time.Now().Add(patience)))
	_, err = io.ReadFull(server, got[:1])
	require.NoError(t, err)
	raw, err := server.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_OOBINLINE, 1)
	}))
	require.NoError(t, err)
	raw, err = client.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		_, err = unix.SendmsgN(int(fd), []byte("abcX"), nil, nil, unix.MSG_OOB)
	}))
	require.NoError(t, err)
	_, err = io.ReadFull(server, got[1:])
	require.NoError(t, err)
	assert.Equal(t, "-abcX", string(got))
}
