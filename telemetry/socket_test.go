package telemetry

import (
	"context"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// overSocket is a client whose every request goes to the socket at path.
func overSocket(t *testing.T, path string) *http.Client {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

func TestASocketTakesHintsAndNothingElse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hints.sock")
	ln, err := ListenSocket(path)
	require.NoError(t, err)
	info, err := os.Lstat(path)
	require.NoError(t, err)
	assert.Equal(t, fs.ModeSocket|0o660, info.Mode())

	var heard []netip.Prefix
	k := &HintReceiver{Clock: func() cc.Time { return 1 }, Pass: func(p netip.Prefix, _ cc.Hint) int {
		heard = append(heard, p)
		return 1
	}}
	k.SetToken("0123456789abcdef")
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- k.Serve(ctx, ln) }()

	client := overSocket(t, path)
	resp, err := client.Post("http://penstock/v1/hints", "application/json", strings.NewReader(`{"host": "192.0.2.7"}`))
	require.NoError(t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	assert.Equal(t, http.StatusOK, resp.StatusCode, "the file's mode decides, not the token")
	assert.JSONEq(t, `{"groups": 1}`, string(body))
	for _, page := range []string{"/flows", "/metrics", "/"} {
		resp, err := client.Get("http://penstock" + page)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		assert.Equal(t, http.StatusNotFound, resp.StatusCode, page)
	}
	cancel()
	require.NoError(t, <-served)
	assert.Equal(t, []netip.Prefix{netip.MustParsePrefix("192.0.2.7/32")}, heard)
	assert.NoFileExists(t, path)
}

func TestASocketLeftBehindIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hints.sock")
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	require.NoError(t, err)
	left.SetUnlinkOnClose(false) // as when the process is killed
	require.NoError(t, left.Close())
	require.FileExists(t, path)
	ln, err := ListenSocket(path)
	require.NoError(t, err)
	require.NoError(t, ln.Close())
	assert.NoFileExists(t, path)
}

func TestWhatIsInUseIsNotReplaced(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "hints.sock")
	first, err := ListenSocket(path)
	require.NoError(t, err)
	_, err = ListenSocket(path)
	require.ErrorContains(t, err, "another process answers on "+path)
	assert.FileExists(t, path)

	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, []byte("x"), 0o600))
	_, err = ListenSocket(file)
	require.ErrorContains(t, err, "is no socket; remove it")
	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink(path, link))
	_, err = ListenSocket(link)
	require.ErrorContains(t, err, "is no socket")
	_, err = ListenSocket(filepath.Join(dir, "absent", "hints.sock"))
	require.ErrorContains(t, err, "there is no directory")

	// Another has taken the place of one that goes.
	require.NoError(t, os.Remove(path))
	second, err := ListenSocket(path)
	require.NoError(t, err)
	require.NoError(t, first.Close())
	assert.FileExists(t, path)
	require.NoError(t, second.Close())
	assert.NoFileExists(t, path)
	left, err := filepath.Glob(filepath.Join(dir, "*.new"))
	require.NoError(t, err)
	assert.Empty(t, left)
}
