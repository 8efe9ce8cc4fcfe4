package ingress

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/penstock-net/penstock/proxy/config/check"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// Bounds of what a client may make us read and hold before its destination is known, in bytes.
const (
	inputBuffer  = 4096        // read at once
	maxHandshake = 4096        // SOCKS5: its longest messages are of 255+2, 513 and 262 bytes
	maxAuthority = 300         // longer than any name or address with a port
	lingerTime   = time.Second // for a refused client to take its answer
	lingerBytes  = 256 << 10   // of unread input thrown away while it does
)

// expired is a deadline in the past: it ends a call that waits.
var expired = time.Unix(1, 0)

var errTooLong = errors.New("handshake too long")

// input reads what a client sends in a handshake, buffered and up to a bound.
type input struct {
	*bufio.Reader
	conn  datapath.Conn
	left  int    // bytes that may still be read from conn
	err   error  // that conn's Read returned, or errTooLong
	ahead []byte // what the server is sent before the bytes in the buffer
}

// newInput returns an input that reads up to maxHandshake bytes from conn. Protocols set left to
// their own bound.
func newInput(conn datapath.Conn) *input {
	in := &input{conn: conn, left: maxHandshake}
	in.Reader = bufio.NewReaderSize(source{in}, inputBuffer)
	return in
}

// source is the reader from which input's buffer is filled.
type source struct{ in *input }

// Read implements io.Reader. It remembers the error: a parser may replace it with one of its own.
func (s source) Read(b []byte) (int, error) {
	if s.in.left <= 0 {
		s.in.err = errTooLong
		return 0, errTooLong
	}
	n, err := s.in.conn.Read(b[:min(len(b), s.in.left)])
	s.in.left -= n
	if err != nil {
		s.in.err = err
	}
	return n, err
}

// remainingConn returns the connection for the relay: it begins with what was read beyond the
// handshake.
func (in *input) remainingConn(exchange *Exchange) datapath.Conn {
	early, _ := in.Peek(in.Buffered())
	if len(in.ahead)+len(early) == 0 {
		return in.conn
	}
	return &prefixed{Conn: in.conn, rest: slices.Concat(in.ahead, early), exchange: exchange}
}

// closeAfterAnswer closes conn once the client has had time to read the answer just written. To
// close it with unread input sends RST, at which the client drops the answer (RFC 9112 §9.6).
func closeAfterAnswer(conn datapath.Conn) error {
	if conn.CloseWrite() == nil {
		timer := time.AfterFunc(lingerTime, func() { _ = conn.SetReadDeadline(expired) })
		_, _ = io.CopyN(io.Discard, conn, lingerBytes)
		timer.Stop()
	}
	return conn.Close()
}

// Destination reads "host:port" as a client asks for it: an address, or a name with its port.
func Destination(authority string) (netip.AddrPort, string, error) {
	if len(authority) > maxAuthority {
		return netip.AddrPort{}, "", fmt.Errorf("host and port of %d bytes", len(authority))
	}
	host, port, err := net.SplitHostPort(authority)
	if err != nil {
		return netip.AddrPort{}, "", err
	}
	return destinationOf(host, port)
}

// destinationOf makes an address or a "name:port" of what a client asked for. An address that a
// client sends in the place of a name is an address, so that policy's rules for addresses apply.
func destinationOf(host, port string) (netip.AddrPort, string, error) {
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || port[0] == '+' {
		return netip.AddrPort{}, "", fmt.Errorf("port %.8q is not in 1..65535", port)
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		return plainAddrPort(netip.AddrPortFrom(addr, uint16(n))), "", nil
	}
	if len(host) == 0 || len(host) > 255 {
		return netip.AddrPort{}, "", fmt.Errorf("host name of %d bytes", len(host))
	}
	if !check.IsHostName(host) {
		return netip.AddrPort{}, "", fmt.Errorf("host name %q has a byte that no host name has", host)
	}
	return netip.AddrPort{}, net.JoinHostPort(host, strconv.FormatUint(n, 10)), nil
}
