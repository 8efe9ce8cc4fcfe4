package kernel

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// splicer is the carrier between two legs of this package. It moves a stream through a pipe, so that the bytes never
// leave the kernel. It copies small pieces, because that takes fewer system calls; everything while there is no pipe
// for it; and what begins with an urgent byte, at which a splice would not go on. That byte is sent as an ordinary one.
//
//	source socket ──spliceIn──▶ pipe ──spliceOut──▶ destination socket
//	             └──inlet──▶ copy (memory) ──outlet──┘
//	                pipe ──drainPipe──▶ copy, if the destination takes nothing of the little that is in the pipe
//
// Bytes are in the pipe or in the copy, never in both. One goroutine at a time uses a splicer.
type splicer struct {
	dst, src *Conn
	buffers  *datapath.Buffers // of copy
	pipes    *pipes
	pipe     *pipe // nil while nothing is stored in one
	copy     datapath.Carrier

	inBulk       bool  // the last piece was a large one
	mustCopy     bool  // what comes next can only be copied
	dstStalled   bool  // the destination takes nothing of the little that is in the pipe
	drainingPipe bool  // copy is filled from the pipe
	markErr      error // of a splice at an urgent mark; it is returned after the bytes that follow the mark

	// Of the call underway.
	limit, n int
	err      error
}

// CarryFrom implements datapath.Carriage. Between two legs of this package bytes are spliced.
func (c *Conn) CarryFrom(src net.Conn, buffers *datapath.Buffers) datapath.Carrier {
	from, ok := src.(*Conn)
	if !ok {
		return nil
	}
	s, _ := freeSplicers.Get().(*splicer)
	if s == nil || s.buffers != buffers {
		s = &splicer{buffers: buffers}
		s.copy = datapath.NewCopy((*outlet)(s), (*inlet)(s), buffers)
	}
	s.dst, s.src, s.pipes = c, from, c.dp.pipes
	return s
}

// freeSplicers has the memory of splicers that were released.
var freeSplicers sync.Pool

