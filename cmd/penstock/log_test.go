package main

import (
	"bytes"
	"encoding/json"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/logqueue"
	"github.com/penstock-net/penstock/internal/need"
)

// unreadPipe is a standard error that nobody reads: a pipe that is full. It is as a shell makes it, so that a write
// blocks a thread.
func unreadPipe(t *testing.T) (end *os.File, read func() string) {
	t.Helper()
	var fds [2]int
	require.NoError(t, unix.Pipe2(fds[:], unix.O_CLOEXEC))
	size, err := unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, os.Getpagesize())
	require.NoError(t, err)
	nobody, end := os.NewFile(uintptr(fds[0]), "nobody"), os.NewFile(uintptr(fds[1]), "stderr")
	t.Cleanup(func() { _ = nobody.Close() })
	_, err = end.WriteString(strings.Repeat(".", size))
	require.NoError(t, err)
	return end, func() string {
		text, err := io.ReadAll(nobody)
		assert.NoError(t, err)
		return strings.TrimLeft(string(text), ".")
	}
}

const stuckConfig = `
listeners: [{name: local, mode: connect, address: "HOST:1080", allow: [127.0.0.0/8]}]
rules: [{name: named, match: {server_name: ["*.example.com"]}, algorithm: reno}]
limits: {connections: 1}
log: {level: debug}
telemetry: {address: "HOST:9464"}
`

// Neither the start waits for who reads the log, nor do connections, refusals, a reload and the end.
func TestALogThatNobodyReadsHoldsNothingUp(t *testing.T) {
	program, err := static()
	require.NoError(t, err)
	for _, c := range []struct {
		name, drain string
		code        int
	}{
		{"a drain", "10ms", cli.ExitOK},
		{"a second signal", "1h", cli.ExitFail},
	} {
		t.Run(c.name, func(t *testing.T) {
			host := need.Host()
			file := filepath.Join(t.TempDir(), "penstock.yaml")
			require.NoError(t, os.WriteFile(file, []byte(strings.ReplaceAll(stuckConfig, "HOST", host)), 0o600))
			socket := &net.UnixAddr{Name: filepath.Join(t.TempDir(), "notify"), Net: "unixgram"}
			notify, err := net.ListenUnixgram("unixgram", socket)
			require.NoError(t, err)
			defer notify.Close()
			end, read := unreadPipe(t)
			cmd := exec.Command(program, "run", "--config", file, "--drain", c.drain)
			cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+socket.Name)
			cmd.Stderr = end
			require.NoError(t, cmd.Start())
			_ = end.Close()
			ended := make(chan struct{})
			go func() {
				_ = cmd.Wait() // the exit code tells
				close(ended)
			}()
			defer cmd.Process.Kill() //nolint:errcheck // it has ended by itself, unless the test fails
			in := &instance{t: t, notify: notify}
			in.expect("READY=1")

			echoes(t, in.connectBy(host+":1080"))
			for range 100 { // each leaves a line
				refused, err := net.Dial("tcp", host+":1080")
				if err == nil {
					_, err = refused.Read(make([]byte, 1))
					_ = refused.Close()
				}
				require.ErrorIs(t, err, syscall.ECONNRESET)
			}
			resp, err := http.Post("http://"+host+":9464/-/reload", "", nil)
			require.NoError(t, err)
			_ = resp.Body.Close()
			assert.Equal(t, http.StatusOK, resp.StatusCode)
			http.DefaultClient.CloseIdleConnections()
			require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
			in.expect("STOPPING=1")
			if c.code != cli.ExitOK {
				require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
			}
			select {
			case <-ended:
			case <-time.After(30 * time.Second):
				require.Fail(t, "the end waits for who reads the log")
			}
			assert.Equal(t, c.code, cmd.ProcessState.ExitCode())
			assert.NotContains(t, read(), "\n", "nobody has read what came first")
		})
	}
}

// Lines of libraries are like all others, and are for who asks for them.
func TestWhatLibrariesLogIsOfTheLog(t *testing.T) {
	for level, lines := range map[string]int{"debug": 1, "info": 0} {
		in := startRun(t, runConfig, "--log-level", level)
		log.Print("a library says")
		in.signal()
		in.expect("STOPPING=1")
		assert.Equal(t, cli.ExitOK, <-in.code)
		assert.Equal(t, lines, strings.Count(in.log.String(), `"level":"DEBUG","msg":"a library says"}`), level)
	}
}

// gated is a standard error that is read once it is open.
type gated struct {
	open chan struct{}
	bytes.Buffer
}

func (g *gated) Write(b []byte) (int, error) {
	<-g.open
	return g.Buffer.Write(b)
}

func TestLinesThatAreMissingAreTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := &gated{open: make(chan struct{})}
		queue := &logqueue.Writer{To: out}
		log := newLogger(queue, "json", slog.LevelError)
		const lines = 30_000
		for i := range lines {
			log.Error("line", "number", i, "filler", strings.Repeat("x", 100))
		}
		close(out.open)
		queue.Flush()
		log.Error("line", "number", lines)
		queue.Flush()
		next, told := 0, 0
		for text := range strings.Lines(out.String()) {
			var line struct {
				Msg           string
				Number, Lines int
			}
			require.NoError(t, json.Unmarshal([]byte(text), &line))
			if line.Lines > 0 {
				told++
				assert.Contains(t, line.Msg, "missing")
				next += line.Lines
				continue
			}
			assert.Equal(t, next, line.Number)
			next++
		}
		assert.Equal(t, 1, told)
		assert.Equal(t, lines+1, next)
	})
}
