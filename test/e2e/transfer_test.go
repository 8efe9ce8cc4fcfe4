//go:build linux

package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

const megabyte = 1 << 20

// random is n bytes of a seeded stream.
func random(seed uint64, n int64) io.Reader {
	var key [32]byte
	key[0], key[1] = byte(seed), byte(seed>>8)
	return io.LimitReader(rand.NewChaCha8(key), n)
}

func digest(r io.Reader) (string, int64, error) {
	h := sha256.New()
	n, err := io.Copy(h, r)
	return hex.EncodeToString(h.Sum(nil)), n, err
}

func digestOf(seed uint64, n int64) string {
	d, _, _ := digest(random(seed, n))
	return d
}

// exchange sends n bytes each way at once and checks what arrives.
func exchange(t *testing.T, a, b *net.TCPConn, n int64) {
	t.Helper()
	var wg sync.WaitGroup
	send := func(c *net.TCPConn, seed uint64) {
		_, err := io.Copy(struct{ io.Writer }{c}, random(seed, n))
		assert.NoError(t, err)
		assert.NoError(t, c.CloseWrite())
	}
	receive := func(c *net.TCPConn, seed uint64) {
		got, size, err := digest(c)
		assert.NoError(t, err)
		assert.Equal(t, n, size)
		assert.Equal(t, digestOf(seed, n), got)
	}
	wg.Go(func() { send(a, 1) })
	wg.Go(func() { send(b, 2) })
	wg.Go(func() { receive(a, 2) })
	wg.Go(func() { receive(b, 1) })
	wg.Wait()
}

// warm has more underway each way than goes without an algorithm.
func warm(t *testing.T, a, b net.Conn) {
	t.Helper()
	const size = 100_000
	for _, way := range []struct{ from, to net.Conn }{{a, b}, {b, a}} {
		_, err := way.from.Write(make([]byte, size))
		require.NoError(t, err)
		_, err = io.CopyN(io.Discard, way.to, size)
		require.NoError(t, err)
	}
}

func TestBytesArriveIntactBothWaysAtOnce(t *testing.T) {
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			s := w.open(t, "")
			client, server := w.pair(s)
			seen := server.RemoteAddr().(*net.TCPAddr).AddrPort().Addr()
			want := map[string]netip.Addr{"client": s.ClientAddr.V4, "edge": s.EdgeFar.V4}[w.sees]
			if w.v6 {
				want = map[string]netip.Addr{"client": s.ClientAddr.V6, "edge": s.EdgeFar.V6}[w.sees]
			}
			assert.Equal(t, want, seen, "the address the server sees")
			warm(t, client, server)
			flow := s.proxy.relaying(1)[0]
			assert.Equal(t, w.envelope(s.proxy), leg(t, flow, "client")["envelope"])
			assert.Equal(t, s.proxy.envelope(), leg(t, flow, "server")["envelope"])
			size := int64(20 * megabyte)
			switch {
			case w.name == ways[0].name:
				size = 50 * megabyte
			case w.tunnel != nil && raced():
				size /= 4 // it also encrypts under the race detector
			}
			exchange(t, client, server, size)
		})
	}
}

func TestUnmanagedBytesArriveIntact(t *testing.T) {
	w := ways[0]
	s := w.open(t, "defaults: {algorithm: none}\n")
	client, server := w.pair(s)
	exchange(t, client, server, 50*megabyte)
}

// TestOtherEnvelopesCarryBytes is of those that a relay can stand above beside the
// tiers' own, over which every algorithm crosses a cellular link.
func TestOtherEnvelopesCarryBytes(t *testing.T) {
	for _, envelope := range []string{"cubic", "reno"} {
		t.Run(envelope, func(t *testing.T) {
			w := ways[0]
			s := w.open(t, "envelope: "+envelope+"\n")
			client, server := w.pair(s)
			warm(t, client, server)
			flow := s.proxy.relaying(1)[0]
			assert.Equal(t, envelope, leg(t, flow, "client")["envelope"])
			assert.Equal(t, envelope, leg(t, flow, "server")["envelope"])
			exchange(t, client, server, 5*megabyte)
		})
	}
}

