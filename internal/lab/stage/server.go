package stage

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
)

const (
	// piece is what the ends read and write at once: hundreds of them fit into memory.
	piece = 64 << 10
	// portion is what a slow source produces at once: about a segment.
	portion = 1448
	// maxQuestion bounds what a server reads.
	maxQuestion = 512
)

// question is what a client asks of a server.
type question struct {
	actor, stream int
	size          cc.Bytes // 0: without end
	upload        bool     // the client sends
}

// text is the question as it travels. It looks like HTTP/1, for rules by server name.
func (q question) text() []byte {
	method := http.MethodGet
	if q.upload {
		method = http.MethodPut
	}
	return fmt.Appendf([]byte(method), " /%d/%d/%d HTTP/1.1\r\nHost: stage.test\r\n\r\n", q.actor, q.stream, q.size)
}

// readQuestion reads one; io.EOF: there is none any more.
func readQuestion(in *bufio.Reader) (q question, err error) {
	asked, err := http.ReadRequest(in)
	if err != nil {
		return q, err
	}
	q.upload = asked.Method == http.MethodPut
	if _, err := fmt.Sscanf(asked.RequestURI, "/%d/%d/%d", &q.actor, &q.stream, &q.size); err != nil {
		return q, fmt.Errorf("read question %q: %w", asked.RequestURI, err)
	}
	return q, nil
}

// answer returns what serves a client until it is gone. What it does not understand it hangs
// up on, which the client's record then tells.
func (r *run) answer(ctx context.Context) func(net.Conn) {
	return func(conn net.Conn) {
		in := bufio.NewReaderSize(conn, maxQuestion)
		buf := make([]byte, piece)
		for {
			q, err := readQuestion(in)
			if err != nil || q.actor < 0 || q.actor >= len(r.actors) || q.size < 0 {
				return
			}
			if q.upload {
				_ = r.actors[q.actor].take(in, q, buf) // the client's record tells how it ended
				return
			}
			if err := r.actors[q.actor].holdBack(conn); err != nil {
				r.fail(err)
				return
			}
			if err := r.actors[q.actor].pour(ctx, conn, q, buf); err != nil {
				return
			}
		}
	}
}

// holdBack gives the server's socket the send buffer that the actor is to have.
func (a *actor) holdBack(conn net.Conn) error {
	if a.SendBuffer == 0 {
		return nil
	}
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		return err
	}
	var set error
	err = raw.Control(func(fd uintptr) { set = setSendBuffer(int(fd), int(a.SendBuffer)) })
	if err = errors.Join(err, set); err != nil {
		return fmt.Errorf("set the send buffer of the server of %q to %d bytes: %w", a.Name, a.SendBuffer, err)
	}
	return nil
}

// setSendBuffer sets SO_SNDBUF, beyond net.core.wmem_max where that is permitted: root of a
// user namespace may not.
func setSendBuffer(fd, size int) error {
	err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, size)
	if !errors.Is(err, unix.EPERM) {
		return err
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, size); err != nil {
		return err
	}
	is, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
	if err == nil && is < 2*size { // the kernel doubles the size
		err = fmt.Errorf("more than net.core.wmem_max takes root: %w", unix.EPERM)
	}
	return err
}

// pour sends what was asked for, a bulk download at the pace at which its
// application produces it, and returns when there will be no more.
func (a *actor) pour(ctx context.Context, conn io.Writer, q question, buf []byte) error {
	p := patternOf(q.actor, q.stream)
	for sent := cc.Bytes(0); q.size == 0 || sent < q.size; {
		n := cc.Bytes(len(buf))
		if q.size > 0 {
			n = min(n, q.size-sent)
		}
		if a.Kind == Bulk {
			made, err := a.produced(ctx, sent)
			if err != nil || made == 0 {
				return err
			}
			n = min(n, made)
		}
		p.fill(buf[:n], uint64(sent))
		if _, err := conn.Write(buf[:n]); err != nil {
			return err
		}
		sent += n
	}
	return nil
}

// take reads what the other end sends, and looks at each byte.
func (a *actor) take(in io.Reader, q question, buf []byte) error {
	p := patternOf(a.number, q.stream)
	for got := cc.Bytes(0); q.size == 0 || got < q.size; {
		if q.size > 0 {
			buf = buf[:min(cc.Bytes(len(buf)), q.size-got)]
		}
		n, err := in.Read(buf)
		a.read(n)
		if !p.holds(buf[:n], uint64(got)) {
			a.record.Corrupt = fmt.Sprintf("connection %d, bytes %d to %d are not what was sent", q.stream+1, got,
				got+cc.Bytes(n))
			return errors.New(a.record.Corrupt)
		}
		got += cc.Bytes(n)
		if err != nil && (q.size == 0 || got < q.size) {
			return fmt.Errorf("connection %d ended after %d bytes: %w", q.stream+1, got, err)
		}
	}
	return nil
}

// produced waits until the application has more than what was sent, and returns
// how much more; 0: it is over.
func (a *actor) produced(ctx context.Context, sent cc.Bytes) (cc.Bytes, error) {
	for {
		now := a.run.now()
		resumes, more := nextTurn(a.turns, now)
		if a.Rate == 0 && more && resumes == now {
			return piece, nil
		}
		wake := resumes
		if a.Rate > 0 {
			// The first portion is there at once, or the clock would never start.
			left := portion + a.Rate.BytesIn(ranFor(a.turns, now)) - sent
			if left >= portion || left > 0 && (!more || resumes > now) {
				return left, nil
			}
			wake = max(wake, now+a.Rate.TimeFor(portion-left))
		}
		if !more {
			return 0, nil
		}
		if err := a.run.wait(ctx, wake); err != nil {
			return 0, err
		}
	}
}
