package mobile_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/alcc/mobile"
	"github.com/penstock-net/penstock/alcc/relay"
	"github.com/penstock-net/penstock/internal/certs"
)

const secret = "a token of a test" //nolint:gosec // of a test

// startRelay starts a relay that reaches this machine, and returns settings for it.
func startRelay(t *testing.T, s relay.Server) *mobile.Settings {
	t.Helper()
	ca := certs.NewAuthority()
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		Certificates: []tls.Certificate{ca.Issue("relay", "127.0.0.1")}, MinVersion: tls.VersionTLS13,
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	s.Token = secret
	go func() { ended <- s.Serve(ctx, ln) }()
	t.Cleanup(func() {
		cancel()
		assert.NoError(t, <-ended)
	})
	return &mobile.Settings{Server: ln.Addr().String(), Token: secret, Certificate: ca.PEM()}
}

var loopback = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}

func startProxy(t *testing.T, s *mobile.Settings) *mobile.Proxy {
	t.Helper()
	p, err := mobile.Start(s)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, p.Close()) })
	return p
}

// content is a file of random bytes, and they.
func content(t *testing.T, n int) (path string, text []byte) {
	t.Helper()
	text = make([]byte, n)
	_, _ = rand.Read(text) // never fails
	path = filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, text, 0o600))
	return path, text
}

// Apps reach a server by SOCKS5 and by CONNECT: its answer comes whole, and what they send arrives.
func TestAppsReachServersThroughTheRelay(t *testing.T) {
	_, text := content(t, 3<<20)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(w, r.Body)
	}))
	defer server.Close()
	secure := httptest.NewTLSServer(server.Config.Handler) // for which a client of HTTP asks with CONNECT
	defer secure.Close()
	p := startProxy(t, startRelay(t, relay.Server{Allow: loopback}))
	for scheme, to := range map[string]*httptest.Server{"socks5": server, "http": secure} {
		client := to.Client()
		transport := client.Transport.(*http.Transport).Clone()
		transport.Proxy = http.ProxyURL(&url.URL{Scheme: scheme, Host: p.Address()})
		client.Transport = transport
		answer, err := client.Post(to.URL, "text/plain", bytes.NewReader(text))
		require.NoError(t, err, scheme)
		echo, err := io.ReadAll(answer.Body)
		require.NoError(t, err, scheme)
		require.NoError(t, answer.Body.Close())
		assert.True(t, bytes.Equal(text, echo), scheme)
		transport.CloseIdleConnections()
	}
	var stats map[string]any
	require.NoError(t, json.Unmarshal([]byte(p.Stats().ToJSON()), &stats))
	assert.Equal(t, "mdi", stats["algorithm"])
	assert.EqualValues(t, 2, stats["connections"])
	assert.Greater(t, stats["sent_bytes"], 6e6)
	assert.Greater(t, stats["received_bytes"], 6e6)
}

// counter is an UploadWatcher that ends the upload once it has seen enough.
type counter struct{ sent, enough int64 }

func (c *counter) OnProgress(sent, _ int64) bool {
	c.sent = sent
	return sent < c.enough
}

func TestUploadSendsAFile(t *testing.T) {
	path, text := content(t, 2<<20)
	var got []byte
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got, _ = io.ReadAll(r.Body)
		if r.URL.Path != "/upload" || r.Method != http.MethodPut {
			w.WriteHeader(http.StatusForbidden)
		}
	}))
	defer server.Close()
	for _, algorithm := range strings.Split("mdi copa verus sprout none", " ") {
		settings := startRelay(t, relay.Server{Allow: loopback})
		settings.Algorithm = algorithm
		p := startProxy(t, settings)
		watcher := &counter{enough: 1 << 40}
		require.NoError(t, p.UploadFile(path, server.URL+"/upload", watcher), algorithm)
		assert.True(t, bytes.Equal(text, got), algorithm)
		assert.EqualValues(t, len(text), watcher.sent)
		s := p.Stats()
		assert.Equal(t, 1, s.Open, "the connection stays for the next upload")
		if algorithm != "none" && algorithm != "sprout" { // which are heard of otherwise, or not
			assert.Positive(t, s.MinRTTMillis, algorithm)
			assert.Positive(t, s.CwndBytes, algorithm)
		}
	}
	p := startProxy(t, startRelay(t, relay.Server{Allow: loopback}))
	require.ErrorContains(t, p.UploadFile(path, server.URL+"/elsewhere", nil), "/elsewhere answers 403 Forbidden")
	require.ErrorContains(t, p.UploadFile(path, server.URL+"/upload", &counter{enough: 1 << 20}),
		"ended by its watcher")
	require.ErrorContains(t, p.UploadFile(path+"x", server.URL, nil), "no such file")
}

// A relay serves those who know its token, and reaches no place that it must not.
func TestARelayRefuses(t *testing.T) {
	path, _ := content(t, 1)
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	port := server.Listener.Addr().(*net.TCPAddr).Port
	guard := startProxy(t, startRelay(t, relay.Server{}))
	for _, host := range []string{
		"127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "[::]", "10.0.0.1", "192.168.1.1",
		"169.254.169.254", "[fe80::1]", "[fd00::1]", "100.64.0.1", "224.0.0.1", "[64:ff9b::7f00:1]", "[2002:7f00:1::1]",
	} {
		err := guard.UploadFile(path, fmt.Sprintf("http://%s:%d/", host, port), nil)
		require.ErrorContains(t, err, "the relay does not reach such addresses", host)
	}
	assert.Contains(t, guard.Stats().LastError, "does not reach")

	guess := startRelay(t, relay.Server{Allow: loopback})
	guess.Token = "another token, as long"
	require.ErrorContains(t, startProxy(t, guess).UploadFile(path, server.URL, nil), "the token is not the relay's")

	gone := startProxy(t, startRelay(t, relay.Server{Allow: loopback}))
	server.Close()
	require.ErrorContains(t, gone.UploadFile(path, server.URL, nil), "the destination cannot be reached")

	untrusted := startRelay(t, relay.Server{Allow: loopback})
	untrusted.Certificate = certs.NewAuthority().PEM()
	err := startProxy(t, untrusted).UploadFile(path, server.URL, nil)
	require.ErrorContains(t, err, "certificate signed by unknown authority")
}

