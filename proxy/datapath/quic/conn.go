package quic

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/quic-go/quic-go/qlogwriter"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// transportAlgorithm is quic-go's own congestion control; there is no other.
const transportAlgorithm = "reno"

// Stream is what a Conn is made from: *http3.Stream, or a client's *http3.RequestStream.
type Stream interface {
	io.ReadWriteCloser
	StreamID() quic.StreamID
	Context() context.Context
	CancelRead(quic.StreamErrorCode)
	CancelWrite(quic.StreamErrorCode)
	SetWriteDeadline(time.Time) error
	QlogTrace() qlogwriter.Trace
}

// Conn is a stream as a leg. A FIN is the end of one direction; cancelling the stream stands for a RST (RFC 9114
// §4.4).
//
// Who touches what:
//
//	fields                     guard       touched by
//	stream, signals, closed    mu          all callers; signals' own fields are guarded by Trace.mu
//	frameTorn, writes          writing     Write, CloseWrite, Close
//	ahead, pendingRead         none        the one goroutine that reads
//	aborted                    atomic      all callers
//	local, remote, refuse      none        never change
//
// A read ahead has a goroutine of its own until the stream returns: see readAhead.
type Conn struct {
	local, remote net.Addr
	refuse        func()          // called if the leg is closed before Admit; nil: nothing is
	aborted       atomic.Bool     // by the peer, or by a timeout
	writing       sync.Mutex      // one write at a time, and none beside the end of the stream
	frameTorn     bool            // a write ended within an HTTP/3 frame
	ahead         []byte          // read from the stream and not returned by Read yet
	pendingRead   chan readResult // the result of a read ahead that is underway; nil: there is none
	readDeadline  *datapath.Deadline

	mu      sync.Mutex
	stream  Stream // nil before it is admitted
	signals *signals
	closed  bool
}

var (
	_ datapath.Conn = (*Conn)(nil)
	_ Stream        = (*http3.Stream)(nil)
	_ Stream        = (*http3.RequestStream)(nil)
)

// NewConn returns the leg of a request that has not been answered yet. Admit gives it its stream.
// If it is closed before that, it calls refuse, unless that is nil.
func NewConn(local, remote net.Addr, refuse func()) *Conn {
	return &Conn{local: local, remote: remote, refuse: refuse, readDeadline: datapath.NewDeadline()}
}

// errNotAdmitted is what calls before Admit return.
var errNotAdmitted = errors.New("the request has not been answered yet")

// Admit gives the leg its stream. The quic.Config.Tracer of its connection is one that Tracer
// returned.
func (c *Conn) Admit(s Stream) error {
	t, ok := s.QlogTrace().(*Trace)
	if !ok {
		return errors.New("quic: admit: nothing traces this connection: set Config.Tracer to Tracer")
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.stream != nil {
		cancelStream(s, http3.ErrCodeConnectError)
		return fmt.Errorf("quic: admit: %w", net.ErrClosed)
	}
	c.stream, c.signals = s, t.signalsOf(s.StreamID())
	return nil
}

// liveStream returns the stream, or why there is none.
func (c *Conn) liveStream() (Stream, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return nil, net.ErrClosed
	case c.stream == nil:
		return nil, errNotAdmitted
	}
	return c.stream, nil
}

// Read implements net.Conn. While a read ahead is underway, or there is a deadline, it waits for
// the read ahead; else it reads from the stream without another copy.
func (c *Conn) Read(b []byte) (int, error) {
	s, err := c.liveStream()
	if err != nil {
		return 0, c.opError("read", err)
	}
	if len(c.ahead) == 0 && (c.pendingRead != nil || c.readDeadline.Pending()) {
		if err := c.readAhead(s, len(b)); err != nil {
			return 0, err
		}
	}
	if len(c.ahead) > 0 {
		n := copy(b, c.ahead)
		c.ahead = c.ahead[n:]
		return n, nil
	}
	n, err := s.Read(b)
	if n > 0 {
		return n, nil // the next Read returns the error, as a socket's would
	}
	return 0, c.resultError("read", err)
}

