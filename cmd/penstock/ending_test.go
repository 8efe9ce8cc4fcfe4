package main

import (
	"log/slog"
	"os"
	"path/filepath"
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
