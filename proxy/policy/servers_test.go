package policy_test

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http/httpguts"

	"github.com/penstock-net/penstock/internal/certs"
	"github.com/penstock-net/penstock/proxy/policy"
)

// The tests of this file hold ServerName against servers: of whatever they accept it finds the name that they find.

const (
	variants     = 1500 // of requests and ClientHellos, of each server
	serverAnswer = 20 * time.Second
)

// plainName is the name that a server found, as rules have it.
func plainName(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	return policy.HostName(host)
}

// mostly chooses the first in nine of ten cases.
func mostly(r *rand.Rand, usual string, others ...string) string {
	if r.IntN(10) > 0 {
		return usual
	}
	return others[r.IntN(len(others))]
}

// oneOf chooses.
func oneOf(r *rand.Rand, from ...string) string { return from[r.IntN(len(from))] }

// anyRequest is a request of which servers may doubt that it is one.
func anyRequest(r *rand.Rand) string {
	var b strings.Builder
	say := func(usual string, others ...string) { b.WriteString(mostly(r, usual, others...)) }
	end := func() { say("\r\n", "\n", "\r\r\n") }
	say("", "\r\n", "\n", "\r\n\r\n", "\r", " ")
	say("GET", "POST", "get", "M-SEARCH", "MY_METHOD", "X.Y", "G3T", "!#$", "CONNECT", "", strings.Repeat("A", 40))
	say(" ", "  ", "\t")
	b.WriteString(oneOf(r, "/", "/", "/", "/", "/", "/", "/", "http://example.com/", "http://other.example/x", mostly(r, "*",
		"/%zz", "/?%zz", "//other.example/", "HTTP://Example.com:81/", "http://u:p@example.com/", "http://example.com?x",
		"ws://example.com", "/a b", "http:///", "example.com:80", "/?http://other.example/", "/\x80",
		"http://example.com.:80/#http://a.test/")))
	say(" ", "  ", "\t")
	say("HTTP/1.1", "HTTP/1.0", "HTTP/1.2", "HTTP/1.10", "HTTP/2.0", "http/1.1", "HTTP/1.1 ", "")
	end()
	for range r.IntN(3) {
		b.WriteString(oneOf(r, "X-Host: example.com", "X(: y", "no colon", ": y", "X: y\r\n z", "H\u00f6st: example.com",
			"X:", "Content-Length: 0", "Host: example.com"))
		end()
	}
	say("Host: example.com", "host:example.com", "HOST:\texample.com ", "Host: example.com:8080", "Host: Example.COM.",
		"Host : example.com", " Host: example.com", "Host: other.example", "Host:", "Host:\r\n example.com",
		"Host: example.com\r\n x", "Host: example.com, other.example", "Host: example.com\x00", "Host: a@example.com",
		"Host: [::1]", "Host: example.com/x", "Host: example.com:", "Host: .example.com", "Host\t: example.com", "X: y")
	end()
	b.WriteString("Connection: close\r\n")
	end()
	return b.String()
}

// askAt sends a request and returns the status and the content of the answer; 0: there was none.
func askAt(t *testing.T, address, request string) (status int, content string) {
	conn, err := net.Dial("tcp", address)
	require.NoError(t, err)
	defer conn.Close() //nolint:errcheck // it was read to its end
	require.NoError(t, conn.SetDeadline(time.Now().Add(serverAnswer)))
	if _, err = io.WriteString(conn, request); err != nil {
		return 0, "" // the server has heard enough
	}
	require.NoError(t, ignoring(conn.(*net.TCPConn).CloseWrite()))
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return 0, ""
	}
	defer resp.Body.Close() //nolint:errcheck // of memory
	said, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(said)
}

// ignoring is err, unless the peer has ended the connection.
func ignoring(err error) error {
	var op *net.OpError
	if errors.As(err, &op) {
		return nil
	}
	return err
}

// holdAgainst compares the name of what was sent with the one that a server answers with.
func holdAgainst(t *testing.T, address string) {
	r := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same ones each time
	accepted := 0
	for range variants {
		sent := anyRequest(r)
		status, host := askAt(t, address, sent)
		if status != http.StatusOK {
			continue
		}
		accepted++
		name, more := policy.ServerName([]byte(sent))
		require.Equal(t, plainName(host), name, "of %q", sent)
		require.False(t, more && name != "", "of %q", sent)
	}
	assert.Greater(t, accepted, variants/10)
}

