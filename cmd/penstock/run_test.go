package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/telemetry"
)

// journal keeps what is logged.
type journal struct{ need.Output }

// has waits until words are logged.
func (j *journal) has(t *testing.T, words string) {
	t.Helper()
	assert.Eventually(t, func() bool { return strings.Contains(j.String(), words) }, 30*time.Second, time.Millisecond,
		"%s is not logged", words)
}

// line waits for a logged object with that message, and returns the first.
func (j *journal) line(t *testing.T, msg string) map[string]any {
	t.Helper()
	j.has(t, `"msg":"`+msg+`"`)
	for text := range strings.Lines(j.String()) {
		var line map[string]any
		require.NoError(t, json.Unmarshal([]byte(text), &line), text)
		if line["msg"] == msg {
			return line
		}
	}
	require.Fail(t, "nothing logged as "+msg, j.String())
	return nil
}

// instance is one running proxy, with systemd played by the test.
type instance struct {
	t      *testing.T
	log    journal
	code   chan int
	notify *net.UnixConn
	config string // the file
}

const runConfig = `
listeners: [{name: local, mode: connect, address: "127.0.0.1:0", allow: [127.0.0.0/8]}]
telemetry: {address: "127.0.0.1:0"}
`

// startRun runs the command with config and flags, and returns when it has
// told systemd that it is ready.
func startRun(t *testing.T, config string, flags ...string) *instance {
	t.Helper()
	dir := t.TempDir()
	path := filepath.Join(dir, "penstock.yaml")
	require.NoError(t, os.WriteFile(path, []byte(config), 0o600))
	in := startRunWithout(t, append([]string{"--config", path}, flags...)...)
	in.config = path
	return in
}

// startRunWithout is startRun without a configuration.
func startRunWithout(t *testing.T, flags ...string) *instance {
	t.Helper()
	dir := t.TempDir()
	socket := &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"}
	conn, err := net.ListenUnixgram("unixgram", socket)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	t.Setenv("NOTIFY_SOCKET", socket.Name)
	in := &instance{t: t, code: make(chan int, 1), notify: conn}
	// The process is the test's: other tests need what it may do.
	args := append([]string{"run", "--keep-privileges"}, flags...)
	go func() { in.code <- runCommandLine(t.Context(), args, io.Discard, &in.log) }()
	in.expect("READY=1")
	return in
}

// expect waits for a notification, and returns the status that comes with it.
// Those of a status alone are passed over, and those of a process that this one has taken over from.
func (in *instance) expect(state string) (status string) {
	in.t.Helper()
	told := in.notified()
	for strings.HasPrefix(told, "STATUS=") || strings.HasPrefix(told, "MAINPID=") {
		require.Empty(in.t, in.code, "the process has ended, and another one notifies; log:\n%s", &in.log)
		told = in.notified()
	}
	told, status, _ = strings.Cut(told, "\n")
	require.Equal(in.t, state, told)
	return status
}

// status waits for a notification of a status alone.
func (in *instance) status() string {
	in.t.Helper()
	for {
		if status, alone := strings.CutPrefix(in.notified(), "STATUS="); alone {
			return status
		}
	}
}

// notified returns the next notification.
func (in *instance) notified() string {
	in.t.Helper()
	require.NoError(in.t, in.notify.SetReadDeadline(time.Now().Add(10*time.Second)))
	buf := make([]byte, 1024)
	n, err := in.notify.Read(buf)
	require.NoError(in.t, err, "systemd was told nothing; log:\n%s", in.log.String())
	return strings.TrimSpace(string(buf[:n]))
}

// closeStore drops the sockets that a process which has ended left to systemd, as systemd does where no start follows.
func (in *instance) closeStore() {
	in.t.Helper()
	require.NoError(in.t, in.notify.SetReadDeadline(time.Now().Add(10*time.Millisecond)))
	for err := error(nil); err == nil; {
		_, err = in.notify.Read(make([]byte, 1024))
	}
}

