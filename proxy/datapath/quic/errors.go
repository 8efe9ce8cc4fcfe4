package quic

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"

	"github.com/quic-go/quic-go"
)

// kernelError turns an error of quic-go into the one that a kernel socket would
// return, so that whoever reads errors need not know which transport is below. It
// also tells whether the peer, or a timeout, has ended the stream.
func kernelError(err error) (aborted bool, _ error) {
	var stream *quic.StreamError
	var idle *quic.IdleTimeoutError
	var timeout net.Error
	switch {
	case err == nil, err == io.EOF: //nolint:errorlint // as io.Reader's callers do
		return false, err
	case errors.As(err, &stream) && !stream.Remote:
		return false, net.ErrClosed
	case errors.As(err, &idle):
		return true, syscall.ETIMEDOUT
	case errors.As(err, &timeout) && timeout.Timeout():
		return false, os.ErrDeadlineExceeded
	case errors.Is(err, quic.ErrStreamClosed):
		return false, syscall.EPIPE
	}
	return true, syscall.ECONNRESET // by the peer, or for breaking the protocol
}
