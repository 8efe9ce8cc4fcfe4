package ingress

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"

	proxyproto "github.com/pires/go-proxyproto"
)

// Sizes of PROXY protocol headers (haproxy.org, proxy-protocol.txt §2).
const (
	proxyV1Longest = 107
	proxyV2Fixed   = 16   // signature, command, family, length
	proxyV2Longest = 2048 // of what follows it: addresses, and TLVs up to a client certificate
)

// readProxyHeader reads the header that a trusted peer must send first, and returns the client's
// address; invalid where the peer is the client itself (LOCAL, UNKNOWN).
//
// The library parses the header, but we find its end: the library takes one that arrives in pieces
// for an attack.
func readProxyHeader(in *input) (netip.AddrPort, error) {
	in.left = proxyV2Fixed + proxyV2Longest + inputBuffer
	header, err := frameProxyHeader(in)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("proxy protocol: %w", err)
	}
	h, err := proxyproto.Read(bufio.NewReader(bytes.NewReader(header)))
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("proxy protocol: %w", err)
	}
	if h.Command.IsLocal() {
		return netip.AddrPort{}, nil
	}
	source, _, ok := h.TCPAddrs()
	if !ok {
		return netip.AddrPort{}, errors.New("proxy protocol: the header is not of a TCP connection")
	}
	return addrPort(source), nil
}

// frameProxyHeader reads exactly one header, v1 or v2, and stops at the first
// byte that cannot belong to one.
func frameProxyHeader(in *input) ([]byte, error) {
	first, err := in.Peek(1)
	if err != nil {
		return nil, err
	}
	signature, longest := proxyproto.SIGV1, proxyV1Longest
	if first[0] == proxyproto.SIGV2[0] {
		signature, longest = proxyproto.SIGV2, proxyV2Fixed
	}
	header := make([]byte, 0, longest)
	for len(header) < longest {
		b, err := in.ReadByte()
		if err != nil {
			return nil, err
		}
		if n := len(header); n < len(signature) && b != signature[n] {
			return nil, errors.New("a trusted peer must begin with a PROXY header, and this is none")
		}
		header = append(header, b)
		if longest == proxyV1Longest && b == '\n' {
			return header, nil
		}
	}
	if longest == proxyV1Longest {
		return nil, errors.New("v1 header without an end")
	}
	length := int(binary.BigEndian.Uint16(header[proxyV2Fixed-2:]))
	if length > proxyV2Longest {
		return nil, fmt.Errorf("v2 header of %d bytes", length)
	}
	header = append(header, make([]byte, length)...)
	_, err = io.ReadFull(in, header[proxyV2Fixed:])
	return header, err
}

// WriteProxyHeader writes the header of version 1 or 2 that tells a server who the client is. Where
// source or target is unknown, or they are of two families, which neither version can tell, the header
// tells no addresses (LOCAL, UNKNOWN).
func WriteProxyHeader(w io.Writer, version int, source, target netip.AddrPort) error {
	if version != 1 && version != 2 {
		return fmt.Errorf("ingress: proxy protocol: version %d is neither 1 nor 2", version)
	}
	h := &proxyproto.Header{Version: byte(version), Command: proxyproto.LOCAL, TransportProtocol: proxyproto.UNSPEC}
	source, target = plain(source), plain(target)
	if source.IsValid() && target.IsValid() && source.Addr().Is4() == target.Addr().Is4() {
		h = proxyproto.HeaderProxyFromAddrs(byte(version), net.TCPAddrFromAddrPort(source),
			net.TCPAddrFromAddrPort(target))
	}
	if _, err := h.WriteTo(w); err != nil {
		return fmt.Errorf("ingress: proxy protocol: write header: %w", err)
	}
	return nil
}
