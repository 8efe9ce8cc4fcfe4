package ingress

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"math"
	"net/http"
	"net/textproto"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// Exchange is a request for a whole URL and its answer. A connection serves only one, because the
// next request may be for another server, and must not reach this one with its secrets or the
// proxy's. So the answer announces the end of the connection, and later requests are dropped. A
// WebSocket continues instead (RFC 6455).
type Exchange struct {
	method   string
	content  *content    // of the request
	upgrades bool        // the request asks for a WebSocket
	upgraded atomic.Bool // the server has agreed: all later bytes pass in both directions
}

// newExchange returns the exchange of a request.
func newExchange(req request) *Exchange {
	e := &Exchange{method: req.method, content: contentOfRequest(req.parsed)}
	upgrade := func(option string) bool { return strings.EqualFold(option, "upgrade") }
	// Of all protocols only a WebSocket may pass: within h2c the proxy would not see the requests.
	e.upgrades = req.parsed.ProtoMinor >= 1 && e.content.isOver() &&
		slices.ContainsFunc(req.connectionOptions(), upgrade) &&
		strings.EqualFold(req.parsed.Header.Get("Upgrade"), "websocket") && len(req.parsed.Header["Upgrade"]) == 1
	return e
}

// RequestFrom returns a reader of the bytes for the server behind the head of the request. client
// is the client's stream. It ends when client does.
func (e *Exchange) RequestFrom(client io.Reader) io.Reader {
	return &contentReader{content: e.content, src: client, upgraded: &e.upgraded}
}

// AnswerFrom returns a reader of the answer to the client. server is the server's stream. It ends
// with the answer.
func (e *Exchange) AnswerFrom(server io.Reader) io.Reader {
	return &answerReader{exchange: e, src: server}
}

// maxAnswerHead bounds the head of an answer, in bytes. The rest of a longer one passes as it is.
const maxAnswerHead = 64 << 10

// answerReader reads an answer, and the interim ones before it (RFC 9110 §15.2).
type answerReader struct {
	exchange *Exchange
	src      io.Reader
	head     []byte    // the bytes read so far of a head, and perhaps some behind it
	line     int       // where in head the first line begins that findHeadEnd has not seen complete
	ready    []byte    // to be returned before rest
	rest     io.Reader // what follows ready; nil: the final head is not complete yet
	err      error     // with which src has ended
}

var _ datapath.ReadyReader = (*answerReader)(nil)

// Read implements io.Reader.
func (a *answerReader) Read(b []byte) (int, error) { return a.ReadReady(datapath.Lent(b)) }