// needsServers skips a test that asks a real server, over loopback, where only what computes is to run.
func needsServers(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("asks a server over loopback")
	}
}

func TestTheNameOfARequestIsTheOneThatGoServersFind(t *testing.T) {
	needsServers(t)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Host)
	}))
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	defer server.Close()
	holdAgainst(t, server.Listener.Addr().String())
}

func TestTheNameOfARequestIsTheOneThatNginxFinds(t *testing.T) {
	needsServers(t)
	plain, _ := nginx(t)
	holdAgainst(t, plain)
}

// nginx starts one that answers each request with the name that it was asked for, and returns its addresses: without
// TLS, and with it.
func nginx(t *testing.T) (plain, secure string) {
	program, err := exec.LookPath("nginx")
	if err != nil {
		if program, err = exec.LookPath("/usr/sbin/nginx"); err != nil {
			t.Skip("needs nginx")
		}
	}
	dir := t.TempDir()
	certificate, key := certs.PEM(certs.SelfSigned("example.com"))
	write := func(name, content string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	write("cert", certificate)
	write("key", key)
	free := func() string {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer ln.Close() //nolint:errcheck // it only listened
		return ln.Addr().String()
	}
	plain, secure = free(), free()
	var temporary strings.Builder
	for _, what := range []string{"client_body", "proxy", "fastcgi", "uwsgi", "scgi"} {
		fmt.Fprintf(&temporary, "%s_temp_path %s/%[1]s;\n", what, dir)
	}
	write("conf", fmt.Sprintf(`daemon off; master_process off; pid %s/pid; error_log stderr crit;
events {}
http { access_log off; keepalive_timeout 0;
%s
server { listen %s; server_name ""; return 200 "$host"; }
server { listen %s ssl; server_name ""; ssl_certificate %s/cert; ssl_certificate_key %s/key;
  ssl_protocols TLSv1.2 TLSv1.3; return 200 "$ssl_server_name"; }
}`, dir, temporary.String(), plain, secure, dir, dir))
	var said bytes.Buffer
	cmd := exec.CommandContext(t.Context(), program, "-p", dir, "-e", "stderr", "-c", filepath.Join(dir, "conf"))
	cmd.Stderr = &said
	require.NoError(t, cmd.Start())
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // what it says tells more
		close(ended)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
	})
	require.Eventually(t, func() bool {
		select {
		case <-ended:
			t.Fatalf("nginx has ended: %s", said.String())
		default:
		}
		conn, err := net.Dial("tcp", secure)
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	}, serverAnswer, 10*time.Millisecond)
	return plain, secure
}

// firstFlight is a connection of a client whose first bytes are changed on their way.
type firstFlight struct {
	net.Conn
	change func([]byte) []byte
	sent   []byte // in place of the first bytes
}

func (f *firstFlight) Write(b []byte) (int, error) {
	if f.sent != nil {
		return f.Conn.Write(b)
	}
	f.sent = f.change(b)
	if _, err := f.Conn.Write(f.sent); err != nil {
		return 0, err
	}
	return len(b), nil
}

// anyRecords cuts the record of a ClientHello in other ones, of which some may be empty, and some are warnings.
func anyRecords(r *rand.Rand, record []byte) (out []byte) {
	add := func(kind, minor byte, body []byte) {
		out = append(append(out, kind, 3, minor, byte(len(body)>>8), byte(len(body))), body...)
	}
	beside := func() {
		switch r.IntN(30) {
		case 0:
			add(22, byte(r.IntN(5)), nil)
		case 1:
			add(21, 1, []byte{1, 90}) // user_canceled
		case 2:
			add(20, 1, []byte{1}) // change_cipher_spec
		}
	}
	beside()
	for body := record[5:]; len(body) > 0; {
		n := 1 + r.IntN(len(body))
		add(22, byte(r.IntN(5)), body[:n])
		body = body[n:]
		beside()
	}
	return out
}

// anyHello is the configuration of a client.
func anyHello(tb testing.TB, r *rand.Rand) *tls.Config {
	cfg := &tls.Config{
		InsecureSkipVerify: true, //nolint:gosec // of itself
		ServerName: oneOf(r, "example.com", "Example.COM", "a.example.com", "example.com:443", "a..example", "x_y.example",
			"", "exa mple", "example.com/x", strings.Repeat("a", 60)+".example"),
		MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
	}
	switch r.IntN(4) {
	case 0:
		cfg.MaxVersion = tls.VersionTLS12
	case 1:
		cfg.MinVersion = tls.VersionTLS13
		cfg.EncryptedClientHelloConfigList = echConfigs(tb, "provider.example")
	}
	return cfg
}

