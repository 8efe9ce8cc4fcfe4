package kernel

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
)

var _ datapath.Ending = (*Conn)(nil)

// Undelivered implements datapath.Ending.
func (c *Conn) Undelivered() (cc.Bytes, error) {
	var n int
	err := control(c.raw, func(fd int) (err error) {
		n, err = unix.IoctlGetInt(fd, unix.SIOCOUTQ)
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("kernel: read send queue: %w", err)
	}
	return cc.Bytes(n), nil
}

// Aborted implements datapath.Ending. A peer's FIN leaves CLOSE_WAIT; only a
// connection that is no more is in CLOSE.
func (c *Conn) Aborted() bool {
	var info unix.TCPInfo
	err := control(c.raw, func(fd int) error {
		if _, errno := tcpInfo(uintptr(fd), &info); errno != 0 {
			return errno
		}
		return nil
	})
	return err != nil || info.State == tcpClose
}