// readResult is the result of a read ahead.
type readResult struct {
	b   []byte
	err error
}

// readAhead reads up to n bytes into ahead. If the deadline comes first, the read continues on its
// goroutine. It does not set a deadline on the stream, since HTTP/3 forgets a part of a frame's
// header that it has read when a read fails.
func (c *Conn) readAhead(s Stream, n int) error {
	if c.readDeadline.HasCome() {
		return c.opError("read", os.ErrDeadlineExceeded)
	}
	if c.pendingRead == nil {
		done := make(chan readResult, 1)
		c.pendingRead = done
		go func() {
			b := make([]byte, n)
			n, err := s.Read(b)
			done <- readResult{b[:n], err}
		}()
	}
	select {
	case f := <-c.pendingRead:
		c.pendingRead = nil
		c.ahead = append(c.ahead, f.b...)
		if len(f.b) > 0 {
			return nil // the next read returns the error
		}
		return c.resultError("read", f.err)
	case <-c.readDeadline.Wait():
		return c.opError("read", os.ErrDeadlineExceeded)
	}
}

// Write implements net.Conn. It returns once all but at most one packet's bytes have left.
func (c *Conn) Write(b []byte) (int, error) {
	s, err := c.liveStream()
	if err != nil {
		return 0, c.opError("write", err)
	}
	c.writing.Lock()
	defer c.writing.Unlock()
	n, err := s.Write(b)
	c.frameTorn = err != nil && n < len(b)
	return n, c.resultError("write", err)
}

// CloseWrite implements datapath.Conn: the FIN follows the bytes written before.
func (c *Conn) CloseWrite() error {
	s, err := c.liveStream()
	if err != nil {
		return c.opError("close", err)
	}
	c.writing.Lock()
	defer c.writing.Unlock()
	c.signals.noteFIN()
	return c.resultError("close", s.Close())
}

// Close implements net.Conn. Bytes written before still arrive. A stream that ends within a frame
// cannot end in order, and is cancelled.
func (c *Conn) Close() error {
	return c.shutStream(func(s Stream) {
		_ = s.SetWriteDeadline(datapath.Expired) // a write may wait
		c.writing.Lock()
		defer c.writing.Unlock()
		if c.frameTorn {
			cancelStream(s, http3.ErrCodeRequestCanceled)
			return
		}
		_ = s.Close()
		s.CancelRead(quic.StreamErrorCode(http3.ErrCodeNoError))
	})
}

// Reset implements datapath.Conn. It cancels both directions with H3_CONNECT_ERROR (RFC 9114
// §4.4).
func (c *Conn) Reset() error {
	return c.shutStream(func(s Stream) { cancelStream(s, http3.ErrCodeConnectError) })
}

// cancelStream aborts both directions.
func cancelStream(s Stream, code http3.ErrCode) {
	s.CancelWrite(quic.StreamErrorCode(code))
	s.CancelRead(quic.StreamErrorCode(code))
}

// shutStream closes the leg once; how ends the stream.
func (c *Conn) shutStream(how func(Stream)) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return c.opError("close", net.ErrClosed)
	}
	c.closed = true
	s := c.stream
	c.mu.Unlock()
	switch {
	case s != nil:
		c.signals.stopReports()
		how(s)
	case c.refuse != nil:
		c.refuse()
	}
	return nil
}

// Enforce implements datapath.Conn: quic-go's congestion control cannot be set.
func (c *Conn) Enforce(datapath.Hold, int) datapath.Hold { return 0 }

// Observe implements datapath.Conn. Reports come from the trace of the connection, in its
// goroutine.
func (c *Conn) Observe(report func(flow.Report)) {
	if _, err := c.liveStream(); err == nil {
		c.signals.setObserver(report)
	}
}

