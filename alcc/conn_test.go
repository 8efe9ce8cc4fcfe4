//go:build linux

package alcc

import (
	"bytes"
	"context"
	"crypto/sha256"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// tier is what holds the window of both or of one end.
type tier struct {
	name     string
	envelope string
	ownAcks  bool
}

// eachTier runs a test over each tier that this process may use.
func eachTier(t *testing.T, test func(t *testing.T, tier tier)) {
	for _, tier := range []tier{
		{name: TierEBPF, envelope: "ebpf"},
		{name: TierTCPInfo, envelope: "reno"},
		{name: TierOwnAcks, envelope: "none of the kernel's", ownAcks: true}, // so the engine ticks by itself
	} {
		t.Run(tier.name, func(t *testing.T) {
			others := goleak.IgnoreCurrent()
			e := newEngine(tier.envelope)
			if tier.name == TierEBPF && e.sockets == nil {
				t.Skipf("no eBPF: %s", e.missing)
			}
			before := sharedEngine
			sharedEngine = func() *engine { return e }
			t.Cleanup(func() {
				sharedEngine = before
				require.NoError(t, e.close())
				goleak.VerifyNone(t, others)
			})
			test(t, tier)
		})
	}
}

// peerConn is the other end of a connection.
type peerConn interface {
	net.Conn
	CloseWrite() error
}

// connect returns both ends of a connection: ours, and that of a peer, which has no controller unless both must.
func (tr tier) connect(t *testing.T, opts Options) (*Conn, peerConn) {
	t.Helper()
	opts.OwnAcks = tr.ownAcks
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ln, err := NewListener(plain, opts)
	require.NoError(t, err)
	defer ln.Close()
	var peer peerConn
	raw, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	if peer = raw.(*net.TCPConn); tr.ownAcks {
		peer, err = Wrap(raw, Options{OwnAcks: true})
		require.NoError(t, err)
	}
	ours, err := ln.Accept()
	require.NoError(t, err)
	t.Cleanup(func() {
		var wg sync.WaitGroup // one may wait for the other
		wg.Go(func() { _ = ours.Close() })
		_ = peer.Close()
		wg.Wait()
	})
	return ours.(*Conn), peer
}

// noise returns n bytes that do not repeat.
func noise(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(b)
	return b
}

func TestBytesArriveInBothDirectionsAndEndsStayApart(t *testing.T) {
	eachTier(t, func(t *testing.T, tier tier) {
		ours, peer := tier.connect(t, Options{})
		down, up := noise(9<<20), noise(5<<20)
		var wg sync.WaitGroup
		wg.Go(func() {
			n, err := ours.Write(down)
			assert.NoError(t, err)
			assert.Equal(t, len(down), n)
			assert.NoError(t, ours.CloseWrite())
		})
		sent := make(chan struct{})
		wg.Go(func() {
			defer close(sent)
			_, err := peer.Write(up)
			assert.NoError(t, err)
		})
		wg.Go(func() {
			got, err := io.ReadAll(peer) // ends by our half-close
			assert.NoError(t, err)
			assert.True(t, bytes.Equal(down, got))
			<-sent
			assert.NoError(t, peer.CloseWrite()) // after that the other direction still moves
		})
		got, err := io.ReadAll(ours)
		require.NoError(t, err)
		assert.True(t, bytes.Equal(up, got))
		wg.Wait()
		s := ours.Stats()
		assert.Equal(t, tier.name, s.Tier)
		assert.Equal(t, "penstock", s.Algorithm)
		assert.EqualValues(t, len(down), s.Delivered)
		assert.NotZero(t, s.Cwnd)
	})
}

// TestAPeerThatStopsReadingLosesNothing has both ends write 100 MB while one of them reads nothing until both are
// stuck.
func TestAPeerThatStopsReadingLosesNothing(t *testing.T) {
	const size = 100 << 20
	content := noise(size)
	want := sha256.Sum256(content)
	eachTier(t, func(t *testing.T, tier tier) {
		ours, peer := tier.connect(t, Options{})
		read := func(c net.Conn) {
			sum := sha256.New()
			n, err := io.Copy(sum, c)
			assert.NoError(t, err)
			assert.EqualValues(t, size, n)
			assert.Equal(t, want[:], sum.Sum(nil))
		}
		var wg sync.WaitGroup
		for _, end := range []peerConn{ours, peer} {
			wg.Go(func() {
				_, err := end.Write(content)
				assert.NoError(t, err)
				assert.NoError(t, end.CloseWrite())
			})
		}
		wg.Go(func() { read(ours) })
		taken, same := cc.Bytes(-1), 0
		require.Eventually(t, func() bool { // the peer's buffers are full
			now := ours.Stats().Taken
			if same++; now != taken {
				taken, same = now, 0
			}
			return taken > 0 && same > 100
		}, time.Minute, time.Millisecond)
		require.Less(t, taken, cc.Bytes(size))
		read(peer)
		wg.Wait()
	})
}

func TestAFileIsSentWithoutCopies(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	content := noise(3<<20 + 17)
	require.NoError(t, os.WriteFile(path, content, 0o600))
	eachTier(t, func(t *testing.T, tier tier) {
		ours, peer := tier.connect(t, Options{})
		f, err := os.Open(path)
		require.NoError(t, err)
		defer f.Close()
		go func() {
			n, err := ours.ReadFrom(&io.LimitedReader{R: f, N: 1 << 20})
			assert.NoError(t, err)
			assert.EqualValues(t, 1<<20, n)
			_, err = io.Copy(ours, f) // goes on where the first part ended
			assert.NoError(t, err)
			_, err = ours.ReadFrom(bytes.NewReader([]byte("end"))) // no file
			assert.NoError(t, err)
			assert.NoError(t, ours.Close())
		}()
		got, err := io.ReadAll(peer)
		require.NoError(t, err)
		assert.True(t, bytes.Equal(append(content, "end"...), got))
	})
}

func TestADeadlineEndsAWriteThatGoesOnLater(t *testing.T) {
	eachTier(t, func(t *testing.T, tier tier) {
		ours, peer := tier.connect(t, Options{Algorithm: "static:cwnd_packets=10", MaxRate: 80e6})
		content := noise(32 << 20) // more than all buffers
		require.NoError(t, ours.SetWriteDeadline(time.Now().Add(50*time.Millisecond)))
		n, err := ours.Write(content)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.Less(t, n, len(content))
		_, err = ours.Write(content)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.NoError(t, ours.SetWriteDeadline(time.Time{}))
		rest := content[n : n+min(len(content)-n, 1<<20)]
		go func() {
			_, err := ours.Write(rest)
			assert.NoError(t, err)
			assert.NoError(t, ours.Close())
		}()
		got, err := io.ReadAll(peer)
		require.NoError(t, err)
		assert.True(t, bytes.Equal(content[:n+len(rest)], got))
	})
}

func TestCloseEndsAWriteThatWaits(t *testing.T) {
	eachTier(t, func(t *testing.T, tier tier) {
		for name, end := range map[string]func(*Conn) error{"close": (*Conn).Close, "reset": (*Conn).Reset} {
			t.Run(name, func(t *testing.T) {
				ours, _ := tier.connect(t, Options{})
				ended := make(chan error, 1)
				go func() {
					_, err := ours.Write(noise(64 << 20)) // the peer does not read
					ended <- err
				}()
				require.Eventually(t, func() bool { return ours.Stats().Taken > 0 }, 10*time.Second, time.Millisecond)
				require.NoError(t, end(ours))
				require.ErrorIs(t, <-ended, net.ErrClosed)
				_, err := ours.Write([]byte("x"))
				require.ErrorIs(t, err, net.ErrClosed)
				require.ErrorIs(t, ours.Close(), net.ErrClosed)
			})
		}
	})
}

func TestAPeerThatResetsEndsReadAndWrite(t *testing.T) {
	eachTier(t, func(t *testing.T, tier tier) {
		ours, peer := tier.connect(t, Options{})
		ended := make(chan error, 1)
		go func() {
			_, err := ours.Write(noise(64 << 20))
			ended <- err
		}()
		if c, ok := peer.(*Conn); ok {
			require.NoError(t, c.Reset())
		} else {
			require.NoError(t, peer.(*net.TCPConn).SetLinger(0))
			require.NoError(t, peer.Close())
		}
		require.Error(t, <-ended)
		_, err := ours.Read(make([]byte, 1))
		assert.Error(t, err)
	})
}

func TestAServerOfHTTPSharesOneWindowPerClient(t *testing.T) {
	eachTier(t, func(t *testing.T, tier tier) {
		content := noise(4 << 20)
		var mu sync.Mutex
		groups := map[string]int{} // connections by group
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(content)
		}))
		var err error
		server.Listener, err = NewListener(server.Listener, Options{OwnAcks: tier.ownAcks})
		require.NoError(t, err)
		server.Config.ConnState = func(c net.Conn, state http.ConnState) {
			if s, ok := StatsOf(c); ok && state == http.StateNew {
				mu.Lock()
				defer mu.Unlock()
				assert.Equal(t, tier.name, s.Tier)
				groups[s.Group]++
			}
		}
		server.EnableHTTP2 = true
		server.StartTLS()
		defer server.Close()
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() {
				client := server.Client().Transport.(*http.Transport).Clone()
				client.DialContext = (&Dialer{Options: Options{OwnAcks: tier.ownAcks}}).DialContext
				client.TLSClientConfig.NextProtos, client.ForceAttemptHTTP2 = nil, i%2 == 0
				defer client.CloseIdleConnections()
				r, err := (&http.Client{Transport: client}).Get(server.URL)
				if !assert.NoError(t, err) {
					return
				}
				defer r.Body.Close()
				assert.Equal(t, 1+(i+1)%2, r.ProtoMajor)
				sum := sha256.New()
				_, err = io.Copy(sum, r.Body)
				assert.NoError(t, err)
				want := sha256.Sum256(content)
				assert.Equal(t, want[:], sum.Sum(nil))
			})
		}
		wg.Wait()
		assert.Equal(t, map[string]int{"127.0.0.1": 4}, groups)
	})
}