// Fill implements datapath.Carrier. Bytes that the destination has no room for stay in the source's socket, so that a
// thousand slow flows take up no pipes.
func (s *splicer) Fill(limit int) (n int, err error) {
	if s.Buffered() > 0 || limit <= 0 {
		return 0, nil
	}
	if s.inBulk {
		limit, err = s.dst.limitToRoom(limit)
	} else {
		err = s.dst.waitWritable()
	}
	if errors.Is(err, datapath.ErrWait) { // another error is for Drain to return
		return 0, err
	}
	limit = s.dst.writeEnd(0, limit)
	s.mustCopy = !s.inBulk
	if s.inBulk {
		n, err = s.fillPipe(limit)
	}
	if s.mustCopy { // fillPipe may have found that out
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

// fillPipe takes bytes into a pipe, or sets mustCopy.
func (s *splicer) fillPipe(limit int) (int, error) {
	s.limit, s.n, s.err = limit, 0, nil
	poll := s.src.raw.Read(s.spliceIn)
	if s.mustCopy && poll == nil {
		return 0, nil
	}
	n, err := s.src.adaptReceiveWindow(s.src.readResult(s.n, poll, s.err, "splice"))
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
	if s.n == 0 && atMark(fd) { // a splice would return nothing for ever
		if s.err != nil && !errors.Is(s.err, unix.EAGAIN) {
			s.markErr = s.err // the kernel does not return it again
		}
		s.returnPipe()
		s.mustCopy = true
		return true
	}
	if errors.Is(s.err, unix.EAGAIN) { // the pipe has room, so the socket has no bytes
		s.returnPipe()
		return false
	}
	return true
}

// Drain implements datapath.Carrier.
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
	s.dst.countAccepted(s.n)
	s.dst.endWrite()
	if s.pipe.n -= s.n; s.pipe.n == 0 {
		s.returnPipe()
	}
	if s.dstStalled && s.drainPipe() {
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
	// The pipe has bytes, so the socket is full, perhaps for long.
	s.dstStalled = s.pipe.n <= datapath.SmallBuffer
	return s.dstStalled
}

// drainPipe moves the bytes of the pipe into memory, and returns the pipe. They fit into a small buffer.
func (s *splicer) drainPipe() bool {
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

// returnPipe gives the pipe back.
func (s *splicer) returnPipe() {
	s.pipes.returnPipe(s.pipe)
	s.pipe = nil
}

// Buffered implements datapath.Carrier.
func (s *splicer) Buffered() int {
	if s.pipe != nil {
		return s.pipe.n
	}
	return s.copy.Buffered()
}

// TakeStored implements datapath.Unloader. It refuses while markErr is set, because another process would not learn of
// that error.
func (s *splicer) TakeStored() ([]byte, bool) {
	switch {
	case s.markErr != nil:
		return nil, false
	case s.pipe == nil:
		return s.copy.(datapath.Unloader).TakeStored()
	}
	stored := make([]byte, s.pipe.n)
	for n := 0; n < len(stored); {
		more, err := unix.Read(s.pipe.r, stored[n:])
		if err != nil && !errors.Is(err, unix.EINTR) || err == nil && more == 0 {
			panic(fmt.Sprintf("kernel: a pipe has lost bytes: %v", err)) // only a bug can cause it
		}
		n += max(0, more)
	}
	s.pipe.n = 0
	s.returnPipe()
	return stored, true
}

// Splicing implements datapath.Carrier.
func (s *splicer) Splicing() bool { return s.pipe != nil }

// Release implements datapath.Carrier.
func (s *splicer) Release() {
	if s.pipe != nil {
		s.returnPipe()
	}
	s.copy.Release()
	*s = splicer{copy: s.copy, buffers: s.buffers}
	freeSplicers.Put(s)
}

// spliceOnce moves up to limit bytes between a socket and a pipe without waiting. It begins again after a signal.
func spliceOnce(from, to, limit int) (int, error) {
	for {
		n, err := unix.Splice(from, nil, to, nil, limit, unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
		if !errors.Is(err, unix.EINTR) {
			return int(max(0, n)), err
		}
	}
}

// inlet is where a splicer's copy reads.
type inlet splicer

// Read implements io.Reader. The copy calls ReadReady instead.
func (i *inlet) Read(b []byte) (int, error) { return i.src.Read(b) }

// ReadReady implements datapath.ReadyReader.
func (i *inlet) ReadReady(room datapath.Room) (n int, err error) {
	if i.drainingPipe {
		return unix.Read(i.pipe.r, room.Take()[:i.pipe.n])
	}
	return i.src.ReadReady(room)
}

// outlet is where a splicer's copy writes.
type outlet splicer

// Write implements io.Writer.
func (o *outlet) Write(b []byte) (int, error) { return o.dst.Write(b) }

const (
	defaultPipes = 128 // 256 descriptors at most
	maxIdlePipes = 32  // of each size, kept for the next user
	largePipe    = 1 << 20
	smallPipe    = 64 << 10 // the kernel's default; a quarter of large costs bulk a third more processor time per byte
)

// pipes lends kernel pipes to splices, a bounded number at a time. Once a user's pipes take more than
// fs.pipe-user-pages-soft, the kernel makes each further one of two pages (pipe(7)). With these a slow flow needs
// three splices instead of one. So large pipes take at most half of that, and pieces that fit into small ones have
// those.
type pipes struct {
	mu        sync.Mutex
	maxLent   int // of both sizes
	maxLarge  int
	lent      int     // of both sizes
	largeMade int     // large ones, lent or idle
	idleSmall []*pipe // of smallPipe bytes
	idleLarge []*pipe // of largePipe bytes
	closed    bool
}

// pipe stores bytes of one splicer.
type pipe struct {
	r, w  int // descriptors
	large bool
	n     int // bytes in it
}

// newPipes returns pipes, at most bound of them lent at a time; 0: defaultPipes.
func newPipes(bound int) *pipes {
	if bound <= 0 {
		bound = defaultPipes
	}
	p, soft := &pipes{maxLent: bound, maxLarge: bound}, 0 // pages; 0: there is no such limit
	if scanFile("/proc/sys/fs/pipe-user-pages-soft", &soft) == nil && soft > 0 {
		p.maxLarge = min(bound, soft/(2*largePipe/os.Getpagesize())) // in this order nothing overflows
	}
	return p
}

// idleList returns the list of idle pipes of a size.
func (p *pipes) idleList(large bool) *[]*pipe {
	if large {
		return &p.idleLarge
	}
	return &p.idleSmall
}

// takePipe returns an empty pipe for a piece of that many bytes; nil: all are lent, or the kernel gives none.
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
		_, _ = unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, largePipe) // the default size serves as well
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
	if pp.n > 0 || p.closed || len(*idle) >= maxIdlePipes {
		pp.closePipe()
		if pp.large {
			p.largeMade--
		}
		return
	}
	*idle = append(*idle, pp)
}

// closeAll closes idle pipes. Those that are lent are closed when they come back.
func (p *pipes) closeAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, pp := range slices.Concat(p.idleSmall, p.idleLarge) {
		pp.closePipe()
	}
	p.idleSmall, p.idleLarge = nil, nil
}

// closePipe closes both ends.
func (pp *pipe) closePipe() {
	_ = unix.Close(pp.r)
	_ = unix.Close(pp.w)
}
