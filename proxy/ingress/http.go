package ingress

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/textproto"
	"net/url"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"
)

// errNotHTTP replaces net/http's errors, which quote lines and URLs, with passwords in them.
var errNotHTTP = errors.New("malformed HTTP request")

var errHead = errors.New("malformed head of an HTTP message")

// head is the head of an HTTP/1 message: its first line and its fields, in the order and spelling
// of the sender.
type head struct {
	first  string
	fields []field
}

// field is a field line without the blanks around its value.
type field struct{ name, value string }

// is reports whether the field has one of these names.
func (f field) is(names ...string) bool {
	return slices.ContainsFunc(names, func(n string) bool { return strings.EqualFold(f.name, n) })
}

// isInvalid reports whether a field may not be in a request (RFC 9110 §5.1, §5.5).
func (f field) isInvalid() bool {
	return !httpguts.ValidHeaderFieldName(f.name) || !httpguts.ValidHeaderFieldValue(f.value)
}

// fieldOf returns the field of a line. The line may be malformed: without a colon it has no value.
func fieldOf(line string) field {
	name, value, _ := strings.Cut(line, ":")
	return field{textproto.TrimString(name), textproto.TrimString(strings.TrimRight(value, "\r\n"))}
}

// parseHead reads a head, up to and with the empty line. continued: lines may be continued (RFC
// 9112 §5.2), and are joined.
func parseHead(b []byte, continued bool) (h head, err error) {
	for i, line := range strings.Split(string(b), "\n") {
		line = strings.TrimSuffix(line, "\r")
		name, value, found := strings.Cut(line, ":")
		switch {
		case i == 0:
			h.first = line
		case line == "":
			return h, nil
		case line[0] == ' ' || line[0] == '\t':
			if !continued || len(h.fields) == 0 {
				return h, errHead
			}
			h.fields[len(h.fields)-1].value += " " + textproto.TrimString(line)
		case !found:
			return h, errHead
		default:
			h.fields = append(h.fields, field{name, textproto.TrimString(value)})
		}
	}
	return h, errHead
}

// hopByHop are the fields that a proxy does not forward, beside those that the Connection field
// names (RFC 9110 §7.6.1).
var hopByHop = []string{
	"Connection", "Keep-Alive", "Proxy-Authorization", "Proxy-Connection", "TE", "Upgrade",
}

// connectionOptions returns what the Connection fields list.
func (h head) connectionOptions() (options []string) {
	for _, f := range h.fields {
		if f.is("Connection") {
			for option := range strings.SplitSeq(f.value, ",") {
				options = append(options, textproto.TrimString(option))
			}
		}
	}
	return options
}

// endToEnd returns the fields that are forwarded. Fields that tell where the content ends are
// always among them: otherwise the server would take the content for another request.
func (h head) endToEnd() []field {
	options := h.connectionOptions()
	return slices.DeleteFunc(slices.Clone(h.fields), func(f field) bool {
		return f.is(hopByHop...) || f.is(options...) && !f.is("Host", "Content-Length", "Transfer-Encoding")
	})
}

// bytes returns the head with CR LF behind each line, and an empty line.
func (h head) bytes() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s\r\n", h.first)
	for _, f := range h.fields {
		fmt.Fprintf(&b, "%s: %s\r\n", f.name, f.value)
	}
	b.WriteString("\r\n")
	return b.Bytes()
}

// request is the head of a request.
type request struct {
	head
	method, target string        // as the client wrote them
	parsed         *http.Request // what package net/http makes of all but the target
}

// parseRequest reads the head of a request. It refuses heads that servers understand in different
// ways, since with them a client could smuggle a request past a rule (RFC 9112 §11.2).
func parseRequest(b []byte) (request, error) {
	h, err := parseHead(b, false)
	if err != nil || slices.ContainsFunc(h.fields, field.isInvalid) {
		return request{}, errNotHTTP
	}
	method, rest, _ := strings.Cut(h.first, " ")
	target, version, _ := strings.Cut(rest, " ")
	if strings.ContainsFunc(target, isNoTarget) {
		return request{}, errNotHTTP
	}
	known := head{method + " / " + version, h.fields}
	raw := known.bytes()
	parsed, err := http.ReadRequest(bufio.NewReaderSize(bytes.NewReader(raw), len(raw))) // not of 4 KB
	if err != nil {
		return request{}, errNotHTTP
	}
	return request{h, method, target, parsed}, nil
}

