package caddy

import (
	"crypto/sha256"
	"crypto/tls"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/alcc"
)

func init() { caddy.RegisterModule(observer{}) }

// managed counts the connections below observers that have a controller.
var managed atomic.Int32

// observer is a listener wrapper that looks at the connections of the one before it.
type observer struct{}

func (observer) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "caddy.listeners.observer", New: func() caddy.Module { return new(observer) }}
}

func (*observer) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	return nil
}

func (*observer) WrapListener(ln net.Listener) net.Listener { return observed{ln} }

type observed struct{ net.Listener }

func (o observed) Accept() (net.Conn, error) {
	conn, err := o.Listener.Accept()
	if s, ok := alcc.StatsOf(conn); ok && s.Tier != alcc.TierNone && s.Algorithm == "cubic" {
		managed.Add(1)
	}
	return conn, err
}

// run has Caddy serve a folder over HTTPS with the options of penstock.
func run(t *testing.T, folder, options string) (url string, err error) {
	t.Helper()
	t.Setenv("XDG_DATA_HOME", t.TempDir())
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := ln.Addr().String()
	require.NoError(t, ln.Close())
	config, _, err := caddyfile.Adapter{ServerType: httpcaddyfile.ServerType{}}.Adapt(fmt.Appendf(nil, `{
	admin off
	auto_https disable_redirects
	skip_install_trust
	servers {
		listener_wrappers {
			penstock {
				%s
			}
			observer
			tls
		}
	}
}
https://%s {
	bind 127.0.0.1
	tls internal
	root * %s
	file_server
}
`, options, address, folder), nil)
	if err != nil {
		return "", err
	}
	if err := caddy.Load(config, true); err != nil {
		return "", err
	}
	t.Cleanup(func() { assert.NoError(t, caddy.Stop()) })
	return "https://" + address, nil
}

func TestADownloadFromCaddyHasAController(t *testing.T) {
	folder := t.TempDir()
	content := make([]byte, 8<<20)
	_, _ = rand.NewChaCha8([32]byte{2}).Read(content)
	require.NoError(t, os.WriteFile(filepath.Join(folder, "file"), content, 0o600))
	url, err := run(t, folder, "algorithm cubic")
	require.NoError(t, err)
	transport := &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // the authority was made on the spot
	}
	defer transport.CloseIdleConnections()
	r, err := (&http.Client{Transport: transport}).Get(url + "/file")
	require.NoError(t, err)
	defer r.Body.Close()
	sum := sha256.New()
	_, err = io.Copy(sum, r.Body)
	require.NoError(t, err)
	want := sha256.Sum256(content)
	assert.Equal(t, want[:], sum.Sum(nil))
	assert.NotZero(t, managed.Load())
}

func TestOptionsThatThereAreNotAreRefused(t *testing.T) {
	for options, want := range map[string]string{
		"algorithm cubix":  "did you mean cubic",
		"algorithm":        "wrong argument count",
		"window 3":         "it takes algorithm and max_rate",
		"max_rate quickly": "max_rate",
	} {
		_, err := run(t, t.TempDir(), options)
		require.ErrorContains(t, err, want)
	}
}
