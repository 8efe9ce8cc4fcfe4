package main

import (
	"context"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// hint posts a hint, to the socket at path or, where that is empty, to the pages.
func (in *instance) hint(socket, token string) int {
	in.t.Helper()
	metrics, ok := in.log.line(in.t, "telemetry")["metrics"].(string)
	require.True(in.t, ok)
	transport := &http.Transport{DisableKeepAlives: true}
	if socket != "" {
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}
	}
	req, err := http.NewRequestWithContext(in.t.Context(), http.MethodPost, strings.TrimSuffix(metrics, "/metrics")+"/v1/hints",
		strings.NewReader(`[{"host": "127.0.0.1", "link_rate_bits_per_second": 5e9}]`))
	require.NoError(in.t, err)
	req.Header.Set("Content-Type", "application/json")
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	require.NoError(in.t, err)
	require.NoError(in.t, resp.Body.Close())
	return resp.StatusCode
}

func TestHintsComeWithATokenOrThroughTheSocket(t *testing.T) {
	dir := t.TempDir()
	token, socket := filepath.Join(dir, "token"), filepath.Join(dir, "hints.sock")
	write := func(text string) { require.NoError(t, os.WriteFile(token, []byte(text+"\n"), 0o600)) }
	write("first-0123456789")
	in := startRun(t, strings.Replace(runConfig, `address: "127.0.0.1:0"}`+"\n", `address: "127.0.0.1:0", hints: {socket: `+socket+`, token_file: `+token+"}}\n", 1)+
		"defaults: {algorithm: nacc}\n")
	assert.Equal(t, socket, in.log.line(t, "taking hints")["socket"])
	conn := in.connect()
	echoes(t, conn)

	assert.Equal(t, http.StatusUnauthorized, in.hint("", ""))
	assert.Equal(t, http.StatusOK, in.hint("", "first-0123456789"))
	assert.Equal(t, http.StatusOK, in.hint(socket, ""), "its mode decides")
	_, hosts := in.get("/hosts")
	assert.Contains(t, hosts, `"hosts":["127.0.0.1"]`)
	assert.Contains(t, hosts, `"link_rate_bits_per_second":5000000000`)
	_, metrics := in.get("/metrics")
	for _, line := range []string{
		`penstock_hints_total{result="heard"} 2`,
		`penstock_hints_total{result="unauthorized"} 1`,
		`penstock_groups{algorithm="nacc",state="used"} 2`,
	} {
		assert.Contains(t, metrics, line)
	}

	write("second-0123456789")
	code, body := in.post("/-/reload")
	require.Equal(t, http.StatusOK, code, body)
	assert.Equal(t, http.StatusUnauthorized, in.hint("", "first-0123456789"))
	assert.Equal(t, http.StatusOK, in.hint("", "second-0123456789"))
	write("short")
	code, body = in.post("/-/reload")
	assert.Equal(t, http.StatusUnprocessableEntity, code)
	assert.Contains(t, body, "telemetry.hints.token_file: a token is 16 to 255")
	assert.Equal(t, http.StatusOK, in.hint("", "second-0123456789"), "the one before is in force")
	assert.NotContains(t, in.log.String(), "0123456789", "a secret is not logged")

	require.NoError(t, conn.Close())
	in.signal()
	assert.Equal(t, exitOK, <-in.code, in.log.String())
	assert.NoFileExists(t, socket)
}

func TestASocketThatCannotBeMadeIsNamed(t *testing.T) {
	var log journal
	path := filepath.Join(t.TempDir(), "penstock.yaml")
	socket := filepath.Join(t.TempDir(), "absent", "hints.sock")
	require.NoError(t, os.WriteFile(path, []byte(strings.Replace(runConfig, `address: "127.0.0.1:0"}`+"\n", `address: "127.0.0.1:0", hints: {socket: `+socket+"}}\n", 1)), 0o600))
	code := execute(t.Context(), []string{"run", "--keep-privileges", "--config", path}, &log, &log)
	assert.Equal(t, exitFail, code)
	assert.Contains(t, log.String(), "telemetry.hints.socket: telemetry: there is no directory "+filepath.Dir(socket))
}
