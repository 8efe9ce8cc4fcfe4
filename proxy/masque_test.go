package proxy_test

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	quicgo "github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/certs"
	"github.com/penstock-net/penstock/proxy/config"
)

const masqueConfig = `
listeners:
  - name: masque
    mode: masque
    address: "127.0.0.1:0"
    tls: {certificate: cert.pem, key: key.pem}
    masque: {pool: [10.10.0.0/24], tokens_file: tokens}
`

// certified is a certificate for tests and its key as PEM.
func certified() (certificate, key string) {
	return certs.PEM(certs.SelfSigned("vpn.test", "127.0.0.1"))
}

// stream asks a MASQUE listener for a TCP connection.
func stream(t *testing.T, at net.Addr, to, token string) (*http3.RequestStream, int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	conn, err := quicgo.DialAddr(ctx, at.String(), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{http3.NextProtoH3}}, nil) //nolint:gosec // the test signed it itself
	require.NoError(t, err)
	transport := &http3.Transport{}
	t.Cleanup(func() {
		assert.NoError(t, conn.CloseWithError(0, ""))
		assert.NoError(t, transport.Close())
	})
	s, err := transport.NewClientConn(conn).OpenRequestStream(ctx)
	require.NoError(t, err)
	require.NoError(t, s.SendRequestHeader(&http.Request{
		Method: http.MethodConnect, URL: &url.URL{Host: to}, Host: to, Header: http.Header{"Authorization": {"Bearer " + token}},
	}))
	answer, err := s.ReadResponse() //nolint:bodyclose // the stream is the body
	require.NoError(t, err)
	return s, answer.StatusCode
}

// masqueFiles writes masqueConfig with a token of phone's, and loads it.
func masqueFiles(t *testing.T) (path string, cfg config.Config) {
	t.Helper()
	dir := t.TempDir()
	certificate, key := certified()
	for name, text := range map[string]string{
		"c.yaml": masqueConfig, "cert.pem": certificate, "key.pem": key, "tokens": "phone phone-0123456789abcdef\n",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	path = filepath.Join(dir, "c.yaml")
	cfg, err := config.Load(path)
	require.NoError(t, err)
	return path, cfg
}

func TestAMASQUEClientReachesAServerWithItsToken(t *testing.T) {
	path, cfg := masqueFiles(t)
	require.NoError(t, cfg.Validate(), "as it is after its files were read")
	cfg.Listeners[0].Allow = loopbackAllowed // a stream is no packet: its client may name the address
	r := newRig(t, func(c *config.Config) { c.Listeners, c.Defaults.Algorithm = cfg.Listeners, "cubic" })
	at := r.proxy.Addrs()["masque"]

	s, status := stream(t, at, r.backend.Addr().String(), "phone-0123456789abcdef")
	require.Equal(t, http.StatusOK, status)
	server, err := r.backend.AcceptTCP()
	require.NoError(t, err)
	t.Cleanup(func() { _ = server.Close() })
	send(t, server, "hello")
	require.NoError(t, s.SetReadDeadline(time.Now().Add(patience)))
	got := make([]byte, 5)
	_, err = s.Read(got)
	require.NoError(t, err)
	assert.Equal(t, "hello", string(got))
	flows := flowsOf(r.proxy)
	require.Len(t, flows, 1)
	assert.Equal(t, "phone", flows[0].Peer)
	assert.Equal(t, "down|masque|through phone", flows[0].Down.Flow.Group)

	_, status = stream(t, at, r.backend.Addr().String(), "tablet-0123456789abcdef")
	assert.Equal(t, http.StatusUnauthorized, status)
	assert.EqualValues(t, 1, r.proxy.Tunnels()[0].Refused)

	// Tokens and certificates are reread.
	require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(path), "tokens"),
		[]byte("phone phone-0123456789abcdef\ntablet tablet-0123456789abcdef\n"), 0o600))
	again, err := config.Load(path)
	require.NoError(t, err)
	again.Listeners[0].Allow = loopbackAllowed
	r.reload(func(c *config.Config) { c.Listeners = again.Listeners })
	_, status = stream(t, at, r.backend.Addr().String(), "tablet-0123456789abcdef")
	assert.Equal(t, http.StatusOK, status)

	counted := func() (names []string) {
		for _, p := range r.proxy.Counters().Peers {
			names = append(names, p.Peer)
		}
		return names
	}
	require.Equal(t, []string{"phone", "tablet"}, counted())
	again.Listeners[0].MASQUE.Tokens = again.Listeners[0].MASQUE.Tokens[1:]
	r.reload(func(c *config.Config) { c.Listeners = again.Listeners })
	require.Eventually(t, func() bool { return slices.Equal([]string{"tablet"}, counted()) }, patience,
		time.Millisecond, "who has no token any more is not counted any more")
}
