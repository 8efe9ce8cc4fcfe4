package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
)

// mostWaiting bounds what waits for room at the agent, in messages.
const mostWaiting = 1 << 14

// backlog is what waits for room at the agent, in order: of each flow a report and a Create at most.
type backlog struct {
	messages [][]byte
	gone     int           // messages that have left
	waits    map[about]int // which message it is, by how many came before
	moved    cc.Time       // when the last one left, or the first came
}

// about is what a message tells of which flow.
type about struct {
	kind ccp.Kind
	flow uint32
}

func aboutOf(b []byte) about {
	m, _, _ := ccp.Next(b) // we have made it
	return about{m.Kind, m.Flow}
}

func (q *backlog) empty() bool { return len(q.messages) == 0 }

// push takes a copy of a message; false: there is no room, or a report of the flow waits already.
// A report that closes its flow takes the place of one that waits.
func (q *backlog) push(now cc.Time, b []byte) bool {
	what := aboutOf(b)
	if at, waits := q.waits[what]; waits {
		if what.kind == ccp.KindMeasure && len(b) > closeLen {
			return false
		}
		q.messages[at-q.gone] = slices.Clone(b)
		return true
	}
	switch {
	case len(q.messages) >= mostWaiting:
		return false
	case q.empty():
		q.moved = now
	}
	if q.waits == nil {
		q.waits = map[about]int{}
	}
	q.waits[what] = q.gone + len(q.messages)
	q.messages = append(q.messages, slices.Clone(b))
	return true
}

// pop takes the first message off.
func (q *backlog) pop(now cc.Time) []byte {
	b := q.messages[0]
	delete(q.waits, aboutOf(b))
	q.messages[0] = nil
	q.messages, q.gone, q.moved = q.messages[1:], q.gone+1, now
	return b
}

// transmit is the agent's ccp.Transmit. What finds no room waits for it, so that the reports of
// many flows at once reach an agent whose socket has room for ten (net.unix.max_dgram_qlen).
func (l *Link) transmit(b []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.open {
		return unix.ENOTCONN
	}
	now, err := l.cfg.Clock(), ccp.ErrBusy
	if l.fd >= 0 && l.waiting.empty() {
		err = l.post(now, b)
	}
	if errors.Is(err, ccp.ErrBusy) && l.waiting.push(now, b) {
		err = nil
		signal(l.room)
	}
	if err == nil {
		l.asked.sent(now, b)
	}
	if !l.looking || err != nil { // after an error as well: the agent has gone
		l.looking = true
		signal(l.kick)
	}
	return err
}

func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// post sends a message to an agent on this machine. Beside that it costs no system call but, for
// the first messages of a length, one to learn how much memory they take.
func (l *Link) post(now cc.Time, b []byte) error {
	learn := l.sent.unknown(len(b))
	before := 0
	if learn {
		before = queued(l.fd)
	}
	switch err := unix.Sendto(l.fd, b, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, nil); {
	case errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EINTR):
		return ccp.ErrBusy
	case err != nil:
		return err
	}
	if learn {
		l.sent.learn(len(b), queued(l.fd)-before)
	}
	l.sent.add(now, len(b))
	return nil
}

// queued is how much memory takes what we have sent and nobody has read (unix(7), SIOCOUTQ).
func queued(fd int) int {
	n, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
	if err != nil {
		return 0
	}
	return n
}

// drain sends what waits as soon as the agent makes room.
func (l *Link) drain(ctx context.Context, file *os.File) error {
	raw, err := file.SyscallConn()
	for err == nil {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-l.room:
		}
		var refused error
		err = raw.Write(func(uintptr) (done bool) {
			done, refused = l.flush()
			return done
		})
		err = errors.Join(err, refused)
	}
	return fmt.Errorf("nobody reads what is sent: %w", err)
}

// flush sends what waits and finds room. done: no room would help what still waits.
func (l *Link) flush() (done bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for now := l.cfg.Clock(); l.fd >= 0 && !l.waiting.empty(); l.waiting.pop(now) {
		if err := l.post(now, l.waiting.messages[0]); errors.Is(err, ccp.ErrBusy) {
			return false, nil
		} else if err != nil {
			return true, err
		}
	}
	return true, nil
}

// unread is since when a message has waited for the agent to read it; 0: none does.
func (l *Link) unread() cc.Time {
	switch {
	case l.fd < 0:
		return 0
	case l.waiting.empty():
		return l.sent.oldest(queued(l.fd))
	}
	if since := l.sent.oldest(queued(l.fd)); since != 0 {
		return since
	}
	return l.waiting.moved // its queue is full of what others have sent
}
