package ingress

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"net/textproto"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// maxAnswerHead bounds the head of an answer, in bytes. What follows of a longer one passes as it is.
const maxAnswerHead = 64 << 10

// Exchange is the one request for a whole URL that a connection serves, and its answer. Requests behind it may be for
// other servers and hold their secrets, or the proxy's: they are dropped. So the answer tells the client that the
// connection ends with it, and it does, whatever the server says. A WebSocket goes on instead (RFC 6455).
type Exchange struct {
	method   string
	content  *content // of the request
	upgrades bool     // it asks for a WebSocket
	upgraded atomic.Bool
}

func newExchange(req request) *Exchange {
	e := &Exchange{method: req.method, content: contentOfRequest(req.parsed)}
	upgrade := func(option string) bool { return strings.EqualFold(option, "upgrade") }
	// h2c would let requests pass that no proxy sees.
	e.upgrades = req.parsed.ProtoMinor >= 1 && e.content.isOver() &&
		slices.ContainsFunc(req.connectionOptions(), upgrade) &&
		strings.EqualFold(req.parsed.Header.Get("Upgrade"), "websocket") && len(req.parsed.Header["Upgrade"]) == 1
	return e
}

// RequestFrom returns a reader of what the server is sent behind the head of the request. client is what the client
// sends. It ends when client does.
func (e *Exchange) RequestFrom(client io.Reader) io.Reader {
	return &contentReader{content: e.content, src: client, unbound: &e.upgraded}
}

// AnswerFrom returns a reader of what the client is answered. server is what the server sends. It ends with the answer.
func (e *Exchange) AnswerFrom(server io.Reader) io.Reader {
	return &answerReader{exchange: e, src: server}
}

// answerReader reads an answer, and the interim ones before it (RFC 9110 §15.2).
type answerReader struct {
	exchange *Exchange
	src      io.Reader
	head     []byte    // as far as it has come, and what was read behind it
	line     int       // where a line of head begins: the last one that was looked at
	ready    []byte    // to be read before rest
	rest     io.Reader // what follows the final head; nil: that has not come yet
	err      error     // that src has ended with
}

var _ datapath.ReadyReader = (*answerReader)(nil)

// Read implements io.Reader.
func (a *answerReader) Read(b []byte) (int, error) { return a.ReadReady(datapath.Lent(b)) }

// ReadReady implements datapath.ReadyReader.
func (a *answerReader) ReadReady(room datapath.Room) (int, error) {
	for len(a.ready) == 0 && a.rest == nil {
		switch end := a.headEnd(); {
		case end > 0 && end <= maxAnswerHead:
			a.takeHead(a.head[:end], a.head[end:])
		case max(end, len(a.head)) > maxAnswerHead:
			a.pass(append(announceClose(a.head[:maxAnswerHead]), a.head[maxAnswerHead:]...))
		case a.err != nil:
			a.pass(a.head)
		default:
			piece := make([]byte, 4096)
			var n int
			n, a.err = a.src.Read(piece)
			a.head = append(a.head, piece[:n]...)
		}
	}
	if len(a.ready) > 0 {
		n := copy(room.Take(), a.ready)
		a.ready = a.ready[n:]
		return n, nil
	}
	if a.err != nil {
		return 0, a.err
	}
	if ready, ok := a.rest.(datapath.ReadyReader); ok {
		return ready.ReadReady(room)
	}
	return a.rest.Read(room.Take())
}

// headEnd returns the length of the head that a.head begins with, with the empty line that ends it; 0: it goes on.
func (a *answerReader) headEnd() int {
	for {
		line, _, whole := bytes.Cut(a.head[a.line:], []byte("\n"))
		if !whole {
			return 0
		}
		a.line += len(line) + 1
		if len(bytes.TrimSuffix(line, []byte("\r"))) == 0 {
			return a.line
		}
	}
}

// takeHead takes a head, and what was read behind it.
func (a *answerReader) takeHead(raw, behind []byte) {
	answer, err := readAnswerHead(raw, a.exchange.method) //nolint:bodyclose // nothing is read from it
	switch {
	case err != nil: // the client may understand it
		a.pass(append(announceClose(raw), behind...))
	case answer.StatusCode == http.StatusSwitchingProtocols && a.exchange.upgrades:
		a.exchange.upgraded.Store(true)
		a.pass(a.head)
	case answer.StatusCode < http.StatusOK && answer.StatusCode != http.StatusSwitchingProtocols:
		a.ready, a.head, a.line = raw, behind, 0
	default:
		last := announceClose(raw)
		if h, err := parseHead(raw, true); err == nil {
			h.fields = append(h.endToEnd(), field{"Connection", "close"})
			last = h.bytes()
		}
		content := &contentReader{content: contentOfAnswer(answer, a.exchange.method), src: a.src, last: true}
		n, _ := content.take(behind)
		a.pass(append(last, behind[:n]...))
		a.rest = content
	}
}

// readAnswerHead reads what tells where an answer ends. Clients take more than package net/http does, so of a head that
// it refuses, readAnswerHead has it read the status code and the fields of the content alone.
func readAnswerHead(raw []byte, method string) (*http.Response, error) {
	read := func(b []byte) (*http.Response, error) {
		return http.ReadResponse(bufio.NewReader(bytes.NewReader(b)), &http.Request{Method: method})
	}
	answer, err := read(raw)
	first, rest, _ := strings.Cut(string(raw), "\n")
	version, status, _ := strings.Cut(first, " ")
	if err == nil || !strings.HasPrefix(version, "HTTP/") {
		return answer, err
	}
	framing := head{first: "HTTP/1.1 " + strings.TrimSuffix(status, "\r")}
	coding := ""
	for line := range strings.Lines(rest) {
		switch f := fieldOf(line); {
		case f.is("Content-Length"):
			for length := range strings.SplitSeq(f.value, ",") {
				length = strings.TrimPrefix(textproto.TrimString(length), "+")
				framing.fields = append(framing.fields, field{"Content-Length", length})
			}
		case f.is("Transfer-Encoding"): // the last one frames the content (RFC 9112 §6.3)
			coding = textproto.TrimString(f.value[strings.LastIndex(f.value, ",")+1:])
		}
	}
	if coding != "" {
		framing.fields = append(framing.fields, field{"Transfer-Encoding", coding})
	}
	return read(framing.bytes())
}

// announceClose returns the lines of a head with a Connection field behind the first one. Where there are others, that
// one decides (RFC 9112 §9.3). A head without a version of HTTP stays as it is.
func announceClose(lines []byte) []byte {
	first, rest, found := bytes.Cut(lines, []byte("\n"))
	if !found || !bytes.HasPrefix(first, []byte("HTTP/")) {
		return slices.Clip(lines)
	}
	edited := slices.Concat(first, []byte("\nConnection: close\r\n"))
	dropped := false
	for line := range bytes.Lines(rest) {
		continues := line[0] == ' ' || line[0] == '\t'
		if dropped = dropped && continues || fieldOf(string(line)).is("Connection", "Keep-Alive"); !dropped {
			edited = append(edited, line...)
		}
	}
	return edited
}

// fieldOf returns the field of a line.
func fieldOf(line string) field {
	name, value, _ := strings.Cut(line, ":")
	return field{textproto.TrimString(name), textproto.TrimString(strings.TrimRight(value, "\r\n"))}
}

// pass has b be read, and then what is still to come.
func (a *answerReader) pass(b []byte) { a.ready, a.rest, a.head = b, a.src, nil }
