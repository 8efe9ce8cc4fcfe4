package main

import (
	"bytes"
	"errors"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
)

// Kubernetes mounts a ConfigMap as links: penstock.yaml → ..data/penstock.yaml, and
// ..data → a directory of this version, which is what a change replaces.
func configMap(t *testing.T) (path string, publish func(config string)) {
	t.Helper()
	dir := t.TempDir()
	version := 0
	publish = func(config string) {
		version++
		name := "..version" + string(rune('0'+version))
		require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name, "penstock.yaml"), []byte(config), 0o600))
		require.NoError(t, os.Symlink(name, filepath.Join(dir, "..new")))
		require.NoError(t, os.Rename(filepath.Join(dir, "..new"), filepath.Join(dir, "..data")))
	}
	path = filepath.Join(dir, "penstock.yaml")
	require.NoError(t, os.Symlink("..data/penstock.yaml", path))
	return path, publish
}

func TestAConfigMapThatChangesIsReread(t *testing.T) {
	path, publish := configMap(t)
	publish(runConfig + "defaults: {algorithm: cubic}\n")
	in := startRunWithout(t, "--config", path, "--watch")
	in.config = path
	echoes(t, in.connect())
	publish(runConfig + "defaults: {algorithm: copa}\n")
	in.log.has(t, `"configuration reloaded","by":"file"`)
	assert.Equal(t, "copa", in.algorithm())
	in.counts(1, 0, 1)

	publish(runConfig + "frob: 1\n")
	in.log.has(t, `"configuration not reloaded","by":"file"`)
	assert.Equal(t, "copa", in.algorithm(), "what was before stays in force")
	in.counts(1, 1, 0)
	in.signal()
	in.expect("STOPPING=1")
	in.signal()
	assert.Equal(t, cli.ExitFail, <-in.code)
}

func TestListenersGoOnForTheDelay(t *testing.T) {
	in := startRun(t, runConfig+"shutdown: {delay: 1h, drain: 1h}\n")
	in.signal()
	in.expect("STOPPING=1")
	code, why := in.get("/readyz")
	assert.Equal(t, http.StatusServiceUnavailable, code, why)
	echoes(t, in.connect()) // a new connection, while what sends them here learns of it
	in.signal()
	assert.Equal(t, cli.ExitFail, <-in.code, "a second signal does not wait")
}

// What a reload says of the end counts at the end, and until then systemd is not told that we serve.
func TestTheDelayIsThatOfTheReload(t *testing.T) {
	in := startRun(t, runConfig)
	in.rewrite(runConfig + "shutdown: {delay: 1h, drain: 1h}\n")
	code, words := in.post("/-/reload")
	require.Equal(t, http.StatusOK, code, words)
	in.signal()
	assert.Contains(t, in.expect("STOPPING=1"), "draining")
	echoes(t, in.connect())
	code, words = in.post("/-/reload")
	require.Equal(t, http.StatusOK, code, words)
	assert.Contains(t, in.status(), "draining")
	in.signal()
	assert.Equal(t, cli.ExitFail, <-in.code)
}

func TestADelayEnds(t *testing.T) {
	in := startRun(t, runConfig+"shutdown: {delay: 50ms}\n")
	in.signal()
	in.expect("STOPPING=1")
	assert.Equal(t, cli.ExitOK, <-in.code)
	assert.Contains(t, in.log.String(), "no new connections from now on")
}

func TestProbesSeeTheHealthAlone(t *testing.T) {
	in := startRun(t, strings.Replace(runConfig, `"127.0.0.1:0"}`+"\n", `"127.0.0.1:0", health: "127.0.0.1:0"}`+"\n",
		1))
	at, ok := in.log.line(t, "health")["address"].(string)
	require.True(t, ok)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for page, code := range map[string]int{
		"/healthz": 200, "/readyz": 200, "/flows": 404, "/metrics": 404, "/": 404,
		"/v1/view": 404,
	} {
		resp, err := client.Get("http://" + at + page)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		assert.Equal(t, code, resp.StatusCode, page)
	}
	ready := func(more ...string) (code int, out, complaint string) {
		var stdout, stderr bytes.Buffer
		code = runCommandLine(t.Context(), append([]string{"ready", "--telemetry", at}, more...), &stdout, &stderr)
		return code, stdout.String(), stderr.String()
	}
	code, out, _ := ready()
	assert.Equal(t, cli.ExitOK, code)
	assert.Equal(t, "ready\n", out)
	conn := in.connect()
	echoes(t, conn)
	in.signal()
	in.expect("STOPPING=1")
	code, _, complaint := ready()
	assert.Equal(t, cli.ExitFail, code)
	assert.Contains(t, complaint, "draining")
	code, out, _ = ready("--alive")
	assert.Equal(t, cli.ExitOK, code)
	assert.Equal(t, "ok\n", out)
	require.NoError(t, conn.Close())
	assert.Equal(t, cli.ExitOK, <-in.code)
}

func TestReadyReadsWhereToAsk(t *testing.T) {
	var stderr bytes.Buffer
	if _, err := os.Stat(defaultConfig); errors.Is(err, fs.ErrNotExist) {
		code := runCommandLine(t.Context(), []string{"ready"}, &stderr, &stderr)
		assert.NotEqual(t, cli.ExitConfig, code, "asked at the usual address")
		assert.NotContains(t, stderr.String(), defaultConfig)
	}
	path := filepath.Join(t.TempDir(), "penstock.yaml")
	write := func(telemetry string) {
		require.NoError(t, os.WriteFile(path, []byte("listeners: [{name: a, mode: connect, address: "+
			"'127.0.0.1:1'}]\ntelemetry: "+telemetry+"\n"), 0o600))
	}
	write("{address: off}")
	assert.Equal(t, cli.ExitFail, runCommandLine(t.Context(), []string{"ready", "--config", path}, &stderr, &stderr))
	assert.Contains(t, stderr.String(), "telemetry.health is off, too")
	write("{address: off, health: 'somewhere'}")
	assert.Equal(t, cli.ExitConfig, runCommandLine(t.Context(), []string{"ready", "--config", path}, &stderr, &stderr))
	assert.Contains(t, stderr.String(), "telemetry.health")
}
