//go:build linux

package e2e

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
)

// The clients below write their headers a byte at a time: a proxy must not
// depend on how a header is cut into segments.

func dialEdge(s *scene, _ netip.AddrPort) (net.Conn, error) {
	return s.Client.Dial("tcp", netip.AddrPortFrom(s.EdgeNear.V4, port).String())
}

// dialSecond reaches the second proxy of a scene.
func dialSecond(s *scene, _ netip.AddrPort) (net.Conn, error) {
	return s.Client.Dial("tcp", netip.AddrPortFrom(s.EdgeNear.V4, secondPort).String())
}

func trickle(w io.Writer, b []byte) error {
	for i := range b {
		if _, err := w.Write(b[i : i+1]); err != nil {
			return err
		}
	}
	return nil
}

// socksError is a refusal, with the protocol's own code (RFC 1928 §6).
type socksError byte

func (e socksError) Error() string { return fmt.Sprintf("socks5 reply %d", byte(e)) }

func dialSOCKS(s *scene, target netip.AddrPort) (net.Conn, error) {
	conn, err := dialEdge(s, target)
	if err != nil {
		return nil, err
	}
	if err := socks(conn, target); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

func socks(conn net.Conn, target netip.AddrPort) error {
	if err := trickle(conn, []byte{5, 2, 0, 2}); err != nil {
		return err
	}
	var method [2]byte
	if _, err := io.ReadFull(conn, method[:]); err != nil {
		return err
	}
	if method[1] == 2 {
		if err := trickle(conn, append([]byte{1, 3}, "ann\x06secret"...)); err != nil {
			return err
		}
		var status [2]byte
		if _, err := io.ReadFull(conn, status[:]); err != nil {
			return err
		}
		if status[1] != 0 {
			return errors.New("socks5: authentication refused")
		}
	}
	kind := byte(1)
	if target.Addr().Is6() {
		kind = 4
	}
	request := append([]byte{5, 1, 0, kind}, target.Addr().AsSlice()...)
	if err := trickle(conn, binary.BigEndian.AppendUint16(request, target.Port())); err != nil {
		return err
	}
	var head [4]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return err
	}
	size := map[byte]int{1: 4, 4: 16}[head[3]]
	if _, err := io.ReadFull(conn, make([]byte, size+2)); err != nil {
		return err
	}
	if head[1] != 0 {
		return socksError(head[1])
	}
	return nil
}

// httpError is a refusal, with its status.
type httpError int

func (e httpError) Error() string { return fmt.Sprintf("http status %d", int(e)) }

func dialConnect(s *scene, target netip.AddrPort) (net.Conn, error) {
	conn, err := dialEdge(s, target)
	if err != nil {
		return nil, err
	}
	if err := trickle(conn, fmt.Appendf(nil, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", target, target)); err != nil {
		return nil, err
	}
	// The answer has no body, and nothing follows before the client speaks, so
	// reading byte by byte leaves the connection exactly behind the header.
	resp, err := http.ReadResponse(bufio.NewReaderSize(oneByte{conn}, 16), &http.Request{Method: http.MethodConnect})
	if err != nil {
		conn.Close()
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		conn.Close()
		return nil, httpError(resp.StatusCode)
	}
	return conn, nil
}

// oneByte never reads ahead.
type oneByte struct{ io.Reader }

func (o oneByte) Read(b []byte) (int, error) { return o.Reader.Read(b[:min(1, len(b))]) }

// proxiedFrom is the address a PROXY header tells of.
var proxiedFrom = netip.MustParseAddrPort("192.0.2.7:4711")

func dialWithProxyHeader(s *scene, target netip.AddrPort) (net.Conn, error) {
	conn, err := dialEdge(s, target)
	if err != nil {
		return nil, err
	}
	header := fmt.Sprintf("PROXY TCP4 %s %s %d %d\r\n", proxiedFrom.Addr(), target.Addr(), proxiedFrom.Port(),
		target.Port())
	return conn, trickle(conn, []byte(header))
}
