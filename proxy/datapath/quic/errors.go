package quic

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"

	"github.com/quic-go/quic-go"
)

// failure is an error of quic-go's as the kernel's sockets have it, so that
// whoever reads errors need not know which transport is below; and whether it
// means that the peer, or a timeout, has ended the stream.
func failure(err error) (_ error, aborted bool) {
	var stream *quic.StreamError
	var idle *quic.IdleTimeoutError
	var timeout net.Error
	switch {
	case err == nil, err == io.EOF: //nolint:errorlint // as io.Reader's callers do
		return err, false
	case errors.As(err, &stream) && !stream.Remote:
		return net.ErrClosed, false
	case errors.As(err, &idle):
		return syscall.ETIMEDOUT, true
	case errors.As(err, &timeout) && timeout.Timeout():
		return os.ErrDeadlineExceeded, false
	case errors.Is(err, quic.ErrStreamClosed):
		return syscall.EPIPE, false
	}
	return syscall.ECONNRESET, true // by the peer, or for breaking the protocol
}