// ReadReady implements datapath.ReadyReader.
func (a *answerReader) ReadReady(room datapath.Room) (int, error) {
	for len(a.ready) == 0 && a.rest == nil {
		switch end := a.findHeadEnd(); {
		case end > 0 && end <= maxAnswerHead:
			a.processHead(a.head[:end], a.head[end:])
		case max(end, len(a.head)) > maxAnswerHead:
			a.passAll(append(announceClose(a.head[:maxAnswerHead]), a.head[maxAnswerHead:]...))
		case a.err != nil:
			a.passAll(a.head)
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

// findHeadEnd returns the length of the head that a.head begins with, with the empty line that
// ends it; 0: it is not complete.
func (a *answerReader) findHeadEnd() int {
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

// processHead prepares a head and the bytes behind it for being read. An interim answer passes as
// it is. A final one announces the end of the connection, and rest ends with its content.
func (a *answerReader) processHead(raw, behind []byte) {
	answer, err := readAnswerHead(raw, a.exchange.method) //nolint:bodyclose // nothing is read from it
	switch {
	case err != nil: // the client may understand it
		a.passAll(append(announceClose(raw), behind...))
	case answer.StatusCode == http.StatusSwitchingProtocols && a.exchange.upgrades:
		a.exchange.upgraded.Store(true)
		a.passAll(a.head)
	case answer.StatusCode < http.StatusOK && answer.StatusCode != http.StatusSwitchingProtocols:
		a.ready, a.head, a.line = raw, behind, 0
	default:
		last := announceClose(raw)
		if h, err := parseHead(raw, true); err == nil {
			h.fields = append(h.endToEnd(), field{"Connection", "close"})
			last = h.bytes()
		}
		content := &contentReader{content: contentOfAnswer(answer, a.exchange.method), src: a.src, last: true}
		n, _ := content.countReadable(behind)
		a.passAll(append(last, behind[:n]...))
		a.rest = content
	}
}

// passAll makes b the next bytes to be read, and all that src still sends those after it.
func (a *answerReader) passAll(b []byte) { a.ready, a.rest, a.head = b, a.src, nil }

// readAnswerHead reads the status code and the fields that tell where an answer ends. Clients
// accept heads that package net/http refuses. Then readAnswerHead gives net/http a head with only
// these parts.
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

// announceClose returns the lines of a head with "Connection: close" behind the first one (RFC 9112
// §9.3), and without the other fields about the connection. A head without a version of HTTP stays
// as it is.
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

// content finds the end of a message's content while its bytes pass (RFC 9112 §6).
type content struct {
	left    int64 // bytes to come of the content, or of the chunk
	chunked bool  // RFC 9112 §7.1
	at      chunkPart
	digits  int  // hexadecimal digits read of the chunk's size
	blank   bool // the trailer line is empty so far
}

// chunkPart is where in a chunk the next byte belongs.
type chunkPart uint8

const (
	chunkSize chunkPart = iota
	chunkExtension
	chunkSizeLF
	chunkData
	chunkDataCR
	chunkDataLF
	trailerLine
	trailerLineLF
	noMore
)

var errChunk = errors.New("content: a chunk is malformed (RFC 9112, section 7.1)")

// maxChunkDigits keeps a chunk's size within 63 bits.
const maxChunkDigits = 15

// contentOfRequest returns the content of a request, which is empty without a length (RFC 9112
// §6.3).
func contentOfRequest(req *http.Request) *content {
	return &content{left: max(req.ContentLength, 0), chunked: len(req.TransferEncoding) > 0}
}

// contentOfAnswer returns the content of the answer to a request with a method (RFC 9112 §6.3).
func contentOfAnswer(answer *http.Response, method string) *content {
	switch {
	case method == http.MethodHead, answer.StatusCode < http.StatusOK, answer.StatusCode == http.StatusNoContent,
		answer.StatusCode == http.StatusNotModified:
		return &content{}
	case len(answer.TransferEncoding) > 0:
		return &content{chunked: true}
	case answer.ContentLength < 0: // it ends with the connection
		return &content{left: math.MaxInt64}
	}
	return &content{left: answer.ContentLength}
}

// isOver reports whether the content has ended.
func (c *content) isOver() bool { return c.chunked && c.at == noMore || !c.chunked && c.left == 0 }

// advance returns how many of the next bytes b belong to the content. They count as passed.
func (c *content) advance(b []byte) (int, error) {
	if !c.chunked {
		n := min(c.left, int64(len(b)))
		c.left -= n
		return int(n), nil
	}
	for i := 0; i < len(b); {
		switch c.at {
		case noMore:
			return i, nil
		case chunkData:
			n := min(c.left, int64(len(b)-i))
			i += int(n)
			if c.left -= n; c.left == 0 {
				c.at = chunkDataCR
			}
			continue
		}
		if err := c.parseFraming(b[i]); err != nil {
			return i, err
		}
		i++
	}
	return len(b), nil
}

// parseFraming parses a byte that is not of a chunk's data. It accepts CR LF alone as the end of a
// line, because with other ends a server might see other chunks than we do.
func (c *content) parseFraming(b byte) error {
	switch {
	case c.at == chunkSize && hexDigit(b) >= 0 && c.digits < maxChunkDigits:
		c.left, c.digits = c.left<<4|int64(hexDigit(b)), c.digits+1
	case c.at == chunkSize && c.digits > 0 && (b == ';' || b == ' ' || b == '\t'):
		c.at = chunkExtension
	case (c.at == chunkSize && c.digits > 0 || c.at == chunkExtension) && b == '\r':
		c.at = chunkSizeLF
	case c.at == chunkSizeLF && b == '\n' && c.left > 0:
		c.at = chunkData
	case c.at == chunkSizeLF && b == '\n':
		c.at, c.blank = trailerLine, true
	case c.at == chunkDataCR && b == '\r':
		c.at = chunkDataLF
	case c.at == chunkDataLF && b == '\n':
		c.at, c.digits = chunkSize, 0
	case c.at == trailerLine && b == '\r':
		c.at = trailerLineLF
	case c.at == trailerLineLF && b == '\n' && c.blank:
		c.at = noMore
	case c.at == trailerLineLF && b == '\n':
		c.at, c.blank = trailerLine, true
	case c.at == trailerLine && b != '\n':
		c.blank = false
	case c.at == chunkExtension && b != '\n':
	default:
		return errChunk
	}
	return nil
}

// hexDigit returns the value of a hexadecimal digit; -1: it is none.
func hexDigit(b byte) int {
	switch {
	case b >= '0' && b <= '9':
		return int(b - '0')
	case b >= 'a' && b <= 'f':
		return int(b-'a') + 10
	case b >= 'A' && b <= 'F':
		return int(b-'A') + 10
	}
	return -1
}

// contentReader reads the content of a message from src. It ends when src does.
type contentReader struct {
	content  *content
	src      io.Reader
	last     bool         // the reader ends with the content; else it drops the bytes behind the content
	raw      bool         // all bytes of src are returned, where the content has no end that we know
	upgraded *atomic.Bool // true: raw is to be set; nil: never
}

var _ datapath.ReadyReader = (*contentReader)(nil)

// Read implements io.Reader.
func (r *contentReader) Read(b []byte) (int, error) {
	return r.ReadReady(datapath.Lent(b))
}

// ReadReady implements datapath.ReadyReader. Where src does not, room is taken before src is
// read.
func (r *contentReader) ReadReady(room datapath.Room) (int, error) {
	ready, _ := r.src.(datapath.ReadyReader)
	recorder := &roomRecorder{Room: room}
	for !r.last || r.raw || !r.content.isOver() {
		var n int
		var err error
		if ready != nil {
			n, err = ready.ReadReady(recorder)
		} else {
			n, err = r.src.Read(recorder.Take())
		}
		n, malformed := r.countReadable(recorder.taken[:n])
		if malformed != nil {
			err = malformed
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
	return 0, io.EOF
}

// countReadable returns how many of the next bytes b the reader returns; the rest are dropped.
func (r *contentReader) countReadable(b []byte) (int, error) {
	if r.upgraded != nil && r.upgraded.Load() {
		r.raw = true
	}
	if r.raw {
		return len(b), nil
	}
	n, err := r.content.advance(b)
	if err != nil && r.last { // the client may understand it
		r.raw = true
		return len(b), nil
	}
	return n, err
}

// roomRecorder is a Room that remembers the memory that it lent last.
type roomRecorder struct {
	datapath.Room
	taken []byte
}

// Take implements datapath.Room.
func (r *roomRecorder) Take() []byte {
	r.taken = r.Room.Take()
	return r.taken
}
