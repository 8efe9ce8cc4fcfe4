package main

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/cli"
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
	in.expectReload()
}

// expectReload waits until systemd has been told that a reload is over.
func (in *instance) expectReload() {
	in.t.Helper()
	require.Regexp(in.t, `^MONOTONIC_USEC=\d+$`, in.expect("RELOADING=1"))
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

// unread is how many bytes wait in a pipe.
func unread(fd int) int {
	n, _ := unix.IoctlGetInt(fd, unix.TIOCINQ)
	return n
}

func TestASignalWhileTheFileIsReadForTheFirstTimeIsAReload(t *testing.T) {
	path := filepath.Join(t.TempDir(), "penstock.yaml")
	require.NoError(t, unix.Mkfifo(path, 0o600))
	pipe, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	_, err = unix.Write(pipe, []byte(runConfig))
	require.NoError(t, err)
	var writer sync.WaitGroup
	defer writer.Wait()
	writer.Go(func() {
		assert.Eventually(t, func() bool { return unread(pipe) == 0 }, 5*time.Second, time.Millisecond)
		assert.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGHUP))
		assert.NoError(t, os.WriteFile(path+".new", []byte(runConfig+"defaults: {algorithm: copa}\n"), 0o600))
		assert.NoError(t, os.Rename(path+".new", path))
		assert.NoError(t, unix.Close(pipe)) // the end of what is read first
	})
	in := startRunWithout(t, "--config", path)
	in.expectReload()
	in.counts(1, 0, 1)
	in.signal()
	assert.Equal(t, cli.ExitOK, <-in.code)
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

	in.rewrite(runConfig + "frob: 1\nfrubs: 2\n")
	code, body := in.post("/-/reload")
	assert.Equal(t, http.StatusUnprocessableEntity, code)
	assert.Contains(t, body, "frob")
	assert.Contains(t, body, "frubs", "all mistakes are told")
	assert.Equal(t, 2, strings.Count(body, in.config), "with their places: %s", body)
	in.counts(1, 1, 0)
	line = in.log.line(t, "configuration not reloaded")
	assert.Equal(t, "http", line["by"])
	assert.Contains(t, line["err"], "frob")
	in.log.has(t, "frubs")

	in.rewrite(runConfig + "mark: 7\n")
	code, body = in.post("/-/reload")
	assert.Equal(t, http.StatusUnprocessableEntity, code)
	assert.Contains(t, body, "mark: cannot change while running")
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
	assert.Equal(t, cli.ExitOK, <-in.code, in.log.String())
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
	assert.Equal(t, cli.ExitOK, <-in.code, in.log.String())
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
	assert.Equal(t, cli.ExitOK, <-in.code, in.log.String())
}

// tunnel asks for one with a password, and returns the answer's code.
func (in *instance) tunnelAs(password string) int {
	in.t.Helper()
	address, ok := in.log.line(in.t, "listening")["address"].(string)
	require.True(in.t, ok)
	conn, err := net.Dial("tcp", address)
	require.NoError(in.t, err)
	defer conn.Close()
	req := &http.Request{
		Method: http.MethodConnect, URL: &url.URL{Host: "127.0.0.1:9"}, Host: "127.0.0.1:9",
		Header: http.Header{
			"Proxy-Authorization": {"Basic " + base64.StdEncoding.EncodeToString([]byte("u:"+password))},
		},
	}
	require.NoError(in.t, req.Write(conn))
	resp, err := http.ReadResponse(bufio.NewReader(conn), req)
	require.NoError(in.t, err)
	require.NoError(in.t, resp.Body.Close())
	return resp.StatusCode
}

func TestARotatedPasswordIsTakenIn(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pw")
	write := func(password string) { require.NoError(t, os.WriteFile(file, []byte(password+"\n"), 0o600)) }
	write("first")
	in := startRun(t, strings.Replace(runConfig, "allow:",
		fmt.Sprintf("users: [{name: u, password_file: %q}], allow:", file), 1))
	assert.NotEqual(t, http.StatusProxyAuthRequired, in.tunnelAs("first"))
	write("second")
	code, body := in.post("/-/reload")
	require.Equal(t, http.StatusOK, code, body)
	assert.Equal(t, http.StatusProxyAuthRequired, in.tunnelAs("first"))
	assert.NotEqual(t, http.StatusProxyAuthRequired, in.tunnelAs("second"))
	in.rewrite(runConfig)
	code, body = in.post("/-/reload")
	require.Equal(t, http.StatusOK, code, body)
	assert.NotEqual(t, http.StatusProxyAuthRequired, in.tunnelAs("second"), "everybody may come")
	in.signal()
	assert.Equal(t, cli.ExitOK, <-in.code, in.log.String())
}