// manyAtOnce has so many connections each get the bytes of its own number, which
// serve, at the server, sends after begin. wait returns once all have them.
func (w way) manyAtOnce(s *scene, flows int, size int64, serve func(net.Conn),
	begin func(i uint64, conn *net.TCPConn),
) (wait func()) {
	need.Serve(s.t, s.listen(w.target(s, servicePort)), serve)
	var wg sync.WaitGroup
	for i := range uint64(flows) {
		wg.Go(func() {
			conn, err := w.connect(s, w.target(s, servicePort))
			if !assert.NoError(s.t, err) {
				return
			}
			defer conn.Close()
			begin(i, conn)
			got, n, err := digest(conn)
			assert.NoError(s.t, err)
			assert.Equal(s.t, size, n)
			assert.Equal(s.t, digestOf(i, size), got, "connection %d", i)
		})
	}
	return wg.Wait
}

func TestManyFlowsAtOnce(t *testing.T) {
	const flows = 200
	size := int64(megabyte)
	if raced() && present.envelope != kernel.EBPF {
		size /= 8 // the race detector makes polling so many sockets the most of the work
	}
	w := ways[0]
	s := w.open(t, "")
	wait := w.manyAtOnce(s, flows, size, func(conn net.Conn) { // echo
		_, _ = io.Copy(conn, conn)
	}, func(i uint64, conn *net.TCPConn) {
		go func() {
			_, _ = io.Copy(struct{ io.Writer }{conn}, random(i, size))
			_ = conn.CloseWrite()
		}()
	})
	wait()
	assert.GreaterOrEqual(t, s.proxy.metric("penstock_flows_total"), float64(flows))
}

func TestRealCurlAgainstARealServer(t *testing.T) {
	need.Programs(t, "curl")
	const size = 10 * megabyte
	edge := fmt.Sprintf("10.77.1.1:%d", port)
	tests := []struct {
		way  way
		args []string
	}{
		{ways[0], nil},
		{ways[1], nil},
		{ways[4], nil},
		{ways[6], []string{"--socks5", edge, "--proxy-user", "ann:secret"}},
		{ways[7], []string{"--proxytunnel", "--proxy", "http://" + edge}},
		{ways[7], []string{"--proxy", "http://" + edge}}, // asks for whole URLs
	}
	for i, tt := range tests {
		t.Run(fmt.Sprintf("%d %s", i, tt.way.name), func(t *testing.T) {
			s := tt.way.open(t, "")
			target := tt.way.target(s, servicePort)
			server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodPut {
					got, _, _ := digest(r.Body)
					fmt.Fprint(w, got)
					return
				}
				w.Header().Set("Content-Length", fmt.Sprint(size))
				_, _ = io.Copy(w, random(5, size))
			})}
			ln := s.listen(target)
			go func() { _ = server.Serve(ln) }()
			t.Cleanup(func() { server.Close() })

			args := append([]string{"--silent", "--show-error", "--fail", "--max-time", "60", "--noproxy", ""},
				tt.args...)
			down := s.Client.Command(t.Context(), "curl", append(args, "http://"+target.String()+"/")...)
			body, err := down.Output()
			require.NoError(t, err)
			got, _, _ := digest(strings.NewReader(string(body)))
			assert.Equal(t, digestOf(5, size), got)

			up := s.Client.Command(t.Context(), "curl",
				append(args, "--upload-file", "-", "http://"+target.String()+"/x")...)
			up.Stdin = random(6, size)
			answer, err := up.Output()
			require.NoError(t, err)
			assert.Equal(t, digestOf(6, size), string(answer))
		})
	}
}
