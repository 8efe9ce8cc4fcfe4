package need

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TUN skips a test that makes a TUN device where this process may not open the device for that. On some machines it is
// there and only root may open it.
func TUN(tb testing.TB) {
	tb.Helper()
	const device = "/dev/net/tun"
	fd, err := unix.Open(device, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		tb.Skipf("needs to open %s: %v", device, err)
	}
	_ = unix.Close(fd)
}