// neverReached is a rule behind one that matches every connection.
const neverReached = "rules: [{name: all}, {name: pages, match: {ports: [443]}}]\n"

func TestTheReloadCommandSaysWhatCameOfIt(t *testing.T) {
	in := startRun(t, runConfig)
	metrics, ok := in.log.line(t, "telemetry")["metrics"].(string)
	require.True(t, ok)
	at := strings.TrimSuffix(strings.TrimPrefix(metrics, "http://"), "/metrics")
	reload := func() (int, string, string) {
		return run(t, "reload", "--config", in.config, "--telemetry", at)
	}
	code, out, errs := reload()
	assert.Equal(t, cli.ExitOK, code, errs)
	assert.Contains(t, out, "reloaded: 0 directions")
	assert.NotContains(t, errs, "warning")
	in.counts(1, 0, 1)

	in.rewrite(runConfig + neverReached)
	code, out, errs = reload()
	assert.Equal(t, cli.ExitOK, code, errs)
	assert.NotContains(t, out, "warning")
	assert.Contains(t, errs, "warning: rules[0]: all matches every connection")
	in.log.has(t, `"WARN","msg":"rules[0]: all matches every connection`)
	in.counts(2, 0, 1)

	in.rewrite(runConfig + "mark: 7\n")
	code, _, errs = reload()
	assert.Equal(t, cli.ExitConfig, code)
	assert.Contains(t, errs, "mark: cannot change while running")
	in.counts(2, 1, 0)

	t.Setenv("MAINPID", strconv.Itoa(os.Getpid()))
	in.rewrite(runConfig + "frob: 1\nfrubs: 2\n")
	code, _, errs = reload()
	assert.Equal(t, cli.ExitConfig, code)
	assert.Contains(t, errs, "penstock.yaml:4:1: frob: unknown key")
	in.expect("RELOADING=1")
	for !strings.Contains(in.status(), "the configuration file is not in force: "+in.config+":4:1: frob: unknown key") {
	}
	in.counts(2, 2, 0)

	in.signal()
	assert.Equal(t, cli.ExitOK, <-in.code, in.log.String())
	in.closeStore()
	in.rewrite(runConfig)
	code, _, errs = reload()
	assert.Equal(t, cli.ExitFail, code)
	assert.Contains(t, errs, "no proxy answers at")
	assert.NotContains(t, errs, "takes a restart")
	in.rewrite(strings.Replace(runConfig, "127.0.0.1:0", unheard, 1))
	code, _, errs = run(t, "reload", "--config", in.config)
	assert.Equal(t, cli.ExitFail, code)
	assert.Contains(t, errs, "where telemetry.address is new in the file, it takes a restart")
	t.Setenv("MAINPID", "")
	in.rewrite(strings.Replace(runConfig, "telemetry: {address: \"127.0.0.1:0\"}", "telemetry: {address: \"off\"}", 1))
	code, _, errs = run(t, "reload", "--config", in.config)
	assert.Equal(t, cli.ExitFail, code)
	assert.Contains(t, errs, "telemetry.address is off")
}

// A restart with a broken file goes on with what worked, and says so everywhere.
func TestABrokenFileStartsTheLastGoodConfiguration(t *testing.T) {
	dir := t.TempDir()
	config, kept, pw := filepath.Join(dir, "penstock.yaml"), filepath.Join(dir, "last-good"), filepath.Join(dir, "pw")
	write := func(text string) { require.NoError(t, os.WriteFile(config, []byte(text), 0o600)) }
	good := strings.Replace(runConfig, "allow:", "users: [{name: u, password_file: pw}], allow:", 1)
	require.NoError(t, os.WriteFile(pw, []byte("first\n"), 0o600))
	end := func(in *instance) {
		in.signal()
		require.Equal(t, cli.ExitOK, <-in.code, in.log.String())
	}

	write("listeners: [\n")
	code, _, errs := run(t, "run", "--config", config, "--last-good", kept)
	assert.Equal(t, cli.ExitConfig, code, "there is none")
	assert.Contains(t, errs, config+":1:12:")

	write(good)
	end(startRunWithout(t, "--config", config, "--last-good", kept))
	info, err := os.Stat(kept)
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o600), info.Mode().Perm(), "it holds the password")

	write(good + "frob: 1\n")
	require.NoError(t, os.Remove(pw))
	in := startRunWithout(t, "--config", config, "--last-good", kept)
	assert.Equal(t, http.StatusProxyAuthRequired, in.tunnelAs("second"))
	assert.NotEqual(t, http.StatusProxyAuthRequired, in.tunnelAs("first"))
	line := in.log.line(t, "the configuration has a mistake; the last good one is in force until it is mended and "+
		"reloaded")
	assert.Equal(t, "ERROR", line["level"])
	assert.Contains(t, line["err"], "penstock.yaml:2:99: listeners[0].users[0].password_file: "+pw)
	in.counts(0, 0, 0)

	require.NoError(t, os.WriteFile(pw, []byte("second\n"), 0o600))
	write(good)
	code, body := in.post("/-/reload")
	require.Equal(t, http.StatusOK, code, body)
	assert.NotContains(t, in.status(), "not in force")
	in.counts(1, 0, 1)
	assert.NotEqual(t, http.StatusProxyAuthRequired, in.tunnelAs("second"))
	end(in)

	write("listeners: [\n")
	in = startRunWithout(t, "--config", config, "--last-good", kept)
	assert.NotEqual(t, http.StatusProxyAuthRequired, in.tunnelAs("second"), "the last that worked, not the first")
	end(in)

	require.NoError(t, os.Chmod(kept, 0o644))
	code, _, errs = run(t, "run", "--config", config, "--last-good", kept)
	assert.Equal(t, cli.ExitConfig, code)
	assert.Contains(t, errs, "holds a secret")
	require.NoError(t, os.Chmod(kept, 0o600))
	require.NoError(t, os.WriteFile(kept, []byte("{"), 0o600))
	code, _, errs = run(t, "run", "--config", config, "--last-good", kept)
	assert.Equal(t, cli.ExitConfig, code)
	assert.Contains(t, errs, "is no saved configuration")
}