// Apply implements datapath.Conn: the relay keeps the limit.
func (c *Conn) Apply(flow.Limit) {}

// Info implements datapath.Conn. Window and round trips are the connection's, which its streams
// have in common.
func (c *Conn) Info() datapath.Info {
	info := datapath.Info{Tier: "quic", Envelope: transportAlgorithm}
	if _, err := c.liveStream(); err != nil {
		return info
	}
	s, t := c.signals, c.signals.trace
	t.mu.Lock()
	defer t.mu.Unlock()
	info.Cwnd, info.SRTT, info.MinRTT = t.cwnd, t.srtt, t.minRTT
	info.Delivered = cc.Bytes(s.layout.payloadBefore(s.una))
	info.Unsent, info.Retransmitted = cc.Bytes(s.layout.end-s.layout.payloadBefore(s.next)), s.retransmitted
	return info
}

// Undelivered implements datapath.Conn.
func (c *Conn) Undelivered() (cc.Bytes, error) {
	if _, err := c.liveStream(); err != nil {
		return 0, c.opError("read", err)
	}
	if c.Aborted() {
		return 0, nil // nothing will be delivered any more
	}
	return c.signals.undeliveredBytes(), nil
}

// InProcess implements datapath.Conn.
func (c *Conn) InProcess() bool { return true }

// Aborted implements datapath.Conn: the connection has ended, or the peer has cancelled the
// stream.
func (c *Conn) Aborted() bool {
	s, err := c.liveStream()
	if err != nil {
		return false
	}
	t := c.signals.trace
	t.mu.Lock()
	gone := t.closed
	t.mu.Unlock()
	if gone || c.aborted.Load() {
		return true
	}
	cause := context.Cause(s.Context()) // of the sending direction's end
	return cause != nil && !errors.Is(cause, quic.ErrStreamClosed)
}

// resultError returns the error that a caller gets for err, as a kernel socket would, and notes an
// abort.
func (c *Conn) resultError(op string, err error) error {
	aborted, err := kernelError(err)
	c.mu.Lock()
	closed := c.closed
	c.mu.Unlock()
	switch {
	case err == nil || err == io.EOF: //nolint:errorlint // compared as io.Reader's callers do
	case closed:
		err = net.ErrClosed
	case aborted:
		c.aborted.Store(true)
	}
	return c.opError(op, err)
}

// LocalAddr implements net.Conn.
func (c *Conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr implements net.Conn: the client of the QUIC connection.
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error {
	_, err := c.liveStream()
	if err == nil {
		c.readDeadline.Set(t)
	}
	return c.opError("set", err)
}

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	s, err := c.liveStream()
	if err == nil {
		err = s.SetWriteDeadline(t)
	}
	return c.opError("set", err)
}

// opError is datapath.OpError of the leg.
func (c *Conn) opError(op string, err error) error { return datapath.OpError(c, op, "quic", err) }

// kernelError turns an error of quic-go into the one that a kernel socket would return, so that
// readers of errors need not know which transport is below. aborted: the peer, or a timeout, has
// ended the stream.
func kernelError(err error) (aborted bool, _ error) {
	var stream *quic.StreamError
	var idle *quic.IdleTimeoutError
	var timeout net.Error
	switch {
	case err == nil, err == io.EOF: //nolint:errorlint // as io.Reader's callers do
		return false, err
	case errors.As(err, &stream) && !stream.Remote:
		return false, net.ErrClosed
	case errors.As(err, &idle):
		return true, syscall.ETIMEDOUT
	case errors.As(err, &timeout) && timeout.Timeout():
		return false, os.ErrDeadlineExceeded
	case errors.Is(err, quic.ErrStreamClosed):
		return false, syscall.EPIPE
	}
	return true, syscall.ECONNRESET // by the peer, or for breaking the protocol
}
