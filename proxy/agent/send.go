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

// backlog is what is to be sent, in order; where room is scarce, of each flow a report and a Create at most.
type backlog struct {
	messages [][]byte
	gone     int           // messages that have left
	waits    map[about]int // which message it is, by how many came before; nil: room is not known to be scarce
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

// scarce notes that room is scarce.
func (q *backlog) scarce() {
	if q.waits != nil {
		return
	}
	q.waits = map[about]int{}
	for i, b := range q.messages {
		q.waits[aboutOf(b)] = q.gone + i
	}
}

// push takes a copy of a message; false: there is no room, or room is scarce and a report of the flow
// waits already. A report that closes its flow takes the place of one that waits.
func (q *backlog) push(now cc.Time, b []byte) bool {
	if q.waits != nil {
		what := aboutOf(b)
		if at, waits := q.waits[what]; waits {
			if what.kind == ccp.KindMeasure && len(b) > closeLen {
				return false
			}
			q.messages[at-q.gone] = slices.Clone(b)
			return true
		}
		q.waits[what] = q.gone + len(q.messages)
	}
	switch {
	case len(q.messages) >= mostWaiting:
		return false
	case q.empty():
		q.moved = now
	}
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

// Hold has what flows send wait until Release, so that what a tick brings about leaves with one
// system call, and while no group is locked.
func (l *Link) Hold() { l.held.Add(1) }

// Release ends a Hold.
func (l *Link) Release() {
	l.held.Add(-1)
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.leave() // watch sees to it
}

// transmit is the agent's ccp.Transmit. What finds no room waits for it, so that the reports of
// many flows at once reach an agent whose socket has room for ten (net.unix.max_dgram_qlen).
func (l *Link) transmit(b []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.open {
		return unix.ENOTCONN
	}
	now := l.cfg.Clock()
	if !l.waiting.push(now, b) {
		return ccp.ErrBusy
	}
	l.asked.sent(now, b)
	if !l.looking {
		l.looking = true
		signal(l.kick)
	}
	if l.held.Load() > 0 {
		return nil
	}
	return l.leave()
}

func signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// leave sends what there is room for, and has drain send the rest. l.mu is held.
func (l *Link) leave() error {
	done, err := l.flush()
	if !done || l.fd < 0 && !l.waiting.empty() {
		signal(l.room)
	}
	return err
}

// flush sends what waits and finds room. done: no room would help what still waits. An error
// ends the connection. l.mu is held.
func (l *Link) flush() (done bool, err error) {
	for now := l.cfg.Clock(); l.fd >= 0 && !l.waiting.empty(); {
		n, err := l.post(now, l.waiting.messages)
		for range n {
			l.waiting.pop(now)
		}
		switch {
		case errors.Is(err, ccp.ErrBusy):
			l.waiting.scarce()
			return false, nil
		case err != nil:
			l.open, l.fd = false, -1
			signal(l.kick)
			return true, err
		}
	}
	if l.fd >= 0 {
		l.waiting.waits = nil
	}
	return true, nil
}

// post sends messages to an agent on this machine, and returns how many: not all at once. Beside that it
// costs no system call but, for the first messages of a length, one to learn how much memory they take.
func (l *Link) post(now cc.Time, messages [][]byte) (n int, err error) {
	messages = messages[:min(len(messages), together)]
	known := 0
	for known < len(messages) && !l.sent.unknown(len(messages[known])) {
		known++
	}
	learn, before := known == 0, 0
	if learn {
		before = queued(l.fd)
	}
	messages = messages[:max(known, 1)]
	n, err = l.out.write(l.fd, messages)
	for _, b := range messages[:n] {
		if learn {
			l.sent.learn(len(b), queued(l.fd)-before)
		}
		l.sent.add(now, len(b))
	}
	return n, err
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
			l.mu.Lock()
			defer l.mu.Unlock()
			done, refused = l.flush()
			return done
		})
		err = errors.Join(err, refused)
	}
	return fmt.Errorf("nobody reads what is sent: %w", err)
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
