package policy

import (
	"bytes"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"unicode"

	"golang.org/x/crypto/cryptobyte"
)

// MaxFirstBytes bounds the first bytes of a client that ServerName searches. A ClientHello with post-quantum key
// shares takes 2 KiB, and most servers accept no longer request headers.
const MaxFirstBytes = 16 << 10

// ServerName finds the server's name in the first bytes that a client sent: of
// a TLS ClientHello (RFC 6066 §3; with ECH that is the outer name, the only one
// to be seen), or of an HTTP/1 request (its absolute URI, else its Host). It is
// in lower case, without port or final dot.
//
// Where name is empty, more says whether further bytes may still bring one.
func ServerName(b []byte) (name string, more bool) {
	full := len(b) >= MaxFirstBytes
	b = b[:min(len(b), MaxFirstBytes)]
	switch {
	case len(b) == 0:
		return "", true
	case b[0] == recordHandshake, b[0] == recordAlert:
		name, more = tlsServerName(b)
	default:
		name, more = httpServerName(b)
	}
	return name, more && !full
}

// TLS on the wire: RFC 8446 §4 and §5.1, and RFC 5246, which has the same
// framing.
const (
	recordAlert       = 21
	recordHandshake   = 22
	recordHeader      = 5
	maxRecord         = 1 << 14
	messageHeader     = 4
	clientHello       = 1
	alertLength       = 2
	alertWarning      = 1
	extServerName     = 0
	nameTypeHost      = 0
	maxRecordMajor    = 15 // clients send 3; crypto/tls takes this one, too
	maxSessionID      = 32
	helloRandomLength = 32
)

// tlsServerName returns the server name of a ClientHello; more: it is not whole yet.
func tlsServerName(b []byte) (name string, more bool) {
	hello, more, ok := handshakeMessage(b)
	if !ok || more {
		return "", more
	}
	return helloServerName(hello), false
}

// handshakeMessage joins the body of the first handshake message from its records. Records may be empty. ok is
// false as soon as the bytes so far cannot begin a ClientHello; more: the message is not complete. Warnings between
// the records are skipped, as servers do. Bytes behind the message in the last record are not checked, because servers
// that speak TLS 1.2 take them for the next message.
func handshakeMessage(b []byte) (body []byte, more, ok bool) {
	var message []byte
	for {
		isAlert := len(b) > 0 && b[0] == recordAlert
		if len(b) > 0 && b[0] != recordHandshake && !isAlert || len(b) > 1 && b[1] > maxRecordMajor {
			return nil, false, false
		}
		if len(b) < recordHeader {
			return nil, true, true
		}
		length := int(b[3])<<8 | int(b[4])
		if length > maxRecord {
			return nil, false, false
		}
		b = b[recordHeader:]
		got := min(length, len(b))
		if isAlert {
			if length != alertLength || got > 0 && b[0] != alertWarning {
				return nil, false, false
			}
			if got < length {
				return nil, true, true
			}
			b = b[got:]
			continue
		}
		message = append(message, b[:got]...)
		b = b[got:]
		if len(message) > 0 && message[0] != clientHello {
			return nil, false, false
		}
		if len(message) >= messageHeader {
			whole := messageHeader + (int(message[1])<<16 | int(message[2])<<8 | int(message[3]))
			if whole > MaxFirstBytes {
				return nil, false, false
			}
			if len(message) >= whole {
				return message[messageHeader:whole], false, true
			}
		}
		if got < length {
			return nil, true, true
		}
	}
}

// HelloServerName finds the server's name in a ClientHello with its message header, as QUIC carries it, without TLS
// records (RFC 9001 §4.1.3). Empty: there is none. Else it is as ServerName returns it.
func HelloServerName(message []byte) string {
	if len(message) < messageHeader || message[0] != clientHello {
		return ""
	}
	return helloServerName(message[messageHeader:])
}

// helloServerName returns the name in the body of a ClientHello; empty: none, or a length or a name is wrong.
func helloServerName(body []byte) (name string) {
	s := cryptobyte.String(body)
	var sessionID, ciphers, compression, extensions cryptobyte.String
	if !s.Skip(2+helloRandomLength) ||
		!s.ReadUint8LengthPrefixed(&sessionID) || len(sessionID) > maxSessionID ||
		!s.ReadUint16LengthPrefixed(&ciphers) || len(ciphers) == 0 || len(ciphers)%2 != 0 ||
		!s.ReadUint8LengthPrefixed(&compression) || len(compression) == 0 ||
		!s.ReadUint16LengthPrefixed(&extensions) || !s.Empty() {
		return ""
	}
	for seen := false; !extensions.Empty(); {
		var kind uint16
		var data cryptobyte.String
		if !extensions.ReadUint16(&kind) || !extensions.ReadUint16LengthPrefixed(&data) {
			return ""
		}
		if kind != extServerName {
			continue
		}
		var ok bool
		if name, ok = readNameList(data); !ok || seen {
			return ""
		}
		seen = true
	}
	return name
}

