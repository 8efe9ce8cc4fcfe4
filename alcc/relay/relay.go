// Package relay carries connections between a phone and any destination over connections of package alcc, with own
// acknowledgements at both ends. A Server is the end in the network, Connect the one of the phone, which package
// alcc/mobile calls.
//
//	phone ── TCP ─ TLS ─ package frame ──▶ relay ── TCP ──▶ destination
//
// A connection begins with a request of HTTP/1.1, CONNECT (RFC 9110 §9.3.6), with the token of the relay (RFC 6750
// §2.1). From the answer 200 on its bytes are those of the destination.
//
// A relay serves those who have its token, and reaches public addresses: none of its own machine, of private networks
// or of a cloud's metadata service, unless Server.Allow has them.
package relay

import (
	"bufio"
	"cmp"
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/penstock-net/penstock/alcc"
	"github.com/penstock-net/penstock/proxy/destination"
)

const (
	// MinToken is the least length of a token, in bytes.
	MinToken = 16

	requestTime           = 10 * time.Second // bounds TLS and the request
	dialTime              = 10 * time.Second // bounds the connection to a destination
	wrongTokenTime        = time.Second      // that an answer to a wrong token waits
	maxRequest            = 4 << 10          // bytes of a request or an answer
	defaultMaxConnections = 1024
	tokenHeader           = "Proxy-Authorization" //nolint:gosec // the name of a header
	tokenScheme           = "Bearer "
)

// Server is the end of a relay in the network.
type Server struct {
	// Token is what phones must know. At least MinToken bytes.
	Token string
	// Allow are destinations beside public addresses.
	Allow []netip.Prefix
	// Algorithm decides what goes to phones, as alcc.Options.Algorithm has it; empty: "penstock".
	Algorithm string
	// MaxConnections bounds what is served at once; 0: 1,024. Others are closed at once.
	MaxConnections int
}

// Validate returns what is wrong with s; nil: nothing.
func (s *Server) Validate() error {
	switch {
	case len(s.Token) < MinToken:
		return fmt.Errorf("relay: Server.Token has %d bytes, but must have at least %d", len(s.Token), MinToken)
	case s.MaxConnections < 0:
		return fmt.Errorf("relay: Server.MaxConnections is %d, but must be above 0, or 0 for %d", s.MaxConnections,
			defaultMaxConnections)
	}
	return s.phoneOptions().Validate()
}

// phoneOptions returns the options of connections to phones.
func (s *Server) phoneOptions() alcc.Options {
	return alcc.Options{Algorithm: s.Algorithm, OwnAcks: true}
}

// Serve serves connections of ln, which it closes, until ctx ends. It returns nil then, after all connections have
// been reset. A ln of package tls keeps the token from being read on the way.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	defer ln.Close()
	if err := s.Validate(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var served sync.WaitGroup
	defer served.Wait()
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = ln.Close() })()
	places := make(chan struct{}, cmp.Or(s.MaxConnections, defaultMaxConnections))
	for {
		conn, err := ln.Accept()
		switch {
		case ctx.Err() != nil:
			if conn != nil {
				_ = conn.Close()
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("relay: %w", err)
		case err != nil: // of one connection, or descriptors are short
			time.Sleep(10 * time.Millisecond) //nolint:forbidigo // until others have closed theirs
			continue
		}
		select {
		case places <- struct{}{}:
			served.Go(func() {
				defer func() { <-places }()
				s.serveConn(ctx, conn)
			})
		default:
			_ = conn.Close()
		}
	}
}

// serveConn serves one connection until it ends.
func (s *Server) serveConn(ctx context.Context, below net.Conn) {
	phone, err := alcc.Wrap(below, s.phoneOptions())
	if err != nil { // the options were checked
		_ = below.Close()
		return
	}
	defer context.AfterFunc(ctx, func() { _ = phone.Reset() })()
	defer phone.Close()
	_ = phone.SetDeadline(time.Now().Add(requestTime)) //nolint:forbidigo // deadlines of net.Conn are of the real clock
	in := bufio.NewReader(io.LimitReader(phone, maxRequest))
	request, err := http.ReadRequest(in)
	if err != nil {
		return
	}
	destination, status := s.openDestination(ctx, request)
	_ = phone.SetDeadline(time.Now().Add(requestTime)) //nolint:forbidigo // as above
	if destination == nil {
		fmt.Fprintf(phone, "HTTP/1.1 %d %s\r\nContent-Length: 0\r\n\r\n", status, http.StatusText(status))
		return
	}
	defer destination.Close()
	defer context.AfterFunc(ctx, func() { _ = destination.Close() })()
	if _, err := io.WriteString(phone, "HTTP/1.1 200 OK\r\n\r\n"); err != nil {
		return
	}
	_ = phone.SetDeadline(time.Time{})
	early, _ := in.Peek(in.Buffered())
	if _, err := destination.Write(early); err == nil {
		CopyBoth(phone, destination)
	}
}

