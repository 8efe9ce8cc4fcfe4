package userspace

import (
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/penstock-net/penstock/internal/need"
)

// The tests run in a network namespace of their own, whose lo has addresses that a
// peer can ask for: no stack takes packets for 127.0.0.1 from outside.
var (
	outside4 = netip.MustParseAddr("192.0.2.7")
	outside6 = netip.MustParseAddr("2001:db8::7")
	notApart error // why they do not
)

const (
	apartEnv   = "PENSTOCK_TEST_APART"
	pingGroups = "/proc/sys/net/ipv4/ping_group_range"
)

// apart runs the tests once more, in a namespace, where it can make one.
func apart() {
	if os.Getenv(apartEnv) != "" {
		notApart = settle()
		return
	}
	again := exec.Command(os.Args[0], os.Args[1:]...)
	again.Env = append(os.Environ(), apartEnv+"=1")
	again.Stdin, again.Stdout, again.Stderr = os.Stdin, os.Stdout, os.Stderr
	again.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	notApart = again.Run()
	var exit *exec.ExitError
	switch {
	case notApart == nil:
		os.Exit(0)
	case errors.As(notApart, &exit):
		os.Exit(max(1, exit.ExitCode()))
	}
}

func settle() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return err
	}
	for _, a := range []string{"192.0.2.7/32", "2001:db8::7/128"} {
		addr, err := netlink.ParseAddr(a)
		if err != nil {
			return err
		}
		addr.Flags = syscall.IFA_F_NODAD
		if err := netlink.AddrAdd(lo, addr); err != nil {
			return err
		}
	}
	return nil
}

func needNamespace(tb testing.TB) {
	tb.Helper()
	if notApart != nil {
		need.Namespaces(tb, notApart)
	}
}