// readNameList reads the content of a server_name extension, which has at most one host name (RFC 6066 §3).
func readNameList(data cryptobyte.String) (name string, ok bool) {
	var list cryptobyte.String
	if !data.ReadUint16LengthPrefixed(&list) || list.Empty() || !data.Empty() {
		return "", false
	}
	for !list.Empty() {
		var kind uint8
		var entry cryptobyte.String
		if !list.ReadUint8(&kind) || !list.ReadUint16LengthPrefixed(&entry) {
			return "", false
		}
		if kind != nameTypeHost {
			continue
		}
		if name != "" {
			return "", false
		}
		if name, ok = hostName(withoutPort(string(entry))); !ok {
			return "", false
		}
	}
	return name, true
}

// httpServerName returns the server name of an HTTP/1 request; more: the header is not complete. It needs the whole
// header, since a second Host field makes the first one invalid, but gives up as soon as the first line is not HTTP.
// It accepts all that a lenient server accepts, as long as that does not change the name.
func httpServerName(b []byte) (name string, more bool) {
	b = bytes.TrimLeft(b, "\r\n") // RFC 9112 §2.2
	line, rest, whole := bytes.Cut(b, []byte("\n"))
	method, target, _ := bytes.Cut(bytes.TrimSuffix(line, []byte("\r")), []byte(" "))
	target = bytes.Trim(target, " ")
	if bytes.ContainsFunc(method, notToken) || len(line) > 0 && len(method) == 0 ||
		bytes.ContainsFunc(target, notPrinted) {
		return "", false
	}
	if !whole {
		return "", true
	}
	end := bytes.LastIndexByte(target, ' ')
	if end < 0 || !isHTTP1(string(target[end+1:])) {
		return "", false
	}
	header, complete := requestHeader(rest)
	if !complete {
		return "", true
	}
	host, ok := hostField(header)
	if !ok {
		return "", false
	}
	if authority := targetAuthority(string(method), strings.TrimRight(string(target[:end]), " ")); authority != "" {
		host = authority
	}
	name, _ = hostName(withoutPort(host))
	return name, false
}

// isHTTP1 reports whether a version is HTTP/1 with any minor version.
func isHTTP1(version string) bool {
	minor, ok := strings.CutPrefix(version, "HTTP/1.")
	return ok && minor != "" && strings.Trim(minor, "0123456789") == ""
}

// targetAuthority is the host and port of a request target in absolute form, or that of CONNECT; empty: it has none.
func targetAuthority(method, target string) string {
	if method == http.MethodConnect && !strings.HasPrefix(target, "/") {
		return target
	}
	scheme, rest, absolute := strings.Cut(target, "://")
	if !absolute || strings.ContainsAny(scheme, "/?#") {
		return ""
	}
	if end := strings.IndexAny(rest, "/?#"); end >= 0 {
		rest = rest[:end]
	}
	return rest[strings.LastIndexByte(rest, '@')+1:]
}

// hostField returns the value of the Host field. It is not ok if there are several. Lines that are no fields are
// skipped, as servers do. A line that begins with a blank continues the field before it (RFC 9112 §5.2).
func hostField(header []byte) (host string, ok bool) {
	hosts, inHost := 0, false
	for line := range bytes.Lines(header) {
		field := strings.TrimRight(string(line), "\r\n")
		if strings.HasPrefix(field, " ") || strings.HasPrefix(field, "\t") {
			if inHost {
				host += " " + strings.Trim(field, " \t")
			}
			continue
		}
		name, value, _ := strings.Cut(field, ":")
		if inHost = strings.EqualFold(name, "Host"); inHost {
			hosts++
			host = strings.Trim(value, " \t")
		}
	}
	return strings.Trim(host, " "), hosts <= 1
}

// notToken reports whether a character is in no method (RFC 9110 §5.6.2).
func notToken(r rune) bool {
	return notLabel(r) && !strings.ContainsRune("!#$%&'*+.^`|~", r)
}

