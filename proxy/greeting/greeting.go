// Package greeting reads what a client or a proxy sends ahead of a connection's own bytes. Each parser is a state
// machine that is fed bytes: it does no I/O, does not wait and has no clock, so that it serves a loop and a goroutine
// alike.
//
//	SOCKS5       methods, name and password, request     RFC 1928, RFC 1929
//	HTTPHead     the head of an HTTP/1 request           RFC 9112
//	ProxyHeader  PROXY protocol, versions 1 and 2        haproxy.org, proxy-protocol.txt
//
// The caller of a Feed keeps the bytes that were not consumed, and gives them again with those that have come since.
// What the machines leave unconsumed is bounded. They retain no memory of the caller's.
package greeting

// Lengths of addresses, in bytes.
const (
	ipv4Length = 4
	ipv6Length = 16
)
