package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/cli/clitest"
)

// unit is a service as systemd sees it: the processes that say they are the main one, one after the other.
type unit struct {
	t        *testing.T
	notify   *net.UnixConn
	log      *os.File
	main     int
	programs string // a folder for copies of the program
	stored   []*os.File
	names    []string // of stored
}

// newUnit has processes notify the test, and write into one log.
func newUnit(t *testing.T) *unit {
	t.Helper()
	socket := &net.UnixAddr{Name: filepath.Join(t.TempDir(), "notify"), Net: "unixgram"}
	notify, err := net.ListenUnixgram("unixgram", socket)
	require.NoError(t, err)
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	require.NoError(t, err)
	u := &unit{t: t, notify: notify, log: log, programs: t.TempDir()}
	t.Setenv("NOTIFY_SOCKET", socket.Name)
	t.Cleanup(func() {
		if u.main > 0 {
			_ = syscall.Kill(u.main, syscall.SIGKILL)
		}
		if t.Failed() {
			t.Log(u.said())
		}
		for _, f := range u.stored {
			_ = f.Close()
		}
		assert.NoError(t, notify.Close())
		assert.NoError(t, log.Close())
	})
	return u
}

// said returns what the processes have logged.
func (u *unit) said() string {
	u.t.Helper()
	text, err := os.ReadFile(u.log.Name())
	require.NoError(u.t, err)
	return string(text)
}

// command prepares a program of this unit.
func (u *unit) command(program string, args ...string) *exec.Cmd {
	cmd := exec.Command(program, args...)
	cmd.Env = append(clitest.Environment(), fmt.Sprintf("MAINPID=%d", u.main))
	cmd.Stderr = u.log
	return cmd
}

// upgrade returns another program file with what this one has.
func (u *unit) upgrade(name string) (program string) {
	u.t.Helper()
	program = filepath.Join(u.programs, name)
	text, err := os.ReadFile("/proc/self/exe")
	require.NoError(u.t, err)
	require.NoError(u.t, os.WriteFile(program, text, 0o700)) //nolint:gosec // it is run
	return program
}

// awaitSaid waits for a notification that matches a pattern, and returns what its group has. It keeps what is stored
// meanwhile.
func (u *unit) awaitSaid(pattern string) (group string) {
	u.t.Helper()
	for {
		require.NoError(u.t, u.notify.SetReadDeadline(time.Now().Add(30*time.Second)))
		text, rights := make([]byte, 1024), make([]byte, unix.CmsgSpace(4*8))
		n, control, _, _, err := u.notify.ReadMsgUnix(text, rights)
		require.NoError(u.t, err, pattern)
		said := string(text[:n])
		messages, err := unix.ParseSocketControlMessage(rights[:control])
		require.NoError(u.t, err)
		for _, m := range messages {
			fds, err := unix.ParseUnixRights(&m)
			require.NoError(u.t, err)
			name, ok := strings.CutPrefix(said, "FDSTORE=1\nFDNAME=")
			require.True(u.t, ok, said)
			for _, fd := range fds {
				u.stored, u.names = append(u.stored, os.NewFile(uintptr(fd), name)), append(u.names, name)
			}
		}
		if found := regexp.MustCompile(pattern).FindStringSubmatch(said); found != nil {
			return found[len(found)-1]
		}
	}
}

// awaitMain waits until the main process names the one that takes over, and that is ready.
func (u *unit) awaitMain() {
	u.t.Helper()
	before := u.main
	pid, err := strconv.Atoi(u.awaitSaid(`^MAINPID=(\d+)$`))
	require.NoError(u.t, err)
	u.awaitSaid("READY=1")
	require.NotEqual(u.t, before, pid)
	u.main = pid
}

// TestAServiceGoesOnInAnotherProcess has a running proxy replaced by the means that a unit has: SIGUSR2, a reload
// after the program file has changed, and a restart with stored sockets.
func TestAServiceGoesOnInAnotherProcess(t *testing.T) {
	u := newUnit(t)
	at := vacantPort(t)
	file := filepath.Join(t.TempDir(), "penstock.yaml")
	config := fmt.Sprintf("listeners: [{name: local, mode: forward, target: %q, address: %q}]\n"+
		"telemetry: {address: \"off\"}\nshutdown: {drain: 0s}\n", echoServer(t), at)
	require.NoError(t, os.WriteFile(file, []byte(config), 0o600))
	args := []string{"run", "--keep-privileges", "--config", file, "--state-directory", t.TempDir()}
	first := u.command("/proc/self/exe", args...)
	first.Env = append(first.Env, "WATCHDOG_USEC=2000000")
	require.NoError(t, first.Start())
	u.main = first.Process.Pid
	u.awaitSaid("READY=1")
	held, err := net.Dial("tcp4", at)
	require.NoError(t, err)
	require.NoError(t, exchange(held, "before"))

	require.NoError(t, syscall.Kill(u.main, syscall.SIGUSR2))
	u.awaitMain()
	require.NoError(t, first.Wait(), "its connection has moved")
	require.NoError(t, exchange(held, "after SIGUSR2"))

	second := u.upgrade("second")
	said, err := u.command(second, "reload", "--config", file).Output()
	require.NoError(t, err)
	u.awaitMain()
	assert.Equal(t, fmt.Sprintf("process %d of another program has taken over\n", u.main), string(said))
	require.NoError(t, exchange(held, "after a reload by another program"))
	u.awaitSaid("WATCHDOG=1") // or systemd would kill it

	said, err = u.command(second, "reload", "--config", file).Output()
	require.NoError(t, err)
	assert.Contains(t, string(said), "told by SIGHUP", "it is the same program")

	require.NoError(t, os.WriteFile(file, []byte("frob: 1\n"+config), 0o600))
	assert.Error(t, u.command(u.upgrade("third"), "reload", "--config", file).Run(), "the file has a mistake")
	require.NoError(t, exchange(held, "after an upgrade that fails"))
	require.NoError(t, held.Close())
	require.NoError(t, os.WriteFile(file, []byte(config), 0o600))

	require.NoError(t, syscall.Kill(u.main, syscall.SIGTERM))
	u.awaitSaid("STOPPING=1")
	u.awaitSaid("FDNAME=penstock.listener")
	require.Eventually(t, func() bool { return syscall.Kill(u.main, 0) != nil }, 30*time.Second, time.Millisecond)
	waiting, err := net.Dial("tcp4", at)
	require.NoError(t, err, "systemd has the socket")
	defer waiting.Close()

	next := u.command("sh", append([]string{"-c", `LISTEN_PID=$$ exec /proc/"$0"/exe "$@"`, strconv.Itoa(os.Getpid())},
		args...)...)
	next.Env = append(next.Env, fmt.Sprintf("LISTEN_FDS=%d", len(u.stored)), "LISTEN_FDNAMES="+strings.Join(u.names, ":"))
	next.ExtraFiles = u.stored
	require.NoError(t, next.Start())
	u.main = next.Process.Pid
	u.awaitSaid("READY=1")
	u.awaitSaid("FDSTOREREMOVE=1\nFDNAME=penstock.listener")
	require.NoError(t, exchange(waiting, "what came between is served"))
	require.NoError(t, waiting.Close())
	require.NoError(t, next.Process.Signal(syscall.SIGTERM))
	_, err = next.Process.Wait()
	require.NoError(t, err)
	assert.NotContains(t, u.said(), "DATA RACE")
}
