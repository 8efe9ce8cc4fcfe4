//go:build linux

package bpf

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestTheControlIsListedWhileItIsOpen(t *testing.T) {
	open(t, Config{Cells: 1}) // skips where there is none
	c, err := Open(Config{Cells: 1})
	require.NoError(t, err)
	name := c.Name()
	assert.True(t, strings.HasPrefix(name, namePrefix), name)
	assert.Contains(t, list(t), name)
	l := bound(t, c)
	assert.Equal(t, name, controlOf(t, l.sender))

	require.NoError(t, c.Close())
	until(t, "the kernel forgets the name", func() bool { return !slices.Contains(list(t), name) })
	l.pass(t, 100_000) // it goes on by itself
	other, _ := connect(t)
	err = tryOn(other, func(fd int) error {
		return unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, name)
	})
	assert.ErrorIs(t, err, unix.ENOENT)
}

func TestTwoControlsInAProcessHaveNamesOfTheirOwn(t *testing.T) {
	a, b := open(t, Config{Cells: 1}), open(t, Config{Cells: 1})
	require.NotEqual(t, a.Name(), b.Name())
	assert.Subset(t, list(t), []string{a.Name(), b.Name()})
	for _, c := range []*Control{a, b} {
		l := bound(t, c)
		l.pass(t, 100_000)
		assert.EqualValues(t, 100_000, l.settled(t).Acked)
	}
}

// TestProcessesWithOneNumberHaveNamesOfTheirOwn starts two that are the first in
// a process namespace of their own.
func TestProcessesWithOneNumberHaveNamesOfTheirOwn(t *testing.T) {
	open(t, Config{Cells: 1})
	ordered, orderedIn, a := first(t)
	killed, _, b := first(t)
	assert.NotEqual(t, a, b)
	assert.Equal(t, namePrefix+"1", a, "nobody had it before")
	assert.Subset(t, list(t), []string{a, b})

	require.NoError(t, orderedIn.Close())
	require.NoError(t, ordered.Wait())
	until(t, "the kernel forgets who ended", func() bool { return !slices.Contains(list(t), a) })
	assert.Contains(t, list(t), b)
	require.NoError(t, killed.Process.Kill())
	require.Error(t, killed.Wait())
	until(t, "the kernel forgets who was killed", func() bool { return !slices.Contains(list(t), b) })
}

// first starts a process with the number 1 that has a Control until its input
// ends, and returns the name of that.
func first(t *testing.T) (cmd *exec.Cmd, in io.Closer, name string) {
	t.Helper()
	cmd = exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childEnv+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	err = cmd.Start()
	if errors.Is(err, unix.EPERM) {
		t.Skipf("needs CAP_SYS_ADMIN for process namespaces: %v", err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() }) // unless the test saw to it
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	var pid int
	_, err = fmt.Sscan(line, &pid, &name)
	require.NoError(t, err)
	require.Equal(t, 1, pid)
	return cmd, in, name
}

// withCapabilities runs f on a thread that has no others.
func withCapabilities(t *testing.T, bits uint64, f func() error) error {
	t.Helper()
	return aside(func() error {
		if err := capset(bits); err != nil {
			return err
		}
		return f()
	})
}

func capset(bits uint64) error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{
		{Effective: uint32(bits), Permitted: uint32(bits)},
		{Effective: uint32(bits >> 32), Permitted: uint32(bits >> 32)},
	}
	return unix.Capset(&header, &data[0])
}

const (
	capBPF     = uint64(1) << unix.CAP_BPF
	capPerfmon = uint64(1) << unix.CAP_PERFMON
)

func TestWithoutACapabilityOpenSaysWhichAreNeeded(t *testing.T) {
	open(t, Config{Cells: 1})
	for name, bits := range map[string]uint64{
		"none":             0,
		"CAP_BPF alone":    capBPF,
		"CAP_PERFMON":      capPerfmon,
		"those for a mark": uint64(1) << unix.CAP_NET_ADMIN,
	} {
		t.Run(name, func(t *testing.T) {
			err := withCapabilities(t, bits, Check)
			require.ErrorIs(t, err, ErrUnsupported)
			require.ErrorIs(t, err, unix.EPERM)
			assert.ErrorContains(t, err, "CAP_BPF and CAP_PERFMON")
			assert.ErrorContains(t, err, "setcap cap_bpf,cap_perfmon+ep")
		})
	}
}