// greet has a client with changed first bytes shake hands and ask for a page, and returns these bytes and the page;
// not ok: the server did not accept them.
func greet(t *testing.T, r *rand.Rand, conn net.Conn) (sent []byte, page string, ok bool) {
	defer conn.Close() //nolint:errcheck // it was read to its end
	require.NoError(t, conn.SetDeadline(time.Now().Add(serverAnswer)))
	changed := &firstFlight{Conn: conn, change: func(b []byte) []byte { return anyRecords(r, b) }}
	client := tls.Client(changed, anyHello(t, r))
	err := client.Handshake()
	var refused *tls.ECHRejectionError
	if errors.As(err, &refused) { // it has shaken hands for the outer name
		return changed.sent, "provider.example", true
	}
	if err != nil {
		return nil, "", false
	}
	if _, err = io.WriteString(client, "GET / HTTP/1.0\r\n\r\n"); err != nil {
		return nil, "", false // TLS 1.3 shakes hands before the server has said what it thinks
	}
	resp, err := http.ReadResponse(bufio.NewReader(client), nil)
	if err != nil {
		return nil, "", false
	}
	defer resp.Body.Close() //nolint:errcheck // of memory
	said, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return changed.sent, string(said), true
}

func holdHellosAgainst(t *testing.T, address string) {
	r := rand.New(rand.NewPCG(3, 4)) //nolint:gosec // the same ones each time
	accepted := 0
	for range variants / 5 {
		conn, err := net.Dial("tcp", address)
		require.NoError(t, err)
		sent, found, ok := greet(t, r, conn)
		if !ok {
			continue
		}
		accepted++
		name, more := policy.ServerName(sent)
		require.Equal(t, plainName(found), name, "of %x", sent)
		require.False(t, more, "of %x", sent)
	}
	assert.Greater(t, accepted, variants/100)
}

func TestTheNameOfAClientHelloIsTheOneThatOpenSSLFinds(t *testing.T) {
	needsServers(t)
	_, secure := nginx(t)
	holdHellosAgainst(t, secure)
}

func TestTheNameOfAClientHelloIsTheOneThatGoServersFind(t *testing.T) {
	needsServers(t)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.TLS.ServerName)
	}))
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	defer server.Close()
	holdHellosAgainst(t, server.Listener.Addr().String())
}

// said is a connection of a client that has said all it will.
type said struct {
	net.Conn
	*bytes.Reader
}

func (s said) Read(b []byte) (int, error)       { return s.Reader.Read(b) }
func (s said) Write(b []byte) (int, error)      { return len(b), nil }
func (s said) Close() error                     { return nil }
func (s said) SetWriteDeadline(time.Time) error { return nil }

// nameByGo is the name that Go's servers find in first bytes; not ok: they do not accept them.
func nameByGo(sent []byte) (name string, ok bool) {
	server := tls.Server(said{nil, bytes.NewReader(sent)}, &tls.Config{
		MinVersion: tls.VersionTLS10,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			name, ok = hello.ServerName, true
			return nil, io.EOF
		},
	})
	if _ = server.Handshake(); ok {
		return plainName(name), true
	}
	req, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(sent)))
	if err != nil || req.ProtoMajor != 1 {
		return "", false
	}
	for name, values := range req.Header {
		if !httpguts.ValidHeaderFieldName(name) {
			return "", false
		}
		for _, v := range values {
			if !httpguts.ValidHeaderFieldValue(v) {
				return "", false
			}
		}
	}
	return plainName(req.Host), httpguts.ValidHostHeader(req.Host)
}

func FuzzServerNameAgainstGo(f *testing.F) {
	f.Add(named(f, "example.com"))
	f.Add(fragmented(named(f, "example.com"), 7))
	f.Add([]byte("GET http://a.example:81/x HTTP/1.1\r\nHost: b.example\r\n\r\n"))
	r := rand.New(rand.NewPCG(5, 6)) //nolint:gosec // the same ones each time
	for range 20 {
		f.Add([]byte(anyRequest(r)))
		f.Add(anyRecords(r, named(f, "example.com")))
	}
	f.Fuzz(func(t *testing.T, sent []byte) {
		if want, ok := nameByGo(sent); ok && len(sent) < policy.MaxFirstBytes {
			name, _ := policy.ServerName(sent)
			require.Equal(t, want, name, "of %q", sent)
		}
	})
}
