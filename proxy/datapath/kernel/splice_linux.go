package kernel

import (
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath"
)

const (
	defaultPipes = 128 // 256 descriptors at most
	idlePipes    = 32  // of each size, kept for the next user
	largePipe    = 1 << 20
	smallPipe    = 64 << 10 // what the kernel makes one; a quarter of large costs bulk a third more CPU per byte
	spliceFlags  = unix.SPLICE_F_NONBLOCK | unix.SPLICE_F_MOVE
)

// pipes lends kernel pipes to splices, a bounded number at a time. Once a user's pipes
// take more than fs.pipe-user-pages-soft, the kernel makes each further one of two pages
// (pipe(7)), which costs a slow flow three splices for one. So large ones take at most half
// of that, and pieces that fit into small ones have those.
type pipes struct {
	mu                   sync.Mutex
	maxLent              int
	maxLarge             int     // large pipes at most
	lent                 int     // lent, of both sizes; bound at most
	largeMade            int     // large ones, lent or idle
	idleSmall, idleLarge []*pipe // idle, of smallPipe and of largePipe bytes
	closed               bool
}

// pipe is the store of a splice.
type pipe struct {
	r, w  int
	large bool
	n     int // bytes in it
}

func newPipes(bound int) *pipes {
	if bound <= 0 {
		bound = defaultPipes
	}
	return &pipes{maxLent: bound, maxLarge: largePipes(bound)}
}

// largePipes is how many of so many pipes may be large.
func largePipes(bound int) int {
	var soft int // pages
	if scanFile("/proc/sys/fs/pipe-user-pages-soft", &soft) != nil || soft == 0 {
		return bound // there is no such limit
	}
	return min(bound, soft/(2*largePipe/os.Getpagesize())) // in this order it overflows nowhere
}

// idlePipes is where pipes of a size wait for the next user.
func (p *pipes) idleList(large bool) *[]*pipe {
	if large {
		return &p.idleLarge
	}
	return &p.idleSmall
}

// takePipe returns an empty pipe for a piece of so many bytes; nil when there is none to be had.
func (p *pipes) takePipe(piece int) *pipe {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.lent >= p.maxLent {
		return nil
	}
	large := piece > smallPipe && (len(p.idleLarge) > 0 || p.largeMade < p.maxLarge)
	idle := p.idleList(large)
	if last := len(*idle) - 1; last >= 0 {
		pp := (*idle)[last]
		*idle = (*idle)[:last]
		p.lent++
		return pp
	}
	var fds [2]int
	if unix.Pipe2(fds[:], unix.O_NONBLOCK|unix.O_CLOEXEC) != nil {
		return nil
	}
	if large {
		_, _ = unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, largePipe) // what it has serves as well
		p.largeMade++
	}
	p.lent++
	return &pipe{r: fds[0], w: fds[1], large: large}
}

// returnPipe takes a pipe back, and closes one with bytes in it.
func (p *pipes) returnPipe(pp *pipe) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lent--
	idle := p.idleList(pp.large)
	if pp.n > 0 || p.closed || len(*idle) >= idlePipes {
		pp.closePipe()
		if pp.large {
			p.largeMade--
		}
		return
	}
	*idle = append(*idle, pp)
}

func (p *pipes) closeAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, pp := range slices.Concat(p.idleSmall, p.idleLarge) {
		pp.closePipe()
	}
	p.idleSmall, p.idleLarge = nil, nil
}

func (pp *pipe) closePipe() {
	_ = unix.Close(pp.r)
	_ = unix.Close(pp.w)
}

// splicer is the carrier between two legs of this package. A stream goes through a pipe,
// in which bytes never leave the kernel; what comes in small pieces is copied, which takes
// fewer system calls. Where no pipe is to be had all is copied. So is the byte at an urgent
// mark (RFC 6093 section 2), at which a splice would stand still, and it is sent as urgent.
type splicer struct {
	dst, src     *Conn
	pipes        *pipes
	pipe         *pipe // nil while nothing is stored in one
	copy         datapath.Carrier
	inBulk       bool  // the last piece was a large one
	mustCopy     bool  // what comes next can only be copied
	urgent       bool  // what copy stores is the byte at the mark
	dstStalled   bool  // the destination takes nothing of the little that is in the pipe
	drainingPipe bool  // copy is filled from the pipe
	markErr      error // told to a splice at the mark, ahead of the bytes behind it, and not again

	limit, n int // of the call underway
	err      error
}

// CarryFrom implements datapath.Carriage: between two legs of this package
// bytes are spliced.
func (c *Conn) CarryFrom(src net.Conn, buffers *datapath.Buffers) datapath.Carrier {
	from, ok := src.(*Conn)
	if !ok {
		return nil
	}
	s := &splicer{dst: c, src: from, pipes: c.dp.pipes}
	s.copy = datapath.NewCopy((*outlet)(s), (*inlet)(s), buffers)
	return s
}