// openDestination connects to the destination of a request. If it cannot, it returns nil and the status to answer
// with.
func (s *Server) openDestination(ctx context.Context, r *http.Request) (net.Conn, int) {
	token := []byte(r.Header.Get(tokenHeader))
	if subtle.ConstantTimeCompare(token, []byte(tokenScheme+s.Token)) != 1 {
		select {
		case <-time.After(wrongTokenTime): //nolint:forbidigo // guesses take real time
		case <-ctx.Done():
		}
		return nil, http.StatusProxyAuthRequired
	}
	if r.Method != http.MethodConnect {
		return nil, http.StatusMethodNotAllowed
	}
	dialer := net.Dialer{Timeout: dialTime, Control: s.checkDestination}
	conn, err := dialer.DialContext(ctx, "tcp", r.Host)
	switch {
	case errors.Is(err, errForbidden):
		return nil, http.StatusForbidden
	case err != nil:
		return nil, http.StatusBadGateway
	}
	at := conn.RemoteAddr().(*net.TCPAddr).AddrPort().Addr() //nolint:forcetypeassert // of TCP
	// The kernel connects to an address of this machine from the same address.
	if from, ok := conn.LocalAddr().(*net.TCPAddr); ok && from.AddrPort().Addr() == at && !s.isAllowed(at) {
		_ = conn.Close()
		return nil, http.StatusForbidden
	}
	return conn, 0
}

var errForbidden = errors.New("relay: no public address, and none that Server.Allow has")

// checkDestination implements net.Dialer.Control, which is called with the address that a name has resolved to.
func (s *Server) checkDestination(_, address string, _ syscall.RawConn) error {
	at, err := netip.ParseAddrPort(address)
	if err != nil || !isPublic(at.Addr()) && !s.isAllowed(at.Addr()) {
		return errForbidden
	}
	return nil
}

// isAllowed reports whether an address is in Allow.
func (s *Server) isAllowed(a netip.Addr) bool {
	return destination.Contains(s.Allow, a.Unmap())
}

// notPublic are addresses that are not public though they look so (RFC 6890), or hold an IPv4 address that may not be.
// What package destination closes has the metadata services of clouds, also those at addresses of the public network.
var notPublic = append(destination.Closed(),
	netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("64:ff9b::/96"),
	netip.MustParsePrefix("64:ff9b:1::/48"),
	netip.MustParsePrefix("::ffff:0:0:0/96"), netip.MustParsePrefix("2001::/32"), netip.MustParsePrefix("2002::/16"),
	netip.MustParsePrefix("::/96"))

// isPublic reports whether an address is one of the public network.
func isPublic(a netip.Addr) bool {
	a = a.Unmap()
	return a.IsGlobalUnicast() && !a.IsPrivate() && !destination.Contains(notPublic, a)
}

// StatusError is a relay's answer other than 200.
type StatusError int

// Error implements error.
func (s StatusError) Error() string {
	// The name of status 407 does not say that the token is wrong.
	why := map[StatusError]string{
		http.StatusProxyAuthRequired: "the token is not the relay's",
		http.StatusForbidden:         "the relay does not reach such addresses",
		http.StatusBadGateway:        "the destination cannot be reached",
	}[s]
	if why == "" {
		why = http.StatusText(int(s))
	}
	return fmt.Sprintf("relay: answers %d: %s", int(s), why)
}

// Connect asks the relay at the other end of conn for a connection to a destination, HOST:PORT. From then on what is
// written to conn goes there. Errors are of conn, and a StatusError.
func Connect(conn net.Conn, destination, token string) error {
	request := fmt.Sprintf("CONNECT %s HTTP/1.1\r\nHost: %[1]s\r\n%s: %s%s\r\n\r\n", destination, tokenHeader,
		tokenScheme, token)
	if _, err := io.WriteString(conn, request); err != nil {
		return fmt.Errorf("relay: %w", err)
	}
	// The answer is read byte by byte, because bytes after it are those of the destination.
	answer, err := http.ReadResponse(bufio.NewReaderSize(oneByte{io.LimitReader(conn, maxRequest)}, 16),
		&http.Request{Method: http.MethodConnect})
	if err != nil {
		return fmt.Errorf("relay: %w", err)
	}
	_ = answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return StatusError(answer.StatusCode)
	}
	return nil
}

// oneByte reads at most one byte in a call.
type oneByte struct{ io.Reader }

// Read implements io.Reader.
func (r oneByte) Read(b []byte) (int, error) { return r.Reader.Read(b[:min(1, len(b))]) }

// CopyBoth copies bytes between two connections until both directions have ended, and returns how many went from a to
// b and back. It passes the end of one direction on. An error ends both directions.
func CopyBoth(a, b net.Conn) (there, back int64) {
	var other sync.WaitGroup
	other.Go(func() { back = copyUntilEnd(a, b) })
	there = copyUntilEnd(b, a)
	other.Wait()
	return there, back
}

// copyUntilEnd copies bytes one way, and then ends that direction of to. After an error it closes both.
func copyUntilEnd(to, from net.Conn) int64 {
	n, err := io.Copy(to, from)
	half, ok := to.(interface{ CloseWrite() error })
	if err == nil && ok {
		err = half.CloseWrite()
	}
	if err != nil || !ok {
		_ = to.Close()
		_ = from.Close()
	}
	return n
}
