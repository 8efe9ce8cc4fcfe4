package ingress

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
)

// SOCKS5 on the wire: RFC 1928 and, for passwords, RFC 1929.
const (
	socksVersion     = 5
	socksAuthVersion = 1

	methodNone     = 0x00
	methodPassword = 0x02
	methodRefused  = 0xff

	commandConnect = 1

	addressIPv4 = 1
	addressName = 3
	addressIPv6 = 4

	replyDone       = 0
	replyFailure    = 1
	replyNoCommand  = 7
	replyNoAddress  = 8
	authAccepted    = 0
	authNotAccepted = 1
)

// serveSOCKS5 is the server's side of the handshake, up to and without the reply:
// that is Answer's.
//
//	client: version, methods        server: method
//	client: name, password          server: status        (method 2)
//	client: CONNECT address port    server: reply         (after the dial)
func (l *greeter) serveSOCKS5(ctx context.Context, in *input, c *Client) error {
	in.left = maxHandshake
	if err := l.socksMethod(ctx, in, c.Source.Addr()); err != nil {
		return fmt.Errorf("socks5: %w", err)
	}
	host, port, code, err := socksRequest(in)
	if err == nil {
		if c.Target, c.Host, err = destinationOf(host, port); err != nil {
			code = replyFailure
		}
	}
	if err != nil {
		if code != replyDone {
			_, _ = in.conn.Write(socksReply(code, netip.AddrPort{}))
		}
		return fmt.Errorf("socks5: %w", err)
	}
	c.Answer = func(bound netip.AddrPort, err error) error {
		if err == nil {
			_, err = in.conn.Write(socksReply(replyDone, bound))
			return err
		}
		_, err = in.conn.Write(socksReply(failureOf(err).socks, netip.AddrPort{}))
		return errors.Join(err, closeAfterAnswer(in.conn))
	}
	return nil
}

// socksMethod agrees on a method and, where there are users, checks the
// client's name and password.
func (l *greeter) socksMethod(ctx context.Context, in *input, from netip.Addr) error {
	var head [2]byte
	if _, err := io.ReadFull(in, head[:1]); err != nil {
		return err
	}
	if head[0] != socksVersion {
		return fmt.Errorf("version %d is not 5", head[0])
	}
	if _, err := io.ReadFull(in, head[1:]); err != nil {
		return err
	}
	methods := make([]byte, head[1])
	if _, err := io.ReadFull(in, methods); err != nil {
		return err
	}
	method := byte(methodNone)
	if len(l.users) > 0 {
		method = methodPassword
	}
	if bytes.IndexByte(methods, method) < 0 {
		_, _ = in.conn.Write([]byte{socksVersion, methodRefused})
		return fmt.Errorf("client does not offer method %d", method)
	}
	if _, err := in.conn.Write([]byte{socksVersion, method}); err != nil {
		return err
	}
	if method == methodNone {
		return nil
	}
	return l.socksPassword(ctx, in, from)
}

func (l *greeter) socksPassword(ctx context.Context, in *input, from netip.Addr) error {
	version, err := in.ReadByte()
	if err != nil {
		return err
	}
	if version != socksAuthVersion {
		_, _ = in.conn.Write([]byte{socksAuthVersion, authNotAccepted})
		return fmt.Errorf("password version %d is not 1", version)
	}
	name, err := readCounted(in)
	if err != nil {
		return err
	}
	password, err := readCounted(in)
	if err != nil {
		return err
	}
	if err := l.checkPassword(ctx, from, name, password); err != nil {
		_, _ = in.conn.Write([]byte{socksAuthVersion, authNotAccepted})
		return err
	}
	_, err = in.conn.Write([]byte{socksAuthVersion, authAccepted})
	return err
}

// socksRequest reads the request. code is the reply to send for err; 0: none,
// because the client is gone.
func socksRequest(in *input) (host, port string, code byte, err error) {
	var head [4]byte // version, command, reserved, address type
	if _, err := io.ReadFull(in, head[:]); err != nil {
		return "", "", 0, err
	}
	if head[0] != socksVersion {
		return "", "", replyFailure, fmt.Errorf("request of version %d", head[0])
	}
	switch head[3] {
	case addressIPv4, addressIPv6:
		raw := make([]byte, net.IPv4len)
		if head[3] == addressIPv6 {
			raw = make([]byte, net.IPv6len)
		}
		if _, err := io.ReadFull(in, raw); err != nil {
			return "", "", 0, err
		}
		addr, _ := netip.AddrFromSlice(raw)
		host = addr.String()
	case addressName:
		name, err := readCounted(in)
		if err != nil {
			return "", "", 0, err
		}
		host = withoutBrackets(string(name))
	default:
		return "", "", replyNoAddress, fmt.Errorf("address type %d", head[3])
	}
	var number [2]byte
	if _, err := io.ReadFull(in, number[:]); err != nil {
		return "", "", 0, err
	}
	if head[1] != commandConnect {
		return "", "", replyNoCommand, fmt.Errorf("command %d is not CONNECT", head[1])
	}
	return host, strconv.Itoa(int(binary.BigEndian.Uint16(number[:]))), 0, nil
}

// withoutBrackets returns an IPv6 address of which a client has made a name as it stands in a URL.
func withoutBrackets(name string) string {
	if addr, err := netip.ParseAddrPort(name + ":0"); err == nil && addr.Addr().Is6() {
		return addr.Addr().String()
	}
	return name
}

// readCounted reads a length byte and as many bytes.
func readCounted(in *input) ([]byte, error) {
	n, err := in.ReadByte()
	if err != nil {
		return nil, err
	}
	b := make([]byte, n)
	_, err = io.ReadFull(in, b)
	return b, err
}

func socksReply(code byte, bound netip.AddrPort) []byte {
	addr := bound.Addr().Unmap()
	if !addr.IsValid() {
		addr = netip.IPv4Unspecified()
	}
	kind := byte(addressIPv4)
	if addr.Is6() {
		kind = addressIPv6
	}
	reply := append([]byte{socksVersion, code, 0, kind}, addr.AsSlice()...)
	return binary.BigEndian.AppendUint16(reply, bound.Port())
}
