package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/telemetry"
)

// rewrite changes the configuration file.
func (in *instance) rewrite(config string) {
	in.t.Helper()
	require.NoError(in.t, os.WriteFile(in.config, []byte(config), 0o600))
}

// hangUp sends SIGHUP and waits until systemd has been told that it is over.
func (in *instance) hangUp() {
	in.t.Helper()
	require.NoError(in.t, syscall.Kill(os.Getpid(), syscall.SIGHUP))
	require.NoError(in.t, in.notify.SetReadDeadline(time.Now().Add(10*time.Second)))
	buf := make([]byte, 256)
	n, err := in.notify.Read(buf)
	require.NoError(in.t, err, in.log.String())
	require.Regexp(in.t, `^RELOADING=1\nMONOTONIC_USEC=\d+$`, string(buf[:n]))
	in.expect("READY=1")
}

// post sends an empty request to a page.
func (in *instance) post(page string) (int, string) {
	in.t.Helper()
	metrics, ok := in.log.line(in.t, "telemetry")["metrics"].(string)
	require.True(in.t, ok)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Post(strings.TrimSuffix(metrics, "/metrics")+page, "", nil)
	require.NoError(in.t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(in.t, err)
	require.NoError(in.t, resp.Body.Close())
	return resp.StatusCode, string(body)
}

func (in *instance) algorithm() string {
	in.t.Helper()
	_, body := in.get("/flows")
	var flows []telemetry.Flow
	require.NoError(in.t, json.Unmarshal([]byte(body), &flows))
	require.Len(in.t, flows, 1)
	return flows[0].Down.Algorithm
}

// counts checks what the metrics say about reloads.
func (in *instance) counts(succeeded, failed, ok int) {
	in.t.Helper()
	_, metrics := in.get("/metrics")
	for _, line := range []string{
		fmt.Sprintf(`penstock_config_reloads_total{result="success"} %d`, succeeded),
		fmt.Sprintf(`penstock_config_reloads_total{result="failure"} %d`, failed),
		fmt.Sprintf(`penstock_config_last_reload_successful %d`, ok),
		"penstock_config_last_reload_success_timestamp_seconds 1",
	} {
		assert.Contains(in.t, metrics, line)
	}
}

func TestAChangedFileIsReread(t *testing.T) {
	in := startRun(t, runConfig+"defaults: {algorithm: cubic}\n")
	conn := in.connect()
	echoes(t, conn)
	in.counts(0, 0, 1)
	_, before := in.get("/metrics")

	in.rewrite(runConfig + "defaults: {algorithm: copa}\nlog: {level: debug}\n")
	in.hangUp()
	assert.Equal(t, "copa", in.algorithm())
	echoes(t, conn)
	in.counts(1, 0, 1)
	_, after := in.get("/metrics")
	hash := func(metrics string) string {
		_, rest, _ := strings.Cut(metrics, `penstock_config_info{hash="`)
		return rest[:64]
	}
	assert.NotEqual(t, hash(before), hash(after))
	line := in.log.line(t, "configuration reloaded")
	assert.Equal(t, "SIGHUP", line["by"])
	assert.Equal(t, in.config, line["config"])
	assert.Equal(t, 2.0, line["moved"])
	assert.Equal(t, 0.0, line["kept"])
	assert.Equal(t, hash(after), line["hash"])

	in.rewrite(runConfig + "frob: 1\n")
	code, body := in.post("/-/reload")
	assert.Equal(t, http.StatusUnprocessableEntity, code)
	assert.Contains(t, body, "frob")
	assert.Contains(t, body, in.config, "with its place")
	in.counts(1, 1, 0)
	line = in.log.line(t, "configuration not reloaded")
	assert.Equal(t, "http", line["by"])
	assert.Contains(t, line["err"], "frob")

	in.rewrite(strings.Replace(runConfig, "connect", "socks5", 1))
	code, body = in.post("/-/reload")
	assert.Equal(t, http.StatusUnprocessableEntity, code)
	assert.Contains(t, body, "listeners[0].mode: cannot change while running")
	assert.Equal(t, "copa", in.algorithm())
	in.counts(1, 2, 0)

	in.rewrite(runConfig + "defaults: {algorithm: vegas}\n")
	code, body = in.post("/-/reload")
	assert.Equal(t, http.StatusOK, code)
	assert.Contains(t, body, "reloaded: 2 directions")
	assert.Equal(t, "vegas", in.algorithm())
	in.counts(2, 2, 1)
	code, _ = in.get("/-/reload")
	assert.Equal(t, http.StatusMethodNotAllowed, code)

	require.NoError(t, conn.Close())
	in.signal()
	assert.Equal(t, exitOK, <-in.code, in.log.String())
}

func TestFlagsHoldAcrossAReload(t *testing.T) {
	in := startRun(t, runConfig, "--algorithm", "reno")
	conn := in.connect()
	echoes(t, conn)
	in.rewrite(runConfig + "defaults: {algorithm: copa}\n")
	in.hangUp()
	assert.Equal(t, "reno", in.algorithm())
	require.NoError(t, conn.Close())
	in.signal()
	assert.Equal(t, exitOK, <-in.code, in.log.String())
}

func TestWithoutAFileThereIsNothingToReread(t *testing.T) {
	in := startRunWithout(t, "--listen", "127.0.0.1:0", "--telemetry", "127.0.0.1:0")
	in.hangUp()
	assert.Contains(t, in.log.line(t, "configuration not reloaded")["err"], "without --config")
	code, body := in.post("/-/reload")
	assert.Equal(t, http.StatusBadRequest, code)
	assert.Contains(t, body, "without --config")
	in.counts(0, 0, 1)
	in.signal()
	assert.Equal(t, exitOK, <-in.code, in.log.String())
}
