package quic

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/datapathtest"
)

func clock() func() cc.Time {
	start := time.Now() //nolint:forbidigo // quic-go runs on it
	return func() cc.Time { return cc.Time(time.Since(start)) + 1 }
}

func certificate(t testing.TB) tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	form := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"},
		NotAfter: time.Now().Add(time.Hour), //nolint:forbidigo // TLS runs on it
	}
	der, err := x509.CreateCertificate(rand.Reader, form, form, &key.PublicKey, key)
	require.NoError(t, err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// wire is a QUIC connection over loopback: streams that the client opens come
// out at the server, answered with 200.
type wire struct {
	client   *http3.ClientConn
	conn     *quic.Conn
	accepted chan *Conn
}

func newWire(t testing.TB) *wire {
	now := clock()
	w := &wire{accepted: make(chan *Conn, 1)}
	udp, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	server := &http3.Server{
		TLSConfig:  http3.ConfigureTLSConfig(&tls.Config{Certificates: []tls.Certificate{certificate(t)}}),
		QUICConfig: &quic.Config{Tracer: Tracer(now, nil)},
		Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			rw.WriteHeader(http.StatusOK)
			s, err := rw.(http3.HTTPStreamer).HTTPStream()
			c := NewConn(udp.LocalAddr(), nil, nil)
			if assert.NoError(t, err) && assert.NoError(t, c.Admit(s)) {
				w.accepted <- c
			}
		}),
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(udp) }()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	w.conn, err = quic.DialAddr(ctx, udp.LocalAddr().String(),
		&tls.Config{InsecureSkipVerify: true, NextProtos: []string{http3.NextProtoH3}}, &quic.Config{Tracer: Tracer(now, nil)})
	require.NoError(t, err)
	transport := &http3.Transport{}
	w.client = transport.NewClientConn(w.conn)
	t.Cleanup(func() {
		assert.NoError(t, w.conn.CloseWithError(0, ""))
		assert.NoError(t, transport.Close())
		assert.NoError(t, server.Close())
		<-served
		assert.NoError(t, udp.Close())
	})
	return w
}

// open returns both ends of a new stream, the server's first.
func (w *wire) open(t testing.TB) (server, client *Conn) {
	s, err := w.client.OpenRequestStream(context.Background())
	require.NoError(t, err)
	require.NoError(t, s.SendRequestHeader(&http.Request{Method: http.MethodConnect, URL: &url.URL{Host: "192.0.2.1:443"}, Host: "192.0.2.1:443"}))
	answer, err := s.ReadResponse()
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, answer.StatusCode)
	client = NewConn(w.conn.LocalAddr(), w.conn.RemoteAddr(), nil)
	require.NoError(t, client.Admit(s))
	return <-w.accepted, client
}

func TestStreamsConform(t *testing.T) {
	datapathtest.Run(t, func(t *testing.T) (a, b datapath.Conn) {
		return newWire(t).open(t)
	})
}