func TestTheNamedCapabilitiesAreEnoughAndNotNeededLater(t *testing.T) {
	open(t, Config{Cells: 1})
	sender, receiver := connect(t)
	l := &leg{sender: sender, receiver: receiver}
	var c *Control
	require.NoError(t, withCapabilities(t, capBPF|capPerfmon, func() (err error) {
		if c, err = Open(Config{Cells: 1}); err != nil {
			return err
		}
		if err := capset(0); err != nil {
			return err
		}
		return tryOn(sender, func(fd int) (err error) {
			l.Cell, err = c.Bind(fd, 0)
			return err
		})
	}))
	defer func() { require.NoError(t, c.Close()) }()
	defer l.Free()
	assert.Equal(t, c.Name(), controlOf(t, sender))
	l.window(t, 7)
	l.pass(t, 100_000)
	s := l.settled(t)
	assert.EqualValues(t, 100_000, s.Sent)
	onTime(t, s)
	assert.EqualValues(t, 7, s.Cwnd)
}

func TestWhatIsMissingIsNamedWithItsFix(t *testing.T) {
	for name, row := range map[string]struct {
		err     error
		release string
		btf     error
		want    []string
	}{
		"an old kernel": {
			unix.EINVAL, "6.1.0-32-amd64", nil,
			[]string{"needs Linux 6.10 or later, this is 6.1.0-32-amd64"},
		},
		"an old kernel without rights": {
			unix.EPERM, "5.10.226", fs.ErrNotExist,
			[]string{"needs Linux 6.10 or later, this is 5.10.226"},
		},
		"no type information": {
			unix.EINVAL, "6.12.9-custom", fs.ErrNotExist,
			[]string{"/sys/kernel/btf/vmlinux", "CONFIG_DEBUG_INFO_BTF=y"},
		},
		"no rights": {
			fmt.Errorf("load: %w", unix.EPERM), "6.18.0", nil,
			[]string{
				"CAP_BPF and CAP_PERFMON", "setcap cap_bpf,cap_perfmon+ep",
				"AmbientCapabilities=CAP_BPF CAP_PERFMON",
			},
		},
		"a kernel built without": {
			fmt.Errorf("load: %w", ebpf.ErrNotSupported), "7.0.0", nil,
			[]string{"CONFIG_BPF_SYSCALL=y", "CONFIG_BPF_JIT=y"},
		},
		"something else is passed on": {
			fmt.Errorf("load: %w", unix.ENOENT), "6.10.0", nil,
			[]string{"bpf: the kernel cannot be made to enforce the window: load: no such file or directory"},
		},
		"a release of its own kind may do": {
			unix.ENOENT, "mainline", nil,
			[]string{"no such file or directory"},
		},
		"a release that is not known may do": {
			unix.EPERM, "", nil,
			[]string{"CAP_BPF and CAP_PERFMON"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := explainError(row.err, row.release, row.btf)
			require.ErrorIs(t, err, ErrUnsupported)
			require.ErrorIs(t, err, row.err)
			for _, words := range row.want {
				assert.ErrorContains(t, err, words)
			}
		})
	}
}

func TestReleasesAreComparedByTheirNumbers(t *testing.T) {
	for release, want := range map[string]bool{
		"6.10.0": true, "6.10-rc1": true, "6.9.12": false, "6.18.44-fc": true, "7.0.0": true, "5.19.0": false,
		"10.1.0": true, "4.99.0": false, "unlike": true,
	} {
		assert.Equal(t, want, atLeast(release, 6, 10), release)
	}
}

// TestASocketThatSelectsTheControlByItselfRunsReno: any process may.
func TestASocketThatSelectsTheControlByItselfRunsReno(t *testing.T) {
	c := open(t, Config{Cells: 1})
	sender, receiver := connect(t)
	require.NoError(t, withCapabilities(t, 0, func() error { return choose(sender, c) }))
	until(t, "its window grows", func() bool {
		pass(t, sender, receiver, 256<<10)
		return info(t, sender).Snd_cwnd > 60
	})
	before := info(t, sender)

	loseOneIn(t, receiver, 20)
	until(t, "something is lost", func() bool {
		pass(t, sender, receiver, 256<<10)
		return info(t, sender).Total_retrans > before.Total_retrans
	})
	after := info(t, sender)
	assert.NotEqual(t, before.Snd_ssthresh, after.Snd_ssthresh)
	assert.Less(t, after.Snd_cwnd, before.Snd_cwnd)
}

func choose(conn *net.TCPConn, c *Control) error {
	return tryOn(conn, func(fd int) error {
		return unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, c.Name())
	})
}
