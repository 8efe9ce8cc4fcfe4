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

// MaxFirstBytes is how much of what a client sends is looked at for a name: a
// ClientHello with post-quantum key shares takes 2 KiB, and most servers take
// no longer request headers.
const MaxFirstBytes = 16 << 10

// ServerName finds the server's name in the first bytes that a client sent: of
// a TLS ClientHello (RFC 6066 §3; with ECH that is the outer name, the only one
// to be seen), or of an HTTP/1 request (its absolute URI, else its Host). It is
// in lower case, without port or final dot.
//
// Without a name, more says that b is the beginning of what may still have one.
// Once more is false, further bytes change nothing.
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
	name, _ = helloServerName(hello)
	return name, false
}

// handshakeMessage joins the body of the first handshake message from as many records as it takes. Some of them may be
// empty. It is wrong as soon as its beginning is. Warnings between the records are passed over, as servers do. What
// follows in the last record is not looked at: servers that speak TLS 1.2 take it for the next message.
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
	name, _ := helloServerName(message[messageHeader:])
	return name
}

// helloServerName reads the whole of a ClientHello and returns the name in it;
// not ok where a length or a name is wrong.
func helloServerName(body []byte) (name string, ok bool) {
	s := cryptobyte.String(body)
	var sessionID, ciphers, compression, extensions cryptobyte.String
	if !s.Skip(2+helloRandomLength) ||
		!s.ReadUint8LengthPrefixed(&sessionID) || len(sessionID) > maxSessionID ||
		!s.ReadUint16LengthPrefixed(&ciphers) || len(ciphers) == 0 || len(ciphers)%2 != 0 ||
		!s.ReadUint8LengthPrefixed(&compression) || len(compression) == 0 {
		return "", false
	}
	if s.Empty() {
		return "", true // no extensions at all
	}
	if !s.ReadUint16LengthPrefixed(&extensions) || !s.Empty() {
		return "", false
	}
	for seen := false; !extensions.Empty(); {
		var kind uint16
		var data cryptobyte.String
		if !extensions.ReadUint16(&kind) || !extensions.ReadUint16LengthPrefixed(&data) {
			return "", false
		}
		if kind != extServerName {
			continue
		}
		if seen {
			return "", false
		}
		seen = true
		if name, ok = nameList(data); !ok {
			return "", false
		}
	}
	return name, true
}

// nameList reads the content of a server_name extension: at most one name of
// the one type there is.
func nameList(data cryptobyte.String) (name string, ok bool) {
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

// httpServerName waits for the whole header, since a second Host makes the first one worthless, but gives up as soon
// as the first line is no HTTP. Servers differ in what they take for a request. So it is read as the most lenient of
// them do, in all that cannot make another name of it.
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

// withoutPort leaves what is in brackets as it is: an address, which is no name.
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

// HostName is the name that host is to rules by server name; empty: it is none.
func HostName(host string) string {
	name, _ := hostName(host)
	return name
}

// hostName returns a name in lower case and without its final dot, if it is
// that of a host: letters, digits and hyphens (RFC 1123 §2.1), and underscores,
// which do occur. An address is none: no name ends in a number.
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

// NamePattern is a host name, or every name below one. It is made by
// ParseNamePattern.
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

// hostNameCure says what to write instead of what is no host name.
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

// matchesName takes a name as ServerName returns it.
func (p NamePattern) matchesName(name string) bool {
	if p.below {
		above, ok := strings.CutSuffix(name, p.name)
		return ok && strings.HasSuffix(above, ".")
	}
	return name != "" && name == p.name
}
