package main

import (
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/cli"
)

// ends waits for the exit code.
func (in *instance) ends() int {
	in.t.Helper()
	select {
	case code := <-in.code:
		return code
	case <-time.After(time.Minute):
		require.Fail(in.t, "it goes on", in.log.String())
		return -1
	}
}

// fill writes to a descriptor, whose reader does not read, until there is no room.
func fill(t *testing.T, fd int) {
	t.Helper()
	require.NoError(t, unix.SetNonblock(fd, true))
	for {
		if _, err := unix.Write(fd, []byte("STATUS=full")); err != nil {
			require.ErrorIs(t, err, unix.EAGAIN)
			return
		}
	}
}

func TestTheEndWaitsForNobodyWhoReadsNoTrace(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "trace")
	require.NoError(t, unix.Mkfifo(pipe, 0o600))
	reader, err := os.OpenFile(pipe, os.O_RDWR, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = reader.Close() })
	h := &service{flags: runFlags{trace: pipe}, log: slog.New(slog.DiscardHandler)}
	done, err := h.openTrace()
	require.NoError(t, err)
	fill(t, int(reader.Fd()))
	h.trace.Event(flow.Event{})

	ended := make(chan error, 1)
	go func() { ended <- done() }()
	select {
	case err := <-ended:
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	case <-time.After(time.Minute):
		require.Fail(t, "it waits for a reader")
	}
	assert.EqualValues(t, 1, h.trace.Dropped())
}

func TestTheEndWaitsForNoSupervisorThatReadsNoMore(t *testing.T) {
	in := startRun(t, runConfig)
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	require.NoError(t, unix.Connect(fd, &unix.SockaddrUnix{Name: os.Getenv("NOTIFY_SOCKET")}))
	fill(t, fd)
	in.signal()
	assert.Equal(t, cli.ExitOK, in.ends())
}

// abortListener makes accept fail on the socket of this process that listens at a TCP address.
func abortListener(t *testing.T, at string) {
	t.Helper()
	_, port, err := net.SplitHostPort(at)
	require.NoError(t, err)
	all, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, each := range all {
		fd, err := strconv.Atoi(each.Name())
		require.NoError(t, err)
		listens, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
		if err != nil || listens == 0 {
			continue
		}
		name, err := unix.Getsockname(fd)
		require.NoError(t, err)
		if a, ok := name.(*unix.SockaddrInet4); ok && strconv.Itoa(a.Port) == port {
			require.NoError(t, unix.Shutdown(fd, unix.SHUT_RD))
			return
		}
	}
	require.Fail(t, "nobody listens there", at)
}

func TestASignalEndsTheDrainAfterTelemetryHasFailed(t *testing.T) {
	in := startRun(t, runConfig, "--drain", "1h")
	conn := in.connect()
	metrics, ok := in.log.line(t, "telemetry")["metrics"].(string)
	require.True(t, ok)
	abortListener(t, metrics[len("http://"):len(metrics)-len("/metrics")])
	in.log.has(t, "draining")
	in.signal()
	in.expect("STOPPING=1")
	in.signal()
	assert.Equal(t, cli.ExitFail, in.ends())
	_, err := conn.Read(make([]byte, 1))
	assert.ErrorIs(t, err, syscall.ECONNRESET)
}
