package ingress

import (
	"fmt"
	"os"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// setTransparent lets a socket accept connections to addresses that are not
// ours. A dual-stack socket needs the option of both families. The accepted
// socket's LocalAddr is then the client's destination.
func setTransparent(network string, c syscall.RawConn) error {
	var err error
	ctrlErr := c.Control(func(fd uintptr) {
		if err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_TRANSPARENT, 1); err != nil {
			err = os.NewSyscallError("setsockopt IP_TRANSPARENT", err)
			return
		}
		if strings.HasSuffix(network, "6") {
			err = os.NewSyscallError("setsockopt IPV6_TRANSPARENT",
				unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1))
		}
	})
	if ctrlErr != nil {
		return fmt.Errorf("tproxy: %w", ctrlErr)
	}
	return err
}
