//go:build linux

package e2e

import "golang.org/x/sys/unix"

// outq is how many bytes a socket has that its peer has not acknowledged.
func outq(fd uintptr) int {
	n, err := unix.IoctlGetInt(int(fd), unix.SIOCOUTQ)
	if err != nil {
		return -1
	}
	return n
}
