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
	proxyV2Fixed   = 16 // signature, version and command, family, length of the rest
)

// proxied is what a PROXY header says of a connection: the client's address, and the one that it
// came to. Both are invalid where the header has none.
type proxied struct{ source, destination netip.AddrPort }

// readProxyHeader reads the header that a trusted peer must send first, and no byte behind it.
func readProxyHeader(in *input) (proxied, error) {
	in.left = inputBuffer
	t, err := readEitherProxyHeader(in)
	if err != nil {
		return proxied{}, fmt.Errorf("proxy protocol: %w", err)
	}
	return t, nil
}

// readEitherProxyHeader reads a header of the version that the first byte shows.
func readEitherProxyHeader(in *input) (proxied, error) {
	first, err := in.Peek(1)
	if err != nil {
		return proxied{}, err
	}
	if first[0] == proxyproto.SIGV2[0] {
		return readProxyV2(in)
	}
	return readProxyV1(in)
}

// readByteLike reads byte number at of a header that begins with signature. It fails at the first
// byte that differs: the peer may wait for an answer before it sends more.
func readByteLike(in *input, signature []byte, at int) (byte, error) {
	b, err := in.ReadByte()
	if err == nil && at < len(signature) && b != signature[at] {
		err = errors.New("a trusted peer must begin with a PROXY header, and this is none")
	}
	return b, err
}

// readProxyV1 finds the end of a header of version 1 and has the library parse it, which takes
// one that arrives in pieces for an attack.
func readProxyV1(in *input) (proxied, error) {
	header := make([]byte, 0, proxyV1Longest)
	for !bytes.HasSuffix(header, []byte("\n")) {
		if len(header) == proxyV1Longest {
			return proxied{}, errors.New("v1 header without an end")
		}
		b, err := readByteLike(in, proxyproto.SIGV1, len(header))
		if err != nil {
			return proxied{}, err
		}
		header = append(header, b)
	}
	h, err := proxyproto.Read(bufio.NewReader(bytes.NewReader(header)))
	if err != nil {
		return proxied{}, err
	}
	source, destination, ok := h.TCPAddrs()
	if !ok { // UNKNOWN
		return proxied{}, nil
	}
	return proxied{addrPort(source), addrPort(destination)}, nil
}

// readProxyV2 reads a header of version 2. Commands and families that are not in the
// specification are refused. Headers of no TCP connection have no addresses for us, and nor has
// LOCAL. What follows the addresses is passed over. The library is not used: it refuses PROXY
// with family UNSPEC, LOCAL with other families, and long headers, which the specification allows
// (§2.2).
func readProxyV2(in *input) (proxied, error) {
	var fixed [proxyV2Fixed]byte
	for i := range fixed {
		b, err := readByteLike(in, proxyproto.SIGV2, i)
		if err != nil {
			return proxied{}, err
		}
		fixed[i] = b
	}
	length := int(binary.BigEndian.Uint16(fixed[proxyV2Fixed-2:]))
	in.left = length + inputBuffer
	size := 0 // of an address
	switch version, command, family := fixed[12]>>4, fixed[12]&0xf, fixed[13]; {
	case version != 2 || command > 1:
		return proxied{}, fmt.Errorf("unsupported version and command %#02x", fixed[12])
	case command == 0: // LOCAL: the family means nothing
	case family == 0x11:
		size = 4
	case family == 0x21:
		size = 16
	case family != 0 && family != 0x12 && family != 0x22 && family != 0x31 && family != 0x32:
		return proxied{}, fmt.Errorf("family and transport %#02x are not of version 2", family)
	}
	if size == 0 {
		_, err := in.Discard(length)
		return proxied{}, err
	}
	addresses := make([]byte, 2*size+4) // two addresses and two ports
	if length < len(addresses) {
		return proxied{}, fmt.Errorf("v2 header of %d bytes, where the addresses take %d", length, len(addresses))
	}
	if _, err := io.ReadFull(in, addresses); err != nil {
		return proxied{}, err
	}
	at := func(i int) netip.AddrPort {
		addr, _ := netip.AddrFromSlice(addresses[i*size:][:size])
		return plainAddrPort(netip.AddrPortFrom(addr, binary.BigEndian.Uint16(addresses[2*size+2*i:])))
	}
	_, err := in.Discard(length - len(addresses))
	return proxied{at(0), at(1)}, err
}

// WriteProxyHeader writes the header of version 1 or 2 with the client's address. A header has
// addresses of one family. Where target is of another than source, cameTo takes its place. If
// that is of another family as well, IPv4 addresses are written in their IPv6 form. Without
// source or target the header has no addresses (LOCAL, UNKNOWN).
func WriteProxyHeader(w io.Writer, version int, source, target, cameTo netip.AddrPort) error {
	if version != 1 && version != 2 {
		return fmt.Errorf("ingress: proxy protocol: version %d is neither 1 nor 2", version)
	}
	h := &proxyproto.Header{Version: byte(version), Command: proxyproto.LOCAL, TransportProtocol: proxyproto.UNSPEC}
	source, target, cameTo = plainAddrPort(source), plainAddrPort(target), plainAddrPort(cameTo)
	if source.Addr().Is4() != target.Addr().Is4() && cameTo.IsValid() {
		target = cameTo
	}
	if source.IsValid() && target.IsValid() {
		h.Command, h.TransportProtocol = proxyproto.PROXY, proxyproto.TCPv6
		if source.Addr().Is4() && target.Addr().Is4() {
			h.TransportProtocol = proxyproto.TCPv4
		}
		h.SourceAddr, h.DestinationAddr = net.TCPAddrFromAddrPort(source), net.TCPAddrFromAddrPort(target)
	}
	if _, err := h.WriteTo(w); err != nil {
		return fmt.Errorf("ingress: proxy protocol: write header: %w", err)
	}
	return nil
}