func TestOptionsReachTheFlow(t *testing.T) {
	eachTier(t, func(t *testing.T, tier tier) {
		ours, peer := tier.connect(t, Options{
			Algorithm: "cubic", Class: flow.DelaySensitive,
			Group: func(_, remote net.Addr) string { return "subscriber of " + remote.Network() },
		})
		s := ours.Stats()
		assert.Equal(t, "subscriber of tcp", s.Group)
		assert.Equal(t, "cubic", s.Algorithm)
		assert.Equal(t, flow.DelaySensitive, s.Class)
		assert.Equal(t, peer.LocalAddr().String(), ours.RemoteAddr().String())
	})
}

func TestWhatCannotBeControlledPassesThrough(t *testing.T) {
	before := sharedEngine
	defer func() { sharedEngine = before }()
	sharedEngine = func() *engine { return &engine{missing: "no such kernel"} }
	for name, c := range map[string]struct {
		opts Options
		want []string
	}{
		"this machine has no datapath": {Options{}, []string{"no such kernel"}},
		"none is asked for":            {Options{Algorithm: "none"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			ours, peer := tier{}.connect(t, c.opts)
			assert.Equal(t, Stats{Tier: TierNone, Missing: c.want}, ours.Stats())
			_, err := ours.ReadFrom(bytes.NewReader([]byte("hello")))
			require.NoError(t, err)
			got := make([]byte, 5)
			_, err = io.ReadFull(peer, got)
			require.NoError(t, err)
			assert.Equal(t, "hello", string(got))
			require.NoError(t, ours.Reset())
			_, err = peer.Read(got)
			assert.ErrorIs(t, err, syscall.ECONNRESET)
		})
	}
}

func TestErrorsSayWhatToDo(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	for want, call := range map[string]func() error{
		`Options.Algorithm: no algorithm "cubix"`: func() error {
			_, err := NewListener(nil, Options{Algorithm: "cubix"})
			return err
		},
		"a *net.pipe is no *net.TCPConn": func() error {
			_, err := Wrap(a, Options{})
			return err
		},
		"Options: weight": func() error {
			_, err := (&Dialer{Options: Options{Weight: -1}}).DialContext(context.Background(), "tcp", "127.0.0.1:1")
			return err
		},
	} {
		require.ErrorContains(t, call(), want)
	}
}
