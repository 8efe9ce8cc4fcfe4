package proxy_test

import (
	"crypto/tls"
	"encoding/pem"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/agent"
	"github.com/penstock-net/penstock/proxy/config"
)

func TestARenewedCertificateTakesAReload(t *testing.T) {
	certificate, key := certified()
	renewed, renewedKey := certified()
	own, err := tls.X509KeyPair([]byte(certificate), []byte(key))
	require.NoError(t, err)
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{own}, ClientAuth: tls.RequireAnyClientCert,
	})
	require.NoError(t, err)
	defer l.Close()
	shown := make(chan string)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				close(shown)
				return
			}
			secure := conn.(*tls.Conn)
			if secure.HandshakeContext(t.Context()) == nil {
				shown <- string(pem.EncodeToMemory(&pem.Block{
					Type: "CERTIFICATE", Bytes: secure.ConnectionState().PeerCertificates[0].Raw,
				}))
			}
			_ = conn.Close() // after which it is dialled again
		}
	}()
	far := func(certificate, key, ca string) func(*config.Config) {
		return func(c *config.Config) {
			c.Agents = []agent.Settings{{
				Name: "far", Address: l.Addr().String(),
				TLS: agent.TLS{Certificate: certificate, Key: key, CA: ca},
			}}
		}
	}
	r := newRig(t, far(certificate, key, certificate))
	assert.Equal(t, certificate, <-shown)
	_, err = r.proxy.Reload(r.with(far(renewed, "", certificate)))
	require.ErrorContains(t, err, "agents[0].tls.key: missing")
	r.reload(far(renewed, renewedKey, certificate))
	require.Eventually(t, func() bool { return <-shown == renewed }, patience, time.Millisecond)
	require.NoError(t, l.Close())
	for range shown { // the last one waits
	}
}
