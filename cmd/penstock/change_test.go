package main

import (
	"bytes"
	"encoding/json"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/telemetry"
	"github.com/penstock-net/penstock/telemetry/page"
)

const changeToken = "0123456789abcdef"

// change asks for a change with a token.
func (in *instance) change(token, body string) (int, string) {
	in.t.Helper()
	metrics, ok := in.log.line(in.t, "telemetry")["metrics"].(string)
	require.True(in.t, ok)
	req, err := http.NewRequestWithContext(in.t.Context(), http.MethodPost,
		strings.TrimSuffix(metrics, "/metrics")+"/v1/algorithm", strings.NewReader(body))
	require.NoError(in.t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	require.NoError(in.t, err)
	text, err := io.ReadAll(resp.Body)
	require.NoError(in.t, err)
	require.NoError(in.t, resp.Body.Close())
	return resp.StatusCode, string(text)
}

// read asks for a page in JSON.
func (in *instance) read(page string, into any) {
	in.t.Helper()
	code, body := in.get(page)
	require.Equal(in.t, http.StatusOK, code, body)
	require.NoError(in.t, json.Unmarshal([]byte(body), into))
}

// startChangeable runs a proxy that takes changes, and returns its configuration.
func startChangeable(t *testing.T) (in *instance, config, token string) {
	t.Helper()
	token = filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(token, []byte(changeToken+"\n"), 0o600))
	config = strings.Replace(runConfig, `telemetry: {`, "telemetry: {change_token_file: "+token+", ", 1) +
		"defaults: {algorithm: cubic}\nrules: [{name: odd, match: {ports: [1]}, algorithm: reno}]\n"
	return startRun(t, config), config, token
}

// A download that runs goes on under each algorithm that the page sets, to its last byte.
func TestTheAlgorithmOfARunningDownloadIsChanged(t *testing.T) {
	in, config, _ := startChangeable(t)
	conn := in.connect()
	content := make([]byte, 4<<20)
	_, _ = rand.NewChaCha8([32]byte{7}).Read(content)
	wrote := make(chan error, 1)
	go func() {
		_, err := conn.Write(content)
		wrote <- err
	}()
	// It comes back as it is read: what has not been read is in flight, or waits.
	var got bytes.Buffer
	read := func(n int64) {
		t.Helper()
		_, err := io.CopyN(&got, conn, n)
		require.NoError(t, err)
	}
	read(64 << 10)
	assert.Equal(t, "cubic", in.algorithm())
	for _, algorithm := range []string{"copa", "bbr", "penstock", "vegas"} {
		code, body := in.change(changeToken, `{"rule": "", "direction": "down", "algorithm": "`+algorithm+`"}`)
		require.Equal(t, http.StatusOK, code, body)
		assert.Equal(t, "changed until the next reload: 1 directions of running connections have other terms\n", body)
		assert.Equal(t, algorithm, in.algorithm())
		read(256 << 10)
	}
	code, body := in.change(changeToken, `{"rule": "", "algorithm": "copa:delta=0.1"}`)
	require.Equal(t, http.StatusOK, code, body)
	assert.Contains(t, body, ": 2 directions of running connections")
	read(int64(len(content)) - int64(got.Len()))
	require.NoError(t, <-wrote)
	assert.True(t, bytes.Equal(content, got.Bytes()), "bytes are lost or others")

	in.rewrite(config)
	code, body = in.post("/-/reload")
	require.Equal(t, http.StatusOK, code, body)
	assert.Equal(t, "cubic", in.algorithm(), "as in the file")
	require.NoError(t, conn.Close())
	in.signal()
	assert.Equal(t, cli.ExitOK, <-in.code, in.log.String())
}

func TestAChangeShowsUntilTheNextReload(t *testing.T) {
	in, config, token := startChangeable(t)
	var v page.View
	in.read("/v1/view", &v)
	assert.True(t, v.Changeable)
	assert.Empty(t, v.Changed)
	code, body := in.change("fedcba9876543210", `{"rule": "odd", "algorithm": "copa"}`)
	assert.Equal(t, http.StatusUnauthorized, code, body)
	code, body = in.change(changeToken, `{"rule": "even", "algorithm": "copa"}`)
	assert.Equal(t, http.StatusUnprocessableEntity, code)
	assert.Contains(t, body, `there is none of the name "even"`)
	assert.Equal(t, "even", in.log.line(t, "algorithm not changed")["rule"])

	code, body = in.change(changeToken, `{"rule": "odd", "direction": "up", "algorithm": "copa:delta=0.1"}`)
	assert.Equal(t, http.StatusOK, code, body)
	in.read("/v1/view", &v)
	assert.Equal(t, []string{"odd: down reno, up copa:delta=0.1"}, v.Changed)
	_, metrics := in.get("/metrics")
	assert.Contains(t, metrics, "penstock_config_changed_rules 1\n")
	line := in.log.line(t, "algorithm changed until the next reload")
	assert.Equal(t, []any{"odd", "up", "copa:delta=0.1"}, []any{line["rule"], line["direction"], line["algorithm"]})
	assert.Contains(t, line["client"], "127.0.0.1:")
	assert.Contains(t, v.Events[0].Text, "algorithm changed until the next reload rule=odd direction=up")
	var rules telemetry.Rules
	in.read("/v1/rules", &rules)
	assert.Equal(t, []telemetry.Rule{
		{Name: "odd", Down: "reno", Up: "copa:delta=0.1"}, {Down: "cubic", Up: "cubic"},
	}, rules.Rules)
	assert.Contains(t, rules.Algorithms, "penstock")
	code, errs, _ := run(t, "top", "--once", "--telemetry", strings.TrimPrefix(strings.TrimSuffix(
		in.log.line(t, "telemetry")["metrics"].(string), "/metrics"), "http://"))
	assert.Equal(t, cli.ExitOK, code)
	assert.Contains(t, errs, "1 rules differ from the file")

	// A reload that fails changes nothing, one that succeeds has the file in force.
	in.rewrite(config + "frob: 1\n")
	code, _ = in.post("/-/reload")
	assert.Equal(t, http.StatusUnprocessableEntity, code)
	in.read("/v1/view", &v)
	assert.Len(t, v.Changed, 1)
	in.rewrite(config)
	require.NoError(t, os.WriteFile(token, []byte("fedcba9876543210\n"), 0o600))
	code, body = in.post("/-/reload")
	require.Equal(t, http.StatusOK, code, body)
	v = page.View{}
	in.read("/v1/view", &v)
	assert.Empty(t, v.Changed)
	assert.Equal(t, []any{"odd: down reno, up copa:delta=0.1"},
		in.log.line(t, "changes of algorithms have ended with the reload")["were"])
	code, _ = in.change(changeToken, `{"rule": "odd", "algorithm": "copa"}`)
	assert.Equal(t, http.StatusUnauthorized, code, "the token is another now")
	assert.NotContains(t, in.log.String(), changeToken)
	in.rewrite(runConfig)
	code, body = in.post("/-/reload")
	require.Equal(t, http.StatusOK, code, body)
	code, body = in.change("fedcba9876543210", `{"rule": "", "algorithm": "copa"}`)
	assert.Equal(t, http.StatusForbidden, code)
	assert.Contains(t, body, "telemetry.change_token_file")

	in.signal()
	assert.Equal(t, cli.ExitOK, <-in.code, in.log.String())
}