func (s *splicer) Fill(limit int) (n int, err error) {
	if s.Buffered() > 0 || limit <= 0 {
		return 0, nil
	}
	// What has to wait for room waits at its source, so that a thousand slow flows hold
	// no pipes. An error other than ErrWait is Drain's to tell.
	switch err := s.dst.waitWritable(); {
	case err == nil:
		limit = s.dst.writeEnd(0, limit)
	case errors.Is(err, datapath.ErrWait):
		return 0, err
	}
	if s.inBulk {
		if limit, err = s.dst.limitToRoom(limit); errors.Is(err, datapath.ErrWait) {
			return 0, err
		}
	}
	if s.mustCopy = !s.inBulk; s.inBulk {
		n, err = s.fillPipe(limit)
	}
	if s.mustCopy {
		if !s.inBulk {
			limit = min(limit, datapath.SmallBuffer)
		}
		n, err = s.copy.Fill(limit)
	}
	if s.markErr != nil && errors.Is(err, io.EOF) {
		err = s.src.opFailure("splice", nil, s.markErr)
	}
	if n > 0 {
		s.inBulk = n >= datapath.SmallBuffer || n == limit
	}
	return n, err
}

// fillPipe takes bytes into a pipe, unless it finds that they can only be copied.
func (s *splicer) fillPipe(limit int) (int, error) {
	s.limit, s.n, s.err = limit, 0, nil
	poll := s.src.raw.Read(s.spliceIn)
	if s.mustCopy && poll == nil {
		return 0, nil
	}
	n, err := s.src.ioResult(s.n, poll, s.err, "splice")
	if s.pipe != nil {
		if s.pipe.n = n; n == 0 {
			s.returnPipe()
		}
	}
	return n, err
}

// spliceIn runs inside RawConn.Read.
func (s *splicer) spliceIn(fd uintptr) bool {
	if s.pipe == nil {
		if s.pipe = s.pipes.takePipe(s.limit); s.pipe == nil {
			s.mustCopy = true
			return true
		}
	}
	s.n, s.err = spliceOnce(int(fd), s.pipe.w, s.limit)
	if s.n == 0 && atMark(fd) { // splice says for ever that there is nothing
		if s.err != nil && !errors.Is(s.err, unix.EAGAIN) {
			s.markErr = s.err
		}
		s.returnPipe()
		s.mustCopy = true
		return true
	}
	if errors.Is(s.err, unix.EAGAIN) { // the pipe is empty, so it is the socket that is
		s.returnPipe()
		return false
	}
	return true
}

func (s *splicer) Drain(limit int) (int, error) {
	if s.pipe == nil {
		return s.copy.Drain(limit)
	}
	if limit = min(limit, s.pipe.n); limit <= 0 {
		return 0, nil
	}
	s.n, s.err, s.dstStalled = 0, nil, false
	s.dst.beginWrite()
	poll := s.dst.waitWritable()
	if poll == nil {
		s.limit = s.dst.writeEnd(0, limit)
		poll = s.dst.raw.Write(s.spliceOut)
	}
	s.dst.noteTaken(s.n)
	s.dst.endWrite()
	if s.pipe.n -= s.n; s.pipe.n == 0 {
		s.returnPipe()
	}
	if s.dstStalled && s.emptyPipe() {
		return s.copy.Drain(limit)
	}
	if s.n == 0 && s.err == nil {
		s.err = io.ErrNoProgress
	}
	return s.n, s.dst.opFailure("splice", poll, s.err)
}

// spliceOut runs inside RawConn.Write.
func (s *splicer) spliceOut(fd uintptr) bool {
	s.n, s.err = spliceOnce(s.pipe.r, int(fd), s.limit)
	if !errors.Is(s.err, unix.EAGAIN) {
		return true
	}
	// The pipe has bytes, so it is the socket that is full, and for how long nobody knows.
	s.dstStalled = s.pipe.n <= datapath.SmallBuffer
	return s.dstStalled
}

// emptyPipe moves what the pipe stores, a small buffer of bytes at most, into memory and gives the pipe back.
func (s *splicer) emptyPipe() bool {
	s.drainingPipe = true
	n, err := s.copy.Fill(s.pipe.n)
	s.drainingPipe = false
	if err != nil || n < s.pipe.n {
		s.err = errors.Join(s.err, err, io.ErrUnexpectedEOF) // cannot be: the bytes are there
		return false
	}
	s.pipe.n = 0
	s.returnPipe()
	s.err = nil
	return true
}

func (s *splicer) returnPipe() {
	s.pipes.returnPipe(s.pipe)
	s.pipe = nil
}

func (s *splicer) Buffered() int {
	if s.pipe != nil {
		return s.pipe.n
	}
	return s.copy.Buffered()
}

// Splicing implements datapath.Carrier.
func (s *splicer) Splicing() bool { return s.pipe != nil }

func (s *splicer) Release() {
	if s.pipe != nil {
		s.returnPipe()
	}
	s.copy.Release()
}

func spliceOnce(from, to, limit int) (int, error) {
	for {
		n, err := unix.Splice(from, nil, to, nil, limit, spliceFlags)
		if !errors.Is(err, unix.EINTR) {
			return int(max(0, n)), err
		}
	}
}