// A file that the configuration is read from is not written over, by whatever name.
func TestTheLastGoodFileIsNotTheConfiguration(t *testing.T) {
	dir := t.TempDir()
	config, pw, link := filepath.Join(dir, "penstock.yaml"), filepath.Join(dir, "pw"), filepath.Join(dir, "link")
	good := strings.Replace(runConfig, "allow:", "users: [{name: u, password_file: pw}], allow:", 1)
	require.NoError(t, os.Symlink("pw", link))
	for _, kept := range []string{config, pw, link} {
		require.NoError(t, os.WriteFile(config, []byte(good), 0o600))
		require.NoError(t, os.WriteFile(pw, []byte("first\n"), 0o600))
		in := startRunWithout(t, "--config", config, "--last-good", kept)
		line := in.log.line(t, "the configuration is not kept for a start with a broken one")
		assert.Contains(t, line["err"], "name a file of its own")
		in.signal()
		require.Equal(t, cli.ExitOK, <-in.code, in.log.String())
		text, err := os.ReadFile(config)
		require.NoError(t, err)
		assert.Equal(t, good, string(text))
		text, err = os.ReadFile(link)
		require.NoError(t, err)
		assert.Equal(t, "first\n", string(text))
	}

	require.NoError(t, os.WriteFile(config, []byte("listeners: [\n"), 0o600))
	pipe := filepath.Join(dir, "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	code, _, errs := run(t, "run", "--config", config, "--last-good", pipe)
	assert.Equal(t, cli.ExitConfig, code)
	assert.Contains(t, errs, "a regular file belongs there")
}

// The listener's allow lets clients reach the pages of this machine, not pass for somebody on it.
func TestAClientDoesNotReload(t *testing.T) {
	in := startRun(t, runConfig)
	proxy, ok := in.log.line(t, "listening")["address"].(string)
	require.True(t, ok)
	page, ok := in.log.line(t, "telemetry")["page"].(string)
	require.True(t, ok)
	pages := strings.TrimSuffix(strings.TrimPrefix(page, "http://"), "/")

	conn, err := net.Dial("tcp", proxy)
	require.NoError(t, err)
	defer conn.Close() //nolint:errcheck // nothing is written any more
	_, err = fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: x\r\n\r\n", pages)
	require.NoError(t, err)
	answers := bufio.NewReader(conn)
	assert.Equal(t, http.StatusOK, answer(t, answers))
	_, err = fmt.Fprintf(conn, "GET /healthz HTTP/1.1\r\nHost: %s\r\n\r\n", pages)
	require.NoError(t, err)
	assert.Equal(t, http.StatusOK, answer(t, answers))
	_, err = fmt.Fprintf(conn, "POST /-/reload HTTP/1.1\r\nHost: %s\r\nContent-Length: 0\r\n\r\n", pages)
	require.NoError(t, err)
	assert.Equal(t, http.StatusForbidden, answer(t, answers))
	assert.NotContains(t, in.log.String(), "configuration reloaded")

	in.signal()
	in.expect("STOPPING=1")
	_ = conn.Close()
	assert.Zero(t, <-in.code)
}

// answer reads one response and returns its status.
func answer(t *testing.T, from *bufio.Reader) int {
	t.Helper()
	resp, err := http.ReadResponse(from, nil)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return resp.StatusCode
}
