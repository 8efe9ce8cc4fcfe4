package greeting

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// PROXY headers on the wire (proxy-protocol.txt §2).
const (
	proxyV1         = "PROXY"
	proxyV1Longest  = 107
	proxyV2         = "\r\n\r\n\x00\r\nQUIT\n"
	proxyV2Fixed    = 16 // signature, version and command, family, length of the rest
	proxyCommandMax = 1
)

// ProxyHeader reads the header that a trusted peer must send first. The zero value is ready.
type ProxyHeader struct {
	Source      netip.AddrPort // the client's address; invalid: the header has none
	Destination netip.AddrPort // that the client connected to

	isFixed bool // a header of version 2 is read, but for skip
	skip    int  // bytes to pass over
}

// Feed takes the next bytes and returns how many it has consumed. After an error, and after done, it is not called
// again. It fails at the first byte that no header has: the peer may wait for an answer before it sends more.
func (h *ProxyHeader) Feed(b []byte) (n int, done bool, err error) {
	if !h.isFixed {
		if len(b) == 0 {
			return 0, false, nil
		}
		signature := proxyV1
		if b[0] == proxyV2[0] {
			signature = proxyV2
		}
		if k := min(len(b), len(signature)); string(b[:k]) != signature[:k] {
			return 0, false, errors.New("a trusted peer must begin with a PROXY header, and this is none")
		}
		if signature == proxyV1 {
			n, err = h.takeV1(b)
			return n, n > 0, err
		}
		if n, err = h.takeV2(b); n == 0 || err != nil {
			return 0, false, err
		}
	}
	passed := min(h.skip, len(b)-n)
	h.skip -= passed
	return n + passed, h.skip == 0, nil
}

// takeV1 takes a header of version 1. n: 0: it is not whole.
func (h *ProxyHeader) takeV1(b []byte) (n int, err error) {
	n = bytes.IndexByte(b[:min(len(b), proxyV1Longest)], '\n') + 1
	if n == 0 {
		if len(b) >= proxyV1Longest {
			err = errors.New("v1 header without an end")
		}
		return 0, err
	}
	line, ok := strings.CutSuffix(string(b[:n]), "\r\n")
	if !ok {
		return 0, errors.New(`v1 header without \r\n at its end`)
	}
	words := strings.Split(line, " ")
	switch {
	case words[0] != proxyV1:
		return 0, errors.New("malformed header of version 1")
	case len(words) > 1 && words[1] == "UNKNOWN": // whatever follows is ignored
		return n, nil
	case len(words) != 6 || words[1] != "TCP4" && words[1] != "TCP6":
		return 0, errors.New("address family and protocol of a v1 header are not TCP4, TCP6 or UNKNOWN")
	}
	is4 := words[1] == "TCP4"
	if h.Source, err = v1AddrPort(is4, words[2], words[4]); err == nil {
		h.Destination, err = v1AddrPort(is4, words[3], words[5])
	}
	return n, err
}

// v1AddrPort returns an address of a header of version 1.
func v1AddrPort(is4 bool, host, port string) (netip.AddrPort, error) {
	addr, err := netip.ParseAddr(host)
	if err != nil || addr.Is4() != is4 || addr.Zone() != "" {
		return netip.AddrPort{}, fmt.Errorf("invalid address %.40q", host)
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil || len(port) > 1 && port[0] == '0' {
		return netip.AddrPort{}, fmt.Errorf("invalid port number %.6q", port)
	}
	return netip.AddrPortFrom(addr.Unmap(), uint16(number)), nil
}

// takeV2 takes a header of version 2 up to its addresses. n: 0: that is not whole. Commands and families that are not
// in the specification are refused. Headers of no TCP connection have no addresses for us, and nor has LOCAL.
func (h *ProxyHeader) takeV2(b []byte) (n int, err error) {
	if len(b) < proxyV2Fixed {
		return 0, nil
	}
	length := int(binary.BigEndian.Uint16(b[proxyV2Fixed-2:]))
	size := 0 // of an address
	switch version, command, family := b[12]>>4, b[12]&0xf, b[13]; {
	case version != 2 || command > proxyCommandMax:
		return 0, fmt.Errorf("unsupported version and command %#02x", b[12])
	case command == 0: // LOCAL: the family means nothing
	case family == 0x11:
		size = ipv4Length
	case family == 0x21:
		size = ipv6Length
	case family != 0 && family != 0x12 && family != 0x22 && family != 0x31 && family != 0x32:
		return 0, fmt.Errorf("family and transport %#02x are not of version 2", family)
	}
	n = proxyV2Fixed
	if size > 0 {
		n += 2*size + 4 // two addresses and two ports
	}
	switch {
	case length < n-proxyV2Fixed:
		return 0, fmt.Errorf("v2 header of %d bytes, where the addresses take %d", length, n-proxyV2Fixed)
	case len(b) < n:
		return 0, nil
	}
	h.isFixed, h.skip = true, length-(n-proxyV2Fixed)
	if size > 0 {
		h.Source, h.Destination = v2AddrPort(b[proxyV2Fixed:n], 0), v2AddrPort(b[proxyV2Fixed:n], 1)
	}
	return n, nil
}

// v2AddrPort returns the first or the second address of a header of version 2: addresses, then ports.
func v2AddrPort(b []byte, i int) netip.AddrPort {
	size := len(b)/2 - 2
	addr, _ := netip.AddrFromSlice(b[i*size:][:size])
	return netip.AddrPortFrom(addr.Unmap(), binary.BigEndian.Uint16(b[2*size+2*i:]))
}
