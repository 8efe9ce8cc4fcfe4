package ingress

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"net/textproto"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"
)

// errNotHTTP replaces net/http's errors, which quote lines and URLs, with passwords in them.
var errNotHTTP = errors.New("malformed HTTP request")

var errHead = errors.New("malformed head of an HTTP message")

// head is the head of an HTTP/1 message: its first line and its fields, in the order and spelling of the sender.
type head struct {
	first  string
	fields []field
}

// field is a field line without the blanks around its value.
type field struct{ name, value string }

// is tells whether the field has one of these names.
func (f field) is(names ...string) bool {
	return slices.ContainsFunc(names, func(n string) bool { return strings.EqualFold(f.name, n) })
}

// parseHead reads a head, up to and with the empty line. Where lines may be continued (RFC 9112 §5.2), they are joined.
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

// hopByHop are the fields that a proxy does not forward, beside those that the Connection field names (RFC 9110
// §7.6.1).
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

// endToEnd returns the fields that are forwarded. Those that tell where the content ends always are: otherwise the
// content would be taken for a message.
func (h head) endToEnd() []field {
	options := h.connectionOptions()
	return slices.DeleteFunc(slices.Clone(h.fields), func(f field) bool {
		return f.is(hopByHop...) || f.is(options...) && !f.is("Host", "Content-Length", "Transfer-Encoding")
	})
}

// bytes writes the head.
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

// readRequest reads the head of a request. It refuses what servers may understand in different ways.
func readRequest(in *input) (request, error) {
	var b []byte
	for ended := false; !ended; {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return request{}, err
		}
		empty := len(bytes.TrimRight(line, "\r\n")) == 0
		if !empty || len(b) > 0 { // an empty line before the request is no part of it (RFC 9112 §2.2)
			b = append(b, line...)
			ended = empty
		}
	}
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
	parsed, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(known.bytes())))
	if err != nil {
		return request{}, errNotHTTP
	}
	return request{h, method, target, parsed}, nil
}

func (f field) isInvalid() bool {
	return !httpguts.ValidHeaderFieldName(f.name) || !httpguts.ValidHeaderFieldValue(f.value)
}

// isNoTarget tells whether a character is in no request target. Which others are allowed is for the server to say.
func isNoTarget(r rune) bool { return r <= ' ' || r == 0x7f }
