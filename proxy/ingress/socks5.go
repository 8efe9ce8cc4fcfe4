package ingress

import (
	"encoding/binary"
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

// socksRequest reads the request. code is the reply to send for err; 0: none, because the client
// is gone.
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

// withoutBrackets returns an IPv6 address that a client has sent as a name, in brackets as it
// stands in a URL.
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

// socksReply returns a reply (RFC 1928 §6). Without bound it has the IPv4 address 0.0.0.0.
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
