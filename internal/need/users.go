package need

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
)

// otherUser is the user and the group that tests become.
const otherUser = 65534

// OtherUsers returns an error if user 65534 is not mapped, so that this process cannot become it, whatever its
// privileges: the user namespace that an ordinary user makes has one user.
func OtherUsers() error {
	for _, file := range []string{"/proc/self/uid_map", "/proc/self/gid_map"} {
		is, err := os.ReadFile(file)
		if err != nil {
			return fmt.Errorf("whether there are other users: %w", err)
		}
		if !maps(string(is), otherUser) {
			return errors.New("this user namespace has no other users (run as root)")
		}
	}
	return nil
}

// maps reports whether one of the lines of a map (user_namespaces(7)) has an identifier.
func maps(lines string, id uint32) bool {
	for line := range strings.Lines(lines) {
		var inside, outside, count uint32
		_, err := fmt.Sscan(line, &inside, &outside, &count)
		if err == nil && id >= inside && id-inside < count {
			return true
		}
	}
	return false
}

// Users skips a test that becomes user 65534 where it cannot.
func Users(tb testing.TB) {
	tb.Helper()
	if err := OtherUsers(); err != nil {
		tb.Skipf("needs to become user 65534: %v", err)
	}
}

// WireGuardGo skips a test that runs wireguard-go where that cannot have its socket.
func WireGuardGo(tb testing.TB) {
	tb.Helper()
	const sockets = "/var/run/wireguard"
	err := os.MkdirAll(sockets, 0o755)
	if err == nil {
		var probe *os.File
		if probe, err = os.CreateTemp(sockets, "probe"); err == nil {
			err = errors.Join(probe.Close(), os.Remove(probe.Name()))
		}
	}
	if err != nil {
		tb.Skipf("needs to write where wireguard-go has its socket (run as root): %v", err)
	}
}