func TestSettingsAreChecked(t *testing.T) {
	for want, change := range map[string]func(*mobile.Settings){
		"Settings.Server is \"\", but must be HOST:PORT":      func(s *mobile.Settings) { s.Server = "" },
		"Settings.Token must be one line of at least 16":      func(s *mobile.Settings) { s.Token = "short" },
		"Settings.Token must be one line of":                  func(s *mobile.Settings) { s.Token += "\r\nHost: x" },
		"Settings.Algorithm: alcc: Options.Algorithm: no alg": func(s *mobile.Settings) { s.Algorithm = "mdy" },
		"Settings.Certificate holds no certificate":           func(s *mobile.Settings) { s.Certificate = "x" },
		"Settings.Certificate is for TLS": func(s *mobile.Settings) {
			s.Certificate, s.Plain = "x", true
		},
		"Settings.MaxConnections is -1":        func(s *mobile.Settings) { s.MaxConnections = -1 },
		"Settings.Listen: other devices reach": func(s *mobile.Settings) { s.Listen = "0.0.0.0:0" },
		"Settings.Listen: listen":              func(s *mobile.Settings) { s.Listen = "127.0.0.1:x" },
	} {
		s := &mobile.Settings{Server: "relay.test:1", Token: secret}
		change(s)
		_, err := mobile.Start(s)
		assert.ErrorContains(t, err, want)
	}
	_, err := mobile.Start(nil)
	require.ErrorContains(t, err, "needs Settings")
	assert.Contains(t, strings.Split(mobile.ListAlgorithms(), "\n"), mobile.DefaultAlgorithm)
	shared := startProxy(t, &mobile.Settings{Server: "relay.test:1", Token: secret, Listen: "0.0.0.0:0", Shared: true})
	assert.NotEmpty(t, shared.Address())
}

// What apps may ask for and what not, byte by byte.
func TestAppsAreAnswered(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	port := server.Listener.Addr().(*net.TCPAddr).Port
	to := string([]byte{byte(port >> 8), byte(port)})
	p := startProxy(t, startRelay(t, relay.Server{Allow: loopback[:1]}))
	connect := fmt.Sprintf("CONNECT 127.0.0.1:%d HTTP/1.1\r\n\r\n", port)
	const done = "\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00"
	for asks, want := range map[string]string{
		"\x05\x01\x00\x05\x01\x00\x01\x7f\x00\x00\x01" + to:                       "\x05\x00" + done,
		"\x05\x02\x02\x00\x05\x01\x00\x03\x09127.0.0.1" + to:                      "\x05\x00" + done,
		"\x05\x01\x00\x05\x01\x00\x04" + strings.Repeat("\x00", 15) + "\x01" + to: "\x05\x00\x05\x02",
		"\x05\x01\x02": "\x05\xff",
		"\x05\x01\x00\x05\x02\x00\x01\x7f\x00\x00\x01" + to: "\x05\x00\x05\x07",
		"\x05\x01\x00\x05\x01\x00\x02":                      "\x05\x00\x05\x08",
		"GET http://127.0.0.1/ HTTP/1.1\r\n\r\n":            "HTTP/1.1 405 ",
		"CONNECT [::1]:1 HTTP/1.1\r\n\r\n":                  "HTTP/1.1 403 ",
		connect:                                             "HTTP/1.1 200 OK\r\n\r\n",
		connect + "GET / HTTP/1.0\r\n\r\n":                  "HTTP/1.1 200 OK\r\n\r\nHTTP/1.0 404 ",
	} {
		app, err := net.Dial("tcp", p.Address())
		require.NoError(t, err)
		_, err = io.WriteString(app, asks)
		require.NoError(t, err)
		got := make([]byte, len(want))
		require.NoError(t, app.SetReadDeadline(time.Now().Add(20*time.Second)))
		_, err = io.ReadFull(app, got)
		require.NoError(t, err, "%q", asks)
		assert.Equal(t, want, string(got), "%q", asks)
		_ = app.Close()
	}
}

func FuzzGreeting(f *testing.F) {
	f.Add([]byte("\x05\x01\x00\x05\x01\x00\x03\x04host\x00\x50"))
	f.Add([]byte("CONNECT host:80 HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, asks []byte) {
		destination, err := mobile.ReadGreeting(asks)
		if err == nil {
			assert.LessOrEqual(t, len(destination), 16<<10)
		}
	})
}

func TestConnectionsOfAppsAreBounded(t *testing.T) {
	settings := startRelay(t, relay.Server{Allow: loopback})
	settings.MaxConnections = 2
	p := startProxy(t, settings)
	for range 2 {
		app, err := net.Dial("tcp", p.Address())
		require.NoError(t, err)
		defer app.Close()
		_, err = app.Write([]byte("\x05\x01\x00"))
		require.NoError(t, err)
		_, err = io.ReadFull(app, make([]byte, 2)) // it is served
		require.NoError(t, err)
	}
	third, err := net.Dial("tcp", p.Address())
	require.NoError(t, err)
	defer third.Close()
	_, err = third.Read(make([]byte, 1))
	require.Error(t, err)
	assert.Equal(t, 1, p.Stats().Refused)
}