// isNoTarget reports whether a character may be in no request target. The server judges the rest.
func isNoTarget(r rune) bool { return r <= ' ' || r == 0x7f }

// wholeURL is a URL of scheme http, or ws.
type wholeURL struct {
	authority *url.URL // without path and query; nil: it is malformed
	origin    string   // path and query
}

// parseWholeURL reads the target of an HTTP/1 request; not ok: it is no whole URL. It parses only
// the authority. The server judges the rest.
func parseWholeURL(req request) (to wholeURL, ok bool) {
	scheme, rest, _ := strings.Cut(req.target, "://")
	if !strings.EqualFold(scheme, "http") && !strings.EqualFold(scheme, "ws") || req.parsed.ProtoMajor != 1 {
		return to, false
	}
	rest, _, _ = strings.Cut(rest, "#")
	end := strings.IndexAny(rest, "/?")
	if end < 0 {
		end = len(rest)
	}
	to.origin = rest[end:]
	if u, err := url.Parse("http://" + rest[:end]); err == nil {
		to.authority = u
	}
	return to, end > 0
}

// originRequest returns the head of req for the server, with the target in origin form (RFC 9112
// §3.2.1).
func originRequest(req request, to wholeURL, upgrades bool) []byte {
	h := head{fmt.Sprintf("%s %s HTTP/1.%d", req.method, to.originForm(req.method), min(req.parsed.ProtoMinor, 1)), nil}
	host := field{"Host", hostField(to.authority)}
	fields := req.endToEnd()
	if !slices.ContainsFunc(fields, func(f field) bool { return f.is("Host") }) {
		h.fields = append(h.fields, host)
	}
	// Only the first field that tells the length is forwarded, of the kind that net/http goes by.
	length := "Content-Length"
	if len(req.parsed.TransferEncoding) > 0 {
		length = "Transfer-Encoding"
	}
	for _, f := range fields {
		switch {
		case f.is("Host"):
			f.value = host.value
		case f.is(length):
			length = ""
		case f.is("Content-Length", "Transfer-Encoding"):
			continue
		}
		h.fields = append(h.fields, f)
	}
	via := fmt.Sprintf("%d.%d penstock", req.parsed.ProtoMajor, req.parsed.ProtoMinor)
	h.fields = append(h.fields, field{"Via", via})
	if upgrades {
		h.fields = append(h.fields, field{"Upgrade", "websocket"}, field{"Connection", "upgrade"})
	} else {
		h.fields = append(h.fields, field{"Connection", "close"})
	}
	return h.bytes()
}

// originForm returns the target of the request for the server.
func (u wholeURL) originForm(method string) string {
	switch {
	case u.origin == "" && method == http.MethodOptions:
		return "*" // RFC 9112 §3.2.4
	case u.origin == "" || u.origin[0] == '?':
		return "/" + u.origin
	}
	return u.origin
}

// hostField returns the value of Host for the server: the URL's host and port, whatever the
// client's Host says (RFC 9112 §3.2.2). It has no user information, and no zone, which only this
// host knows.
func hostField(u *url.URL) string {
	host, _, zone := strings.Cut(u.Hostname(), "%")
	if port := u.Port(); port != "" {
		return net.JoinHostPort(host, port)
	}
	if zone {
		return "[" + host + "]"
	}
	return strings.TrimSuffix(u.Host, ":")
}

// httpRefusal returns an answer after which the caller closes the connection. header is empty or
// complete lines.
func httpRefusal(status int, header, reason string) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "HTTP/1.1 %d %s\r\n%s", status, http.StatusText(status), header)
	fmt.Fprintf(&b, "Content-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s\n",
		len(reason)+1, reason)
	return b.Bytes()
}
