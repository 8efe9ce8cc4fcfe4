package mobile

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"

	"github.com/penstock-net/penstock/alcc/relay"
)

// SOCKS5 on the wire (RFC 1928). Nothing but CONNECT without a password is spoken.
const (
	socksVersion = 5
	noPassword   = 0    // the method that is chosen
	noMethod     = 0xff // the app offers no method that is spoken; it has to close (§3)
	connect      = 1    // the command; BIND and UDP ASSOCIATE are refused
	addressIPv4  = 1
	addressName  = 3
	addressIPv6  = 4
)

// The replies of RFC 1928 §6 that are given.
const (
	replyDone       = 0
	replyForbidden  = 2 // the relay does not reach such addresses
	replyHost       = 4 // there is no connection, for whatever reason
	replyNoCommand  = 7
	replyNoAddress  = 8
	maxGreeting     = 16 << 10 // bytes of what an app asks with
	socksReplyBytes = 10
)

// greeting is what an app has asked for.
type greeting struct {
	destination string        // HOST:PORT
	socks       bool          // otherwise it was CONNECT of HTTP/1.1
	in          *bufio.Reader // holds what the app sent beyond what it asks
}

// readGreeting reads what an app asks for, and refuses what is not spoken. The caller closes the app then.
func readGreeting(app io.ReadWriter) (*greeting, error) {
	g := &greeting{in: bufio.NewReader(io.LimitReader(app, maxGreeting))}
	first, err := g.in.Peek(1)
	if err != nil {
		return nil, err
	}
	if g.socks = first[0] == socksVersion; g.socks {
		return g, g.readSOCKS(app)
	}
	// Requests of plain HTTP would need their headers rewritten, so only tunnels are served (RFC 9110 §9.3.6).
	r, err := http.ReadRequest(g.in)
	switch {
	case err != nil:
		return nil, err
	case r.Method != http.MethodConnect:
		_, _ = io.WriteString(app, "HTTP/1.1 405 Method Not Allowed\r\nAllow: CONNECT\r\nContent-Length: 0\r\n\r\n")
		return nil, fmt.Errorf("%s is not CONNECT", r.Method)
	}
	g.destination = r.Host
	return g, nil
}

// readSOCKS reads greeting and request of SOCKS5.
func (g *greeting) readSOCKS(app io.Writer) error {
	var head [4]byte // version and number of methods; then version, command, 0 and the kind of address
	if _, err := io.ReadFull(g.in, head[:2]); err != nil {
		return err
	}
	methods := make([]byte, head[1])
	if _, err := io.ReadFull(g.in, methods); err != nil {
		return err
	}
	method := byte(noMethod)
	for _, m := range methods {
		if m == noPassword {
			method = noPassword
		}
	}
	if _, err := app.Write([]byte{socksVersion, method}); err != nil || method == noMethod {
		return errors.Join(err, errors.New("the app wants a password"))
	}
	if _, err := io.ReadFull(g.in, head[:]); err != nil {
		return err
	}
	if head[1] != connect {
		_, _ = app.Write(socksReply(replyNoCommand))
		return fmt.Errorf("command %d is not CONNECT", head[1])
	}
	// A name goes to the relay as it is: the phone may not be able to look it up.
	size := map[byte]int{addressIPv4: net.IPv4len, addressIPv6: net.IPv6len, addressName: 0}
	n, ok := size[head[3]]
	if !ok {
		_, _ = app.Write(socksReply(replyNoAddress))
		return fmt.Errorf("address type %d", head[3])
	}
	if head[3] == addressName {
		counted, err := g.in.ReadByte()
		if err != nil {
			return err
		}
		n = int(counted)
	}
	where := make([]byte, n+2) // and the port
	if _, err := io.ReadFull(g.in, where); err != nil {
		return err
	}
	host := string(where[:n])
	if a, ok := netip.AddrFromSlice(where[:n]); ok && head[3] != addressName {
		host = a.String()
	}
	g.destination = net.JoinHostPort(host, strconv.Itoa(int(binary.BigEndian.Uint16(where[n:]))))
	return nil
}

// socksReply returns a reply, which names no address.
func socksReply(code byte) []byte {
	return append([]byte{socksVersion, code, 0, addressIPv4}, make([]byte, socksReplyBytes-4)...)
}

// answerApp says to the app whether there is a connection; err says why not.
func (g *greeting) answerApp(app io.Writer, err error) error {
	var refused relay.StatusError
	isRefused := errors.As(err, &refused) && refused == http.StatusForbidden
	socks, status := byte(replyDone), "200 OK\r\n"
	switch {
	case isRefused:
		socks, status = replyForbidden, "403 Forbidden\r\nContent-Length: 0\r\n"
	case err != nil:
		socks, status = replyHost, "502 Bad Gateway\r\nContent-Length: 0\r\n"
	}
	if g.socks {
		_, err = app.Write(socksReply(socks))
	} else {
		_, err = io.WriteString(app, "HTTP/1.1 "+status+"\r\n")
	}
	return err
}

// bytesOf returns the app's connection with what was read beyond the greeting.
func (g *greeting) bytesOf(app net.Conn) net.Conn {
	early, _ := g.in.Peek(g.in.Buffered())
	return &resumed{Conn: app, early: early}
}

// resumed is a connection after its first bytes were read.
type resumed struct {
	net.Conn
	early []byte
}

// Read implements net.Conn.
func (r *resumed) Read(b []byte) (int, error) {
	if len(r.early) > 0 {
		n := copy(b, r.early)
		r.early = r.early[n:]
		return n, nil
	}
	return r.Conn.Read(b)
}

// CloseWrite passes the end of the other direction on.
func (r *resumed) CloseWrite() error {
	return r.Conn.(interface{ CloseWrite() error }).CloseWrite() //nolint:forcetypeassert // of TCP
}
