package main

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/alcc/mobile"
	"github.com/penstock-net/penstock/internal/certs"
)

// TestAPhoneUploadsThroughTheProgram starts the program as a user does, and a phone's end beside it.
func TestAPhoneUploadsThroughTheProgram(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	ca := certs.NewAuthority()
	certificate, key := certs.PEM(ca.Issue("relay", "127.0.0.1"))
	ctx, stop := context.WithCancel(context.Background())
	said, out := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		ended <- runRelay(ctx, []string{
			"-listen", "127.0.0.1:0", "-token-file", write("token", "the token of a test\n"), "-allow", "127.0.0.1/32",
			"-certificate", write("certificate", certificate), "-key", write("key", key),
		}, out)
	}()
	line, err := bufio.NewReader(said).ReadString('\n')
	require.NoError(t, err)
	address, found := strings.CutPrefix(strings.TrimSpace(line), "penstock-relay: listening on ")
	require.True(t, found, line)

	var got int64
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		got, _ = io.Copy(io.Discard, r.Body)
	}))
	defer server.Close()
	p, err := mobile.Start(&mobile.Settings{Server: address, Token: "the token of a test", Certificate: ca.PEM()})
	require.NoError(t, err)
	require.NoError(t, p.UploadFile(write("file", strings.Repeat("x", 1<<20)), server.URL, nil))
	assert.EqualValues(t, 1<<20, got)
	require.NoError(t, p.Close())
	stop()
	require.NoError(t, <-ended)
}

func TestTheCommandLineIsChecked(t *testing.T) {
	token := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(token, []byte("the token of a test"), 0o600))
	short := filepath.Join(t.TempDir(), "short")
	require.NoError(t, os.WriteFile(short, []byte("short"), 0o600))
	for args, want := range map[string]string{
		"":                            "-token-file is missing",
		"-token-file /none":           "-token-file: open /none",
		"-token-file " + short:        "-token-file: the token has 5 bytes, but must have at least 16",
		"-token-file " + token:        "-certificate and -key are missing",
		"-token-file " + token + " x": `nothing to do with "x"`,
		"-allow x":                    `"x" for flag -allow: write a prefix such as 10.0.0.0/8`,
		"-token-file " + token + " -plain -listen x":      `-listen: "x" is not ADDRESS:PORT, such as :8443`,
		"-token-file " + token + " -algorithm x":          "-algorithm: no algorithm",
		"-token-file " + token + " -max-connections -1":   "-max-connections is -1",
		"-token-file " + token + " -certificate x -key y": "-certificate and -key: open x",
	} {
		assert.ErrorContains(t, runRelay(t.Context(), strings.Fields(args), io.Discard), want, args)
	}
}
