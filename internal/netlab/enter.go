//go:build linux

package netlab

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// insideEnv marks the run of this program that Enter started. Its value is the caller's user and group: "1000:1000".
const insideEnv = "PENSTOCK_NETLAB_INSIDE"

// Enter makes labs possible for a user without privileges. When this process may
// build labs already it returns at once. Otherwise it runs this very program
// again, same arguments, as root of a user namespace of its own, and waits for
// it: ran is then true, the work is done, and the caller exits with code.
func Enter() (code int, ran bool, err error) {
	probe := probeNamespaces()
	if probe == nil {
		return 0, false, nil
	}
	if os.Getenv(insideEnv) != "" {
		return 0, false, fmt.Errorf("netlab: a user namespace was granted, but without its rights: %w%s", probe,
			privilegeHint(probe))
	}
	code, err = runInside()
	if err != nil {
		return 0, false, fmt.Errorf("netlab: without root, a user namespace is needed: %w%s", err,
			userNamespaceHint(err))
	}
	return code, true, nil
}

// probeNamespaces makes a network namespace and brings its loopback device up, as
// some systems grant the first and refuse the second.
func probeNamespaces() error {
	l := New()
	_, err := l.Node("probe")
	return errors.Join(err, l.Close())
}

func runInside() (int, error) {
	runtime.LockOSThread() // the child dies with the thread that starts it
	defer runtime.UnlockOSThread()

	// The program may lie in a directory that others cannot search, or be
	// deleted already, as under "go run"; this link still leads to it.
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d:%d", insideEnv, os.Getuid(), os.Getgid()))
	// The network stays this one: a lab may connect its nodes to it (package traffic).
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	return passSignals(cmd.Start, cmd.Wait, cmd)
}

// RunInForeground runs the command as a shell does: the terminal's keys and the signals to this process are the
// command's. It returns the exit code, which is 128 and the signal's number where a signal ended the command.
//
// Where Enter has made the caller root of a user namespace, the command runs as the caller again, without rights.
func (c *Cmd) RunInForeground() (code int, err error) {
	var uid, gid int
	if n, _ := fmt.Sscanf(os.Getenv(insideEnv), "%d:%d", &uid, &gid); n == 2 {
		c.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		c.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: 0, Size: 1}}
		c.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: gid, HostID: 0, Size: 1}}
	}
	if c.Env == nil {
		c.Env = os.Environ()
	}
	c.Env = slices.DeleteFunc(c.Env, func(v string) bool { return strings.HasPrefix(v, insideEnv+"=") })
	return passSignals(c.Start, c.Wait, c.Cmd)
}

// passSignals starts a command, passes it the signals that this process gets, and returns its exit code.
func passSignals(start, wait func() error, cmd *exec.Cmd) (code int, err error) {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT)
	defer signal.Stop(signals)
	if err := start(); err != nil {
		return 0, err
	}
	ended := make(chan error, 1)
	go func() { ended <- wait() }()
	for {
		select {
		case s := <-signals:
			if s != syscall.SIGINT && s != syscall.SIGQUIT || !isForeground() {
				_ = cmd.Process.Signal(s) // it may have ended just now
			}
		case err := <-ended:
			var exit *exec.ExitError
			if err != nil && !errors.As(err, &exit) {
				return 0, err
			}
			if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
				return 128 + int(status.Signal()), nil
			}
			return cmd.ProcessState.ExitCode(), nil
		}
	}
}

// isForeground reports whether the terminal's keys reach this process, and so its child as well.
func isForeground() bool {
	tty, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	defer tty.Close()
	group, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// userNamespaceHint names what forbids user namespaces here and how to allow
// them; empty when nothing is known.
func userNamespaceHint(err error) string {
	switch {
	case sysctlIs("user/max_user_namespaces", "0"):
		return " (user namespaces are switched off: sysctl -w user.max_user_namespaces=10000, or run as root)"
	case sysctlIs("kernel/unprivileged_userns_clone", "0"):
		return " (user namespaces are for root only: sysctl -w kernel.unprivileged_userns_clone=1, or run as root)"
	case sysctlIs("kernel/apparmor_restrict_unprivileged_userns", "1"):
		return " (AppArmor restricts user namespaces: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or " +
			"run as root)"
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EUSERS):
		return " (too many user namespaces are in use or nested: raise user.max_user_namespaces)"
	case errors.Is(err, unix.EPERM):
		return " (refused, most likely by a container's seccomp profile: start the container with --cap-add " +
			"SYS_ADMIN --cap-add NET_ADMIN --device /dev/net/tun and a seccomp profile that allows it, or run " +
			"outside of it)"
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS):
		return " (this kernel has no user namespaces: run as root)"
	}
	return ""
}

// privilegeHint names the rights that a refused operation needs.
func privilegeHint(err error) string {
	if !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EACCES) {
		return ""
	}
	if os.Getenv(insideEnv) != "" {
		return userNamespaceHint(nil)
	}
	return " (CAP_SYS_ADMIN and CAP_NET_ADMIN are needed: run as root)"
}

func sysctlIs(name, value string) bool {
	b, err := os.ReadFile("/proc/sys/" + name)
	return err == nil && strings.TrimSpace(string(b)) == value
}
