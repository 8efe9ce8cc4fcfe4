package ingress

import (
	"errors"
	"io"
	"math"
	"net/http"
	"sync/atomic"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// content follows where the content of a message ends (RFC 9112 §6).
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

func contentOfRequest(req *http.Request) *content {
	return &content{left: max(req.ContentLength, 0), chunked: len(req.TransferEncoding) > 0}
}

// contentOfAnswer is that of the answer to a request with a method.
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

// isOver tells whether all has been taken.
func (c *content) isOver() bool { return c.chunked && c.at == noMore || !c.chunked && c.left == 0 }

// take returns how many of the next bytes b belong to the content.
func (c *content) take(b []byte) (int, error) {
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
		if err := c.frame(b[i]); err != nil {
			return i, err
		}
		i++
	}
	return len(b), nil
}

// frame takes a byte that is not of a chunk's data. Lines end with CR LF alone: a server that took
// another end for one would see other chunks than we do.
func (c *content) frame(b byte) error {
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

// contentReader reads the content that src has the bytes of. It ends when src does.
type contentReader struct {
	content *content
	src     io.Reader
	last    bool         // it ends with the content as well; else what follows is dropped
	raw     bool         // whatever comes is read
	unbound *atomic.Bool // likewise, once it is set; nil: it is not
}

var _ datapath.ReadyReader = (*contentReader)(nil)

// Read implements io.Reader.
func (r *contentReader) Read(b []byte) (int, error) {
	return r.ReadReady(datapath.Lent(b))
}

// ReadReady implements datapath.ReadyReader. Where src does not, room is taken before src is read.
func (r *contentReader) ReadReady(room datapath.Room) (int, error) {
	ready, _ := r.src.(datapath.ReadyReader)
	noting := &noting{Room: room}
	for !r.last || r.raw || !r.content.isOver() {
		var n int
		var err error
		if ready != nil {
			n, err = ready.ReadReady(noting)
		} else {
			n, err = r.src.Read(noting.Take())
		}
		n, malformed := r.take(noting.taken[:n])
		if malformed != nil {
			err = malformed
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
	return 0, io.EOF
}

// take returns how many of the next bytes b are to be read.
func (r *contentReader) take(b []byte) (int, error) {
	if r.unbound != nil && r.unbound.Load() {
		r.raw = true
	}
	if r.raw {
		return len(b), nil
	}
	n, err := r.content.take(b)
	if err != nil && r.last { // the client may understand it
		r.raw = true
		return len(b), nil
	}
	return n, err
}

// noting is a Room that remembers what it lent last.
type noting struct {
	datapath.Room
	taken []byte
}

// Take implements datapath.Room.
func (n *noting) Take() []byte {
	n.taken = n.Room.Take()
	return n.taken
}