// notPrinted reports whether a character is a control character.
func notPrinted(r rune) bool { return r < ' ' || r == 0x7f }

// requestHeader returns b up to the first empty line, and whether there is one.
func requestHeader(b []byte) (header []byte, complete bool) {
	for at := 0; ; {
		line, _, whole := bytes.Cut(b[at:], []byte("\n"))
		if !whole {
			return nil, false
		}
		if len(bytes.TrimRight(line, "\r")) == 0 {
			return b[:at], true
		}
		at += len(line) + 1
	}
}

// withoutPort returns host without its port. An address in brackets stays as it is: hostName refuses it anyway.
func withoutPort(host string) string {
	if strings.HasPrefix(host, "[") {
		return host
	}
	host, _, _ = strings.Cut(host, ":")
	return host
}

// Lengths of DNS names: RFC 1035 §2.3.4.
const (
	maxHostName = 253
	maxLabel    = 63
)

// HostName returns host in the form that ServerName returns; empty: it is no host name.
func HostName(host string) string {
	name, _ := hostName(host)
	return name
}

// hostName returns s in lower case and without its final dot. ok: s is a host name of letters, digits and hyphens (RFC
// 1123 §2.1), and underscores, which occur in practice. An address is not, because no name ends in a number.
func hostName(s string) (name string, ok bool) {
	s = strings.TrimSuffix(s, ".")
	if len(s) > maxHostName {
		return "", false
	}
	last := ""
	for last = range strings.SplitSeq(s, ".") {
		if len(last) == 0 || len(last) > maxLabel || last[0] == '-' || last[len(last)-1] == '-' ||
			strings.ContainsFunc(last, notLabel) {
			return "", false
		}
	}
	if strings.Trim(last, "0123456789") == "" {
		return "", false
	}
	return strings.ToLower(s), true
}

// notLabel reports whether a character is in no name of a host.
func notLabel(r rune) bool {
	return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_'
}

// NamePattern matches a host name, or every name below one. ParseNamePattern returns it.
type NamePattern struct {
	name  string
	below bool // those below name, of any depth, and not name itself
}

// ParseNamePattern reads "example.com", or "*.example.com" for every name below
// it: a.example.com, a.b.example.com, but not example.com.
func ParseNamePattern(s string) (NamePattern, error) {
	host, below := strings.CutPrefix(s, "*.")
	name, ok := hostName(host)
	if ok {
		return NamePattern{name, below}, nil
	}
	return NamePattern{}, fmt.Errorf("%q is no server name; %s", s, hostNameCure(host))
}

// hostNameCure says what to write instead of s, which is no host name.
func hostNameCure(s string) string {
	_, afterScheme, isURL := strings.Cut(s, "://")
	if isURL {
		s, _, _ = strings.Cut(afterScheme, "/")
	}
	host, port, hasPort := strings.Cut(s, ":")
	address, err := netip.ParseAddr(strings.Trim(s, "[]"))
	if ap, withPort := netip.ParseAddrPort(s); withPort == nil {
		address, err = ap.Addr(), nil
	}
	name, isName := hostName(host)
	switch {
	case s == "*" || s == "":
		return "leave server_name out to match whatever the name is, or write example.com, or \"*.example.com\" " +
			"for all names below it"
	case err == nil:
		return fmt.Sprintf("write %v under destination", address)
	case hasPort && isName && port != "":
		return fmt.Sprintf("write %s here, and %s under ports", name, port)
	case isURL && isName:
		return fmt.Sprintf("write the name alone: %s", name)
	case strings.HasPrefix(s, "."):
		return fmt.Sprintf("write \"*%s\" for all names below", s)
	case strings.Contains(s, "*"):
		return "a * stands for whole labels, and only in front: \"*.example.com\""
	case strings.ContainsFunc(s, func(r rune) bool { return r > unicode.MaxASCII }):
		return "write its ASCII form, which begins with xn--"
	}
	return "write example.com, or \"*.example.com\" for all names below it"
}

// String writes the pattern so that ParseNamePattern reads it.
func (p NamePattern) String() string {
	if p.below {
		return "*." + p.name
	}
	return p.name
}

// matchesName reports whether p matches a name as ServerName returns it.
func (p NamePattern) matchesName(name string) bool {
	if p.below {
		above, ok := strings.CutSuffix(name, p.name)
		return ok && strings.HasSuffix(above, ".")
	}
	return name != "" && name == p.name
}
