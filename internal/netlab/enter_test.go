//go:build linux

package netlab

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/sim"
)

const (
	tunEnv = "PENSTOCK_NETLAB_TEST_TUN"
	nobody = 65534
)

// playLab builds a lab with a path and sends a few bytes through it.
func playLab() error {
	if s := os.Getenv(tunEnv); s != "" {
		tunDevice = s
	}
	c, err := NewCellular(CellularConfig{Down: sim.LinkConfig{Delay: time.Millisecond}})
	if err != nil {
		return err
	}
	defer c.Close()
	ln, err := c.Server.Listen("tcp", port(c.ServerAddr.V4, 80))
	if err != nil {
		return err
	}
	defer ln.Close()
	go func() {
		if conn, err := ln.Accept(); err == nil {
			_, _ = io.WriteString(conn, "hello")
			_ = conn.Close()
		}
	}()
	conn, err := c.Client.Dial("tcp", ln.Addr().String())
	if err != nil {
		return err
	}
	defer conn.Close()
	b, err := io.ReadAll(conn)
	if err != nil {
		return err
	}
	fmt.Printf("uid %d got %s\n", os.Getuid(), b)
	return nil
}

func playEnter(then func() error) error {
	code, ran, err := Enter()
	if err != nil {
		return err
	}
	if ran {
		if code != 0 {
			return fmt.Errorf("inside: exit code %d", code)
		}
		return nil
	}
	return then()
}

// playWithoutQuota enters, forbids itself further namespaces and enters again:
// what a user meets where they are switched off.
func playWithoutQuota() error {
	return playEnter(func() error {
		for _, kind := range []string{"user", "net"} {
			if err := os.WriteFile("/proc/sys/user/max_"+kind+"_namespaces", []byte("0"), 0); err != nil {
				return err
			}
		}
		if err := os.Unsetenv(insideEnv); err != nil {
			return err
		}
		_, _, err := Enter()
		if err == nil {
			return errors.New("a second user namespace was granted")
		}
		fmt.Println(err)
		return nil
	})
}

// unprivileged runs this test binary in a role as a user without rights, with a
// TUN device node of the given mode.
func unprivileged(t *testing.T, role string, mode uint32) (string, error) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"="+role)
	if os.Getuid() == 0 {
		dir, err := os.MkdirTemp("", "netlab")
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
		require.NoError(t, os.Chmod(dir, 0o755))
		tun := filepath.Join(dir, "tun")
		if err := unix.Mknod(tun, unix.S_IFCHR|mode, int(unix.Mkdev(10, 200))); err != nil {
			t.Skip("needs CAP_MKNOD to lend the unprivileged user a TUN device: ", err)
		}
		require.NoError(t, os.Chmod(tun, os.FileMode(mode)))
		cmd.Env = append(cmd.Env, tunEnv+"="+tun)
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
	out, err := cmd.CombinedOutput()
	if err != nil && os.Getuid() != 0 {
		t.Skipf("this user may not enter a user namespace: %s", out)
	}
	return string(out), err
}

func TestWithoutRights(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to become nobody")
	}
	out, err := unprivileged(t, "lab", 0o666)
	require.Error(t, err, "a user without rights cannot build a lab as such")
	assert.Contains(t, out, "CAP_SYS_ADMIN and CAP_NET_ADMIN are needed")
}

// playUserNamespace starts a process in a user namespace of its own.
func playUserNamespace() error {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"=nothing")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET}
	return cmd.Run()
}

// needUserNamespaces skips a test where a user without rights gets no user
// namespace: in a container, in a chroot, or where a sysctl forbids them.
func needUserNamespaces(t *testing.T) {
	t.Helper()
	if out, err := unprivileged(t, "user-namespace", 0o666); err != nil {
		t.Skip("needs user namespaces for ordinary users, which a container's seccomp profile, a chroot or a "+
			"sysctl forbids: ", out)
	}
}

func TestEnter(t *testing.T) {
	needUserNamespaces(t)
	out, err := unprivileged(t, "enter", 0o666)
	require.NoError(t, err, out)
	assert.Equal(t, "uid 0 got hello\n", out)
}

func TestEnterNamesTheDevice(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to become nobody")
	}
	needUserNamespaces(t)
	out, err := unprivileged(t, "enter", 0o600)
	require.Error(t, err)
	assert.Contains(t, out, "may not be opened by this user")
	assert.Contains(t, out, "chmod 0666")
}

func TestEnterNamesTheQuota(t *testing.T) {
	needUserNamespaces(t)
	out, err := unprivileged(t, "enter-without-quota", 0o666)
	require.NoError(t, err, out)
	assert.Contains(t, out, "sysctl -w user.max_user_namespaces")
}

func TestEnterWithRightsReturnsAtOnce(t *testing.T) {
	needNamespaces(t)
	code, ran, err := Enter()
	require.NoError(t, err)
	assert.False(t, ran)
	assert.Zero(t, code)
}
