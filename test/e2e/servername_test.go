//go:build linux

package e2e

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/certs"
)

// certificate is one for the names, signed by itself.
func certificate(names ...string) (tls.Certificate, *x509.CertPool) {
	cert, roots := certs.SelfSigned(names...), x509.NewCertPool()
	roots.AddCert(cert.Leaf)
	return cert, roots
}

const byName = `rules:
  - {name: video, match: {server_name: ["*.video.example"]}, algorithm: vegas}
  - {name: ads, match: {server_name: [ads.example]}, refuse: true}
  - {name: rest, algorithm: cubic}
limits: {dial_timeout: 1s, handshake_timeout: 5s, server_name_wait: 30s}
`

// TestTheServerNameDecides is over ways that are captured and that ask. The wait
// is as long as the test's patience: whoever is served was not kept waiting.
func TestTheServerNameDecides(t *testing.T) {
	const size = 4 * megabyte
	for _, w := range []way{ways[0], ways[1], ways[6], ways[7]} {
		t.Run(w.name, func(t *testing.T) {
			if w.capture != nil {
				needsPrivilege(t)
			}
			s := newScene(t)
			s.start("listeners:\n  - name: way\n    " + w.config + "\ntelemetry: {address: " +
				"\"" + telemetryAddr + "\"}\nlog: {level: debug}\n" + byName)
			s.capture(w)
			identity, roots := certificate("cdn.video.example", "other.example", "ads.example")

			for _, row := range []struct{ server, rule, algorithm string }{
				{"cdn.video.example", "video", "vegas"},
				{"other.example", "rest", "cubic"},
			} {
				client, server := w.pair(s)
				go func() {
					c := tls.Server(server, &tls.Config{Certificates: []tls.Certificate{identity}})
					_, _ = io.Copy(c, random(7, size))
					_, _ = c.Read(make([]byte, 1)) // the client has seen /flows
					c.Close()
				}()
				c := tls.Client(client, &tls.Config{ServerName: row.server, RootCAs: roots})
				got, n, err := digest(io.LimitReader(c, size))
				require.NoError(t, err)
				assert.EqualValues(t, size, n)
				assert.Equal(t, digestOf(7, size), got)
				flow := s.proxy.relaying(1)[0]
				assert.Equal(t, row.rule, flow["rule"])
				assert.Equal(t, row.server, flow["server_name"])
				for _, direction := range []string{"down", "up"} {
					assert.Equal(t, row.algorithm, flow[direction].(map[string]any)["algorithm"])
				}
				require.NoError(t, c.Close())
				client.Close()
				require.Eventually(t, func() bool { return len(s.proxy.flows()) == 0 }, patience, 5*time.Millisecond)
			}

			client, _ := w.pair(s)
			err := tls.Client(client, &tls.Config{ServerName: "ads.example", RootCAs: roots}).Handshake()
			require.ErrorIs(t, err, syscall.ECONNRESET, "the name is refused")

			client, server := w.pair(s)
			_, err = io.WriteString(server, "220 welcome\r\n")
			require.NoError(t, err)
			banner := make([]byte, 13)
			_, err = io.ReadFull(client, banner)
			require.NoError(t, err, "a server that speaks first is heard at once")
			assert.Equal(t, "rest", s.proxy.relaying(1)[0]["rule"])
			assert.NotContains(t, s.proxy.page("/metrics"), "video.example", "a name in a label")
		})
	}
}

func TestWhatShowsNoNameCanBeRefused(t *testing.T) {
	w := ways[7]
	s := newScene(t)
	s.start("listeners:\n  - name: way\n    " + w.config + `
rules:
  - {name: ads, match: {server_name: [ads.example]}, refuse: true, undecided: refuse}
limits: {server_name_wait: 30s}
telemetry: {address: "` + telemetryAddr + `"}
`)
	client, server := w.pair(s)
	_, err := io.WriteString(server, "220 welcome\r\n")
	require.NoError(t, err)
	_, err = client.Read(make([]byte, 1))
	require.ErrorIs(t, err, syscall.ECONNRESET, "a server that speaks first")

	client, _ = w.pair(s)
	_, err = io.WriteString(client, "\x00neither TLS nor HTTP")
	require.NoError(t, err)
	_, err = client.Read(make([]byte, 1))
	require.ErrorIs(t, err, syscall.ECONNRESET, "first bytes without a name")

	client, server = w.pair(s)
	const request = "GET / HTTP/1.1\r\nHost: other.example\r\n\r\n"
	_, err = io.WriteString(client, request)
	require.NoError(t, err)
	got := make([]byte, len(request))
	_, err = io.ReadFull(server, got)
	require.NoError(t, err)
	assert.Equal(t, request, string(got), "another name passes")
}
