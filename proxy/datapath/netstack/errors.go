package netstack

import (
	"errors"
	"io"
	"os"
	"syscall"

	"gvisor.dev/gvisor/pkg/tcpip"
)

// kernelError turns an error of the stack into the one that a kernel socket would return, so
// that whoever reads errors need not know which transport is below.
func kernelError(err tcpip.Error) error {
	switch err.(type) {
	case nil:
		return nil
	case *tcpip.ErrConnectionReset:
		return syscall.ECONNRESET
	case *tcpip.ErrConnectionAborted, *tcpip.ErrAborted:
		return syscall.ECONNABORTED
	case *tcpip.ErrConnectionRefused:
		return syscall.ECONNREFUSED
	case *tcpip.ErrTimeout:
		return syscall.ETIMEDOUT
	case *tcpip.ErrNetworkUnreachable:
		return syscall.ENETUNREACH
	case *tcpip.ErrHostUnreachable:
		return syscall.EHOSTUNREACH
	case *tcpip.ErrClosedForReceive:
		return io.EOF
	case *tcpip.ErrClosedForSend:
		return syscall.EPIPE
	case *tcpip.ErrNotConnected:
		return syscall.ENOTCONN
	case *tcpip.ErrInvalidEndpointState:
		return os.ErrClosed
	}
	return errors.New(err.String())
}
