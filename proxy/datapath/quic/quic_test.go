package quic

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/quic-go/quic-go/qlogwriter"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/certs"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/datapathtest"
)

func clock() func() cc.Time {
	start := time.Now() //nolint:forbidigo // quic-go runs on it
	return func() cc.Time { return cc.Time(time.Since(start)) + 1 }
}

// wire is a QUIC connection over loopback: streams that the client opens come
// out at the server, answered with 200.
type wire struct {
	client   *http3.ClientConn
	conn     *quic.Conn
	accepted chan *Conn
	served   atomic.Pointer[Trace]
}

func newWire(t testing.TB, losing int64) *wire { return newWireWith(t, losing, false) }

func newWireWith(t testing.TB, losing int64, datagrams bool) *wire {
	now := clock()
	w := &wire{accepted: make(chan *Conn, 1)}
	udp, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	var socket net.PacketConn = udp
	if losing > 0 {
		socket = &lossy{PacketConn: udp, each: losing}
	}
	server := &http3.Server{
		EnableDatagrams: datagrams,
		TLSConfig: http3.ConfigureTLSConfig(&tls.Config{
			Certificates: []tls.Certificate{certs.SelfSigned("localhost")},
		}),
		QUICConfig: &quic.Config{Tracer: Tracer(now, nil)},
		Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			rw.WriteHeader(http.StatusOK)
			s, err := rw.(http3.HTTPStreamer).HTTPStream()
			w.served.Store(s.QlogTrace().(*Trace))
			c := NewConn(udp.LocalAddr(), nil, nil)
			if assert.NoError(t, err) && assert.NoError(t, c.Admit(s)) {
				w.accepted <- c
			}
		}),
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(socket) }()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	w.conn, err = quic.DialAddr(ctx, udp.LocalAddr().String(),
		&tls.Config{InsecureSkipVerify: true, NextProtos: []string{http3.NextProtoH3}},
		&quic.Config{Tracer: Tracer(now, nil), EnableDatagrams: datagrams})
	require.NoError(t, err)
	transport := &http3.Transport{EnableDatagrams: datagrams}
	w.client = transport.NewClientConn(w.conn)
	t.Cleanup(func() {
		assert.NoError(t, w.conn.CloseWithError(0, ""))
		assert.NoError(t, transport.Close())
		assert.NoError(t, server.Close())
		assert.ErrorIs(t, <-served, http.ErrServerClosed)
		assert.NoError(t, udp.Close())
	})
	return w
}

// trace is the server's.
func (w *wire) trace() *Trace { return w.served.Load() }

// open returns both ends of a new stream, the server's first.
func (w *wire) open(t testing.TB) (server, client *Conn) {
	s, err := w.client.OpenRequestStream(context.Background())
	require.NoError(t, err)
	require.NoError(t, s.SendRequestHeader(connectRequest()))
	answer, err := s.ReadResponse() //nolint:bodyclose // the body is the stream, which the leg closes
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, answer.StatusCode)
	client = NewConn(w.conn.LocalAddr(), w.conn.RemoteAddr(), nil)
	require.NoError(t, client.Admit(s))
	return <-w.accepted, client
}

func connectRequest() *http.Request {
	return &http.Request{
		Method: http.MethodConnect, URL: &url.URL{Host: "192.0.2.1:443"}, Host: "192.0.2.1:443",
	}
}

// lossy loses one packet in so many, once the connection stands.
type lossy struct {
	net.PacketConn
	each, sent int64
}

func (l *lossy) WriteTo(b []byte, to net.Addr) (int, error) {
	if n := atomic.AddInt64(&l.sent, 1); n > 20 && n%l.each == 0 {
		return len(b), nil
	}
	return l.PacketConn.WriteTo(b, to)
}

func TestStreamsConform(t *testing.T) {
	datapathtest.Run(t, func(t *testing.T) (a, b datapath.Conn) {
		return newWire(t, 0).open(t)
	}, nil)
}

func TestStreamsConformWherePacketsAreLost(t *testing.T) {
	datapathtest.Run(t, func(t *testing.T) (a, b datapath.Conn) {
		return newWire(t, 29).open(t)
	}, nil)
}

// Several streams in one connection, packets lost among them: what each reports
// is its own.
func TestStreamsOfOneConnectionAreToldApart(t *testing.T) {
	w := newWire(t, 29)
	sizes := []int{1, 1200, 64 << 10, 1 << 20, 2 << 20}
	last := make([]flow.Report, len(sizes))
	all := make(chan struct{}, len(sizes))
	var done sync.WaitGroup
	for i, size := range sizes {
		server, client := w.open(t)
		arrived := false
		server.Observe(func(r flow.Report) {
			last[i] = r
			if r.Acked == cc.Bytes(size) && !arrived {
				arrived = true
				all <- struct{}{}
			}
		})
		done.Go(func() {
			_, err := server.Write(make([]byte, size))
			assert.NoError(t, err)
			assert.NoError(t, server.CloseWrite())
		})
		done.Go(func() {
			n, err := io.Copy(io.Discard, client)
			assert.NoError(t, err)
			assert.EqualValues(t, size, n)
		})
		t.Cleanup(func() {
			assert.NoError(t, server.Close())
			assert.NoError(t, client.Close())
		})
	}
	done.Wait()
	for range sizes {
		<-all
	}
	lost := cc.Bytes(0)
	trace := w.trace()
	trace.mu.Lock()
	defer trace.mu.Unlock()
	for i, size := range sizes {
		assert.Equal(t, cc.Bytes(size), last[i].Written)
		assert.Zero(t, last[i].Pipe)
		assert.Zero(t, last[i].Unsent)
		lost += last[i].Lost
	}
	assert.Positive(t, lost, "the case is there")
}

func TestWhatAConnectionTakesWithItIsNotAwaited(t *testing.T) {
	w := newWire(t, 0)
	server, client := w.open(t)
	n, err := server.Undelivered()
	require.NoError(t, err)
	assert.Zero(t, n)
	require.NoError(t, server.SetWriteDeadline(time.Unix(1, 0)))
	_, err = server.Write(make([]byte, 64<<10)) // the client does not read
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	n, err = server.Undelivered()
	require.NoError(t, err)
	assert.Positive(t, n)
	assert.False(t, server.Aborted())
	require.NoError(t, w.conn.CloseWithError(7, ""))
	_, err = server.Read(make([]byte, 1))
	require.ErrorIs(t, err, syscall.ECONNRESET)
	assert.True(t, server.Aborted())
	n, err = server.Undelivered()
	require.NoError(t, err)
	assert.Zero(t, n)
	require.NoError(t, server.Close())
	require.NoError(t, client.Close())
}

func TestALegNeedsATraceOfOurs(t *testing.T) {
	c := NewConn(nil, nil, nil)
	assert.ErrorContains(t, c.Admit(untraced{}), "Config.Tracer")
	_, err := c.Read(make([]byte, 1))
	assert.ErrorContains(t, err, "not been answered")
	refused := 0
	c = NewConn(nil, nil, func() { refused++ })
	require.NoError(t, c.Reset())
	assert.Error(t, c.Close())
	assert.Equal(t, 1, refused)
	assert.ErrorIs(t, c.CloseWrite(), net.ErrClosed)
}

type untraced struct{ Stream }

func (untraced) QlogTrace() qlogwriter.Trace { return nil }