func (in *instance) signal() {
	in.t.Helper()
	require.NoError(in.t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
}

// get reads one of the pages.
func (in *instance) get(page string) (int, string) {
	in.t.Helper()
	metrics, ok := in.log.line(in.t, "telemetry")["metrics"].(string)
	require.True(in.t, ok)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get(strings.TrimSuffix(metrics, "/metrics") + page)
	require.NoError(in.t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(in.t, err)
	require.NoError(in.t, resp.Body.Close())
	return resp.StatusCode, string(body)
}

// connect opens a connection through the proxy to a server that echoes.
func (in *instance) connect() net.Conn {
	in.t.Helper()
	address, ok := in.log.line(in.t, "listening")["address"].(string)
	require.True(in.t, ok)
	return in.connectBy(address)
}

// connectBy is connect where the proxy listens there.
func (in *instance) connectBy(address string) net.Conn {
	in.t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(in.t, err)
	need.Serve(in.t, ln, func(c net.Conn) { _, _ = io.Copy(c, c) })
	conn, err := net.Dial("tcp", address)
	require.NoError(in.t, err)
	in.t.Cleanup(func() { _ = conn.Close() })
	_, err = fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: x\r\n\r\n", ln.Addr())
	require.NoError(in.t, err)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(in.t, err)
	require.NoError(in.t, resp.Body.Close())
	require.Equal(in.t, http.StatusOK, resp.StatusCode)
	return conn
}

func echoes(t *testing.T, conn net.Conn) {
	t.Helper()
	echoesText(t, conn, "hello")
}

// echoesMuch has more underway than goes without an algorithm.
func echoesMuch(t *testing.T, conn net.Conn) {
	t.Helper()
	echoesText(t, conn, strings.Repeat("hello", 200_000))
}

func echoesText(t *testing.T, conn net.Conn, text string) {
	t.Helper()
	wrote := make(chan error, 1)
	go func() {
		_, err := conn.Write([]byte(text))
		wrote <- err
	}()
	got := make([]byte, len(text))
	_, err := io.ReadFull(conn, got)
	require.NoError(t, err)
	require.NoError(t, <-wrote)
	assert.True(t, text == string(got))
}

func TestRunDrainsOnASignal(t *testing.T) {
	in := startRun(t, runConfig)
	conn := in.connect()
	echoes(t, conn)
	code, body := in.get("/flows")
	require.Equal(t, http.StatusOK, code)
	var flows []telemetry.Flow
	require.NoError(t, json.Unmarshal([]byte(body), &flows))
	require.Len(t, flows, 1)
	assert.Equal(t, conn.LocalAddr().String(), flows[0].Client)

	in.signal()
	in.expect("STOPPING=1")
	echoes(t, conn) // what is open goes on
	require.Eventually(t, func() bool {
		code, _ := in.get("/readyz")
		return code == http.StatusServiceUnavailable
	}, 5*time.Second, time.Millisecond, "ready while draining")
	require.NoError(t, conn.Close())
	assert.Equal(t, cli.ExitOK, <-in.code, in.log.String())

	assert.NotEmpty(t, in.log.line(t, "penstock starts")["version"])
	assert.NotEmpty(t, in.log.line(t, "datapath")["envelope"])
	rule := in.log.line(t, "rule")
	assert.Equal(t, []any{"penstock", "none"}, []any{rule["client_windows"], rule["server_windows"]})
	closed := in.log.line(t, "flow closed")
	assert.Equal(t, "eof", closed["reason"])
	assert.IsType(t, 0.0, closed["duration_seconds"])
}

func TestASecondSignalIsNoFailureWhereNothingIsOpen(t *testing.T) {
	in := startRun(t, runConfig+"shutdown: {delay: 1h, drain: 1h}\n")
	in.signal()
	in.expect("STOPPING=1")
	in.signal()
	assert.Equal(t, cli.ExitOK, in.ends(), in.log.String())
	assert.NotContains(t, in.log.String(), "second signal")
}

func TestASecondSignalDoesNotWait(t *testing.T) {
	in := startRun(t, runConfig, "--drain", "1h")
	conn := in.connect()
	in.signal()
	in.expect("STOPPING=1")
	in.signal()
	assert.Equal(t, cli.ExitFail, <-in.code)
	assert.Contains(t, in.log.String(), "second signal")
	_, err := conn.Read(make([]byte, 1))
	assert.ErrorIs(t, err, syscall.ECONNRESET, "a FIN would make a cut transfer look whole")
}

// What was opened, an interface and rules of the packet filter among it, is taken down again.
func TestASignalBeforeTheProxyServesEndsItInGoodOrder(t *testing.T) {
	good := filepath.Join(t.TempDir(), "good")
	endpoints := good + ".endpoints" // which are read once all is open
	require.NoError(t, unix.Mkfifo(endpoints, 0o600))
	var writer sync.WaitGroup
	defer writer.Wait()
	writer.Go(func() {
		pipe, err := os.OpenFile(endpoints, os.O_WRONLY, 0)
		assert.NoError(t, err)
		assert.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
		assert.NoError(t, pipe.Close())
	})
	in := startRun(t, runConfig, "--last-good", good)
	in.expect("STOPPING=1")
	assert.Equal(t, cli.ExitOK, <-in.code)
}

func TestRunFeedsTheWatchdog(t *testing.T) {
	t.Setenv("WATCHDOG_USEC", "20000")
	t.Setenv("WATCHDOG_PID", fmt.Sprint(os.Getpid()))
	in := startRun(t, runConfig)
	for range 3 {
		in.expect("WATCHDOG=1")
	}
	in.signal()
	assert.Equal(t, cli.ExitOK, <-in.code)
}

func TestRunWritesATrace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	in := startRun(t, runConfig, "--trace", path, "--pprof", "--algorithm", "reno")
	conn := in.connect()
	echoesMuch(t, conn)
	code, _ := in.get("/debug/pprof/cmdline")
	assert.Equal(t, http.StatusOK, code)
	// The acknowledgement of what was echoed comes with one of the next ticks.
	require.Eventually(t, func() bool {
		_, body := in.get("/flows")
		var flows []telemetry.Flow
		return json.Unmarshal([]byte(body), &flows) == nil && len(flows) == 1 &&
			flows[0].Down.Control != nil && flows[0].Down.Control.Delivered > 0
	}, 5*time.Second, time.Millisecond)
	require.NoError(t, conn.Close())
	in.signal()
	require.Equal(t, cli.ExitOK, <-in.code, in.log.String())
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	var line map[string]any
	require.NoError(t, json.Unmarshal(bytes.SplitN(text, []byte("\n"), 2)[0], &line))
	assert.Equal(t, "reno", line["algorithm"])
	assert.Equal(t, "ack", line["event"])
}

// Who rotates the trace copies the file and truncates it; what follows begins where it is empty.
func TestATraceGoesOnAfterItWasTruncated(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	h := &service{flags: runFlags{trace: path}}
	done, err := h.openTrace()
	require.NoError(t, err)
	more := func() { // than is kept in memory
		for range 500 {
			h.flows.Trace(flow.Event{Kind: flow.KindAck})
		}
	}
	more()
	require.Eventually(t, func() bool {
		file, err := os.Stat(path)
		return err == nil && file.Size() > 0
	}, 10*time.Second, time.Millisecond)
	require.NoError(t, os.Truncate(path, 0))
	more()
	require.NoError(t, done())
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NotEmpty(t, text)
	for line := range bytes.Lines(text) {
		require.True(t, json.Valid(line), "%q", line[:min(len(line), 100)])
	}
}

func TestRunRefusesWhatCannotWork(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	broken := filepath.Join(t.TempDir(), "broken.yaml")
	require.NoError(t, os.WriteFile(broken, []byte("listeners: []\nfrob: 1\n"), 0o600))
	good := filepath.Join(t.TempDir(), "good.yaml")
	require.NoError(t, os.WriteFile(good, []byte(runConfig), 0o600))

	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"a file that is not there": {
			[]string{"-c", "/nonexistent.yaml"},
			cli.ExitConfig,
			"/nonexistent.yaml",
		},
		"an unknown key": {[]string{"-c", broken}, cli.ExitConfig, "frob"},
		"an unknown envelope": {
			[]string{"--envelope", "frob"},
			cli.ExitInput,
			`"frob" is not one of auto, ebpf, bbr, cubic, reno`,
		},
		"an unknown algorithm": {
			[]string{"--algorithm", "frob"},
			cli.ExitInput,
			`no algorithm "frob"`,
		},
		"a time without its unit":   {[]string{"--drain", "30"}, cli.ExitInput, "--drain"},
		"an address without a port": {[]string{"--listen", "localhost"}, cli.ExitInput, "is not host:port"},
		"a listener beside a file": {
			[]string{"-c", good, "--listen", "127.0.0.1:1"},
			cli.ExitInput,
			"--listen",
		},
		"a listener on a taken port": {
			[]string{"--listen", taken.Addr().String(), "--telemetry", "off"},
			cli.ExitFail, "is in use by penstock.test",
		},
		"telemetry on a taken port": {
			[]string{"-c", good, "--telemetry", taken.Addr().String()},
			cli.ExitFail, "--telemetry",
		},
		"a trace into nowhere": {
			[]string{"-c", good, "--trace", "/nonexistent/trace"},
			cli.ExitFail,
			"--trace",
		},
		"a word in the place of a log level": {
			[]string{"--log-level", "loud"},
			cli.ExitInput,
			"debug, info, warn, error",
		},
		"a word with quotes is shown as it was": {[]string{"--mark", `a"b`}, cli.ExitInput, `a\"b`},
	} {
		t.Run(name, func(t *testing.T) {
			code, _, stderr := run(t, append([]string{"run"}, c.args...)...)
			assert.Equal(t, c.code, code, stderr)
			assert.Contains(t, stderr, c.says)
		})
	}
}

func TestFlagsOverrideTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "penstock.yaml")
	require.NoError(t, os.WriteFile(path, []byte(runConfig+`
envelope: cubic
defaults: {algorithm: "copa:delta=0.1", down: {algorithm: reno}}
log: {level: debug}
`), 0o600))
	load := func(args ...string) (config.Config, *runFlags) {
		t.Helper()
		var f runFlags
		flags := pflag.NewFlagSet("run", pflag.ContinueOnError)
		f.registerFlags(flags)
		require.NoError(t, flags.Parse(append([]string{"--config", path}, args...)))
		cfg, err := f.loadConfig(flags)
		require.NoError(t, err)
		return cfg, &f
	}

	cfg, f := load()
	assert.EqualValues(t, "cubic", cfg.Envelope)
	assert.EqualValues(t, "reno", cfg.Defaults.Down.Algorithm)
	assert.EqualValues(t, "debug", cfg.Log.Level)
	assert.Len(t, f.loaded.Hash, 64)

	cfg, _ = load("--envelope", "auto", "--algorithm", "vegas", "--log-level", "error", "--telemetry", "off",
		"--drain", "1m30s", "--mark", "0")
	assert.EqualValues(t, "auto", cfg.Envelope)
	assert.EqualValues(t, "vegas", cfg.Defaults.Algorithm)
	assert.Empty(t, cfg.Defaults.Down.Algorithm, "the flag is for both directions")
	assert.EqualValues(t, "error", cfg.Log.Level)
	assert.Equal(t, "off", cfg.Telemetry.Address)
	assert.Equal(t, 90*time.Second, cfg.Shutdown.Drain)
}
