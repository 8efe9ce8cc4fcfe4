package greeting

import (
	"bytes"
	"errors"
)

// MaxHTTPHead bounds the head of a request, in bytes. Servers bound the request line and the fields from 8 KiB on.
const MaxHTTPHead = 16 << 10

// ErrTooLong is the error of a head of MaxHTTPHead bytes without an end.
var ErrTooLong = errors.New("handshake too long")

// HTTPHead finds the head of an HTTP/1 request, and does not look into it. The zero value is ready.
type HTTPHead struct {
	begin int // where the request line begins
	line  int // where the line begins that has no end yet
}

// Feed looks for the end of the head. b is all that has come, as nothing is consumed before it is whole. n is where
// what follows the head begins; 0: the head goes on. Empty lines in front of it are no part of it (RFC 9112 §2.2).
func (h *HTTPHead) Feed(b []byte) (head []byte, n int, err error) {
	for {
		end := bytes.IndexByte(b[h.line:], '\n') + 1
		if end == 0 || h.line+end > MaxHTTPHead {
			break
		}
		isEmpty := len(bytes.TrimRight(b[h.line:h.line+end], "\r\n")) == 0
		switch h.line += end; {
		case isEmpty && h.line-end == h.begin:
			h.begin = h.line
		case isEmpty:
			return b[h.begin:h.line], h.line, nil
		}
	}
	if len(b) >= MaxHTTPHead {
		err = ErrTooLong
	}
	return nil, 0, err
}
