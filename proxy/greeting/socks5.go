package greeting

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
)

// SOCKS5 on the wire.
const (
	SOCKSVersion    = 5
	passwordVersion = 1

	methodNone     = 0x00
	methodPassword = 0x02
	methodRefused  = 0xff

	commandConnect = 1

	addressIPv4 = 1
	addressName = 3
	addressIPv6 = 4

	passwordAccepted = 0
	passwordRefused  = 1
)

// Codes of replies (RFC 1928 §6) that do not depend on a dial.
const (
	ReplyDone      = 0
	ReplyFailure   = 1
	replyNoCommand = 7
	replyNoAddress = 8
)

// SOCKS5 is the server's side of a greeting. The last reply is SOCKSReply's, once the server is reached.
//
//	at           client sends                    server answers
//	sendMethods  version, methods                the method
//	sendUser     name, password                  AllowUser or DenyUser, which the caller sends
//	sendRequest  CONNECT, address, port          SOCKSReply, after the dial
//
// The longest message of a client has 513 bytes. The zero value asks for no password.
type SOCKS5 struct {
	NeedsPassword  bool
	Name, Password string // since Feed has returned CheckUser
	Host           string // since Feed has returned Done: a name, or an address without brackets
	Port           uint16

	at socksMessage
}

// socksMessage is the message that is to come.
type socksMessage uint8

const (
	sendMethods socksMessage = iota
	sendUser
	sendRequest
)

// Next is what follows a Feed.
type Next uint8

// What Feed may return.
const (
	More      Next = iota // feed what was not consumed, once more has come
	CheckUser             // check Name and Password, send AllowUser's or DenyUser's answer, and feed the rest or close
	Done                  // Host and Port are known, and unconsumed bytes are the server's
)

// Feed takes the next bytes and returns how many it has consumed. reply is for the client, also beside an error, after
// which the caller closes the connection.
func (s *SOCKS5) Feed(b []byte) (n int, reply []byte, next Next, err error) {
	if s.at == sendMethods {
		if n, reply, err = s.takeMethods(b); n == 0 || err != nil {
			return n, reply, More, err
		}
	}
	if s.at == sendUser {
		used, answer, err := s.takeUser(b[n:])
		if used > 0 {
			next = CheckUser
		}
		return n + used, append(reply, answer...), next, err
	}
	used, answer, err := s.takeRequest(b[n:])
	if used > 0 {
		next = Done
	}
	return n + used, append(reply, answer...), next, err
}

// takeMethods takes the methods that the client offers, and chooses one. n: 0: they are not whole.
func (s *SOCKS5) takeMethods(b []byte) (n int, reply []byte, err error) {
	if len(b) > 0 && b[0] != SOCKSVersion {
		return 0, nil, fmt.Errorf("version %d is not 5", b[0])
	}
	methods, n := counted(b, 1)
	if n == 0 {
		return 0, nil, nil
	}
	method := byte(methodNone)
	s.at = sendRequest
	if s.NeedsPassword {
		method, s.at = methodPassword, sendUser
	}
	if bytes.IndexByte(methods, method) < 0 {
		return n, []byte{SOCKSVersion, methodRefused}, fmt.Errorf("client does not offer method %d", method)
	}
	return n, []byte{SOCKSVersion, method}, nil
}

// takeUser takes name and password. n: 0: they are not whole.
func (s *SOCKS5) takeUser(b []byte) (n int, reply []byte, err error) {
	if len(b) > 0 && b[0] != passwordVersion {
		return 0, s.DenyUser(), fmt.Errorf("password version %d is not 1", b[0])
	}
	name, n := counted(b, 1)
	if n == 0 {
		return 0, nil, nil
	}
	password, n := counted(b, n)
	if n > 0 {
		s.Name, s.Password = string(name), string(password)
	}
	return n, nil, nil
}

// AllowUser returns the answer to a right password. The request comes next.
func (s *SOCKS5) AllowUser() []byte {
	s.at = sendRequest
	return []byte{passwordVersion, passwordAccepted}
}

// DenyUser returns the answer to a wrong password. The caller closes the connection.
func (*SOCKS5) DenyUser() []byte { return []byte{passwordVersion, passwordRefused} }

// takeRequest takes the request. n: 0: it is not whole.
func (s *SOCKS5) takeRequest(b []byte) (n int, reply []byte, err error) {
	const fixed = 4 // version, command, reserved, address type
	if len(b) < fixed {
		return 0, nil, nil
	}
	if b[0] != SOCKSVersion {
		return 0, SOCKSReply(ReplyFailure, netip.AddrPort{}), fmt.Errorf("request of version %d", b[0])
	}
	var host []byte
	switch b[3] {
	case addressIPv4:
		n = fixed + ipv4Length
	case addressIPv6:
		n = fixed + ipv6Length
	case addressName:
		if host, n = counted(b, fixed); n == 0 {
			return 0, nil, nil
		}
	default:
		return 0, SOCKSReply(replyNoAddress, netip.AddrPort{}), fmt.Errorf("address type %d", b[3])
	}
	if len(b) < n+2 {
		return 0, nil, nil
	}
	s.Host = withoutBrackets(string(host))
	if b[3] != addressName {
		addr, _ := netip.AddrFromSlice(b[fixed:n])
		s.Host = addr.String()
	}
	s.Port = binary.BigEndian.Uint16(b[n:])
	n += 2
	if b[1] != commandConnect {
		return n, SOCKSReply(replyNoCommand, netip.AddrPort{}), fmt.Errorf("command %d is not CONNECT", b[1])
	}
	return n, nil, nil
}

// withoutBrackets returns an IPv6 address that a client has sent as a name, in brackets as it stands in a URL.
func withoutBrackets(name string) string {
	if addr, err := netip.ParseAddrPort(name + ":0"); err == nil && addr.Addr().Is6() {
		return addr.Addr().String()
	}
	return name
}

// counted returns the bytes that a length byte at b[at] counts, and where they end; 0: they are not whole.
func counted(b []byte, at int) (field []byte, end int) {
	if len(b) <= at || len(b) <= at+int(b[at]) {
		return nil, 0
	}
	end = at + 1 + int(b[at])
	return b[at+1 : end], end
}

// SOCKSReply returns a reply (RFC 1928 §6). bound is the address that the server is reached from; invalid: 0.0.0.0:0.
func SOCKSReply(code byte, bound netip.AddrPort) []byte {
	addr := bound.Addr().Unmap()
	if !addr.IsValid() {
		addr = netip.IPv4Unspecified()
	}
	kind := byte(addressIPv4)
	if addr.Is6() {
		kind = addressIPv6
	}
	reply := append([]byte{SOCKSVersion, code, 0, kind}, addr.AsSlice()...)
	return binary.BigEndian.AppendUint16(reply, bound.Port())
}
