package agent

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
)

// mostWaiting bounds what waits for room at the agent, in messages.
const mostWaiting = 1 << 14

// backlog is what is to be sent, in order. While the agent's socket is full, which is called scarce room, it
// has at most one report and one Create of each flow.
type backlog struct {
	messages []message     // those that were dropped have no bytes; the first never is one
	gone     int           // messages that have left
	full     bool          // room is scarce
	waits    map[about]int // how many messages came before it, ever: of each Create, and of all where room is scarce
}

// message is one to the agent, and when a flow sent it.
type message struct {
	bytes []byte
	at    cc.Time
}

// about is the kind of a message, and the flow that it is about.
type about struct {
	kind ccp.Kind
	flow uint32
}

func aboutOf(b []byte) about {
	m, _, _ := ccp.Next(b) // never malformed: this process made it
	return about{m.Kind, m.Flow}
}

func (q *backlog) empty() bool { return len(q.messages) == 0 }

// scarce notes that room is scarce.
func (q *backlog) scarce() {
	if q.full {
		return
	}
	q.full = true
	for i, m := range q.messages {
		if m.bytes != nil {
			q.number(i, aboutOf(m.bytes))
		}
	}
}

// number enters the i-th message into waits.
func (q *backlog) number(i int, what about) {
	if !q.full && what.kind != ccp.KindCreate {
		return
	}
	if q.waits == nil {
		q.waits = map[about]int{}
	}
	q.waits[what] = q.gone + i
}

// push takes a copy of a message; false: there is no room, or room is scarce and a report of the flow
// waits already. A report that closes its flow takes the place of one that waits.
func (q *backlog) push(now cc.Time, b []byte) bool {
	what := aboutOf(b)
	if at, waits := q.waits[what]; waits {
		if what.kind == ccp.KindMeasure && !closes(b) {
			return false
		}
		q.messages[at-q.gone].bytes = slices.Clone(b)
		return true
	}
	if len(q.messages) >= mostWaiting {
		return false
	}
	q.messages = append(q.messages, message{slices.Clone(b), now})
	q.number(len(q.messages)-1, what)
	return true
}

// next are the first messages, up to n.
func (q *backlog) next(n int) []message {
	first := q.messages[:min(n, len(q.messages))]
	if i := slices.IndexFunc(first, func(m message) bool { return m.bytes == nil }); i >= 0 {
		first = first[:i]
	}
	return first
}

// pop takes the first message off.
func (q *backlog) pop() message {
	m := q.messages[0]
	if what := aboutOf(m.bytes); q.waits[what] == q.gone {
		delete(q.waits, what)
	}
	q.messages[0].bytes = nil
	q.skip()
	return m
}

// drop removes the Create of a flow, if one waits.
func (q *backlog) drop(flow uint32) {
	what := about{ccp.KindCreate, flow}
	if at, waits := q.waits[what]; waits {
		delete(q.waits, what)
		q.messages[at-q.gone].bytes = nil
		q.skip()
	}
}

// skip leaves the first message that has bytes in front.
func (q *backlog) skip() {
	for !q.empty() && q.messages[0].bytes == nil {
		q.messages, q.gone = q.messages[1:], q.gone+1
	}
}

// Hold keeps back what flows send until Release, so that the messages of a tick leave with one
// system call, while no group is locked. It first puts into force what the agent has sent by now.
func (l *Link) Hold() {
	now := l.cfg.Clock()
	l.held.Add(1)
	l.takeNow()
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.looked) >= looks {
		l.look(now)
	}
}

// Release ends a Hold.
func (l *Link) Release() {
	l.held.Add(-1)
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.leave() // watch ends the connection after an error
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
	if what := aboutOf(b); what.kind == ccp.KindCreate && l.sent.hears(now, what.flow, queued(l.fd)) {
		return nil // the agent would begin anew
	} else if closes(b) {
		l.waiting.drop(what.flow) // it may be behind the report that b replaces
	}
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

// leave sends what there is room for, and has attend send the rest. l.mu is held.
func (l *Link) leave() error {
	scarce := l.waiting.full
	err := l.flush()
	switch {
	case l.fd < 0 && !l.waiting.empty():
		signal(l.room)
	case !scarce && l.waiting.full:
		l.await()
	}
	return err
}

// flush sends what waits and finds room. An error ends the connection. l.mu is held.
func (l *Link) flush() error {
	for now := l.cfg.Clock(); l.fd >= 0 && !l.waiting.empty(); {
		n, err := l.post(l.waiting.next(together))
		if n > 0 && l.waiting.full {
			l.stirs(now) // there was no room before
		}
		for range n {
			l.waiting.pop()
		}
		switch {
		case errors.Is(err, ccp.ErrBusy):
			l.waiting.scarce()
			return nil
		case err != nil:
			l.fail(fmt.Errorf("nobody reads what is sent: %w", err))
			return err
		}
	}
	if l.fd >= 0 {
		l.waiting.full = false
	}
	return nil
}

// post sends some of the messages, which are up to together, to an agent on this machine with one system call, and
// returns how many. For the first messages of a length it makes others, to learn how much memory they take.
func (l *Link) post(messages []message) (n int, err error) {
	known := 0
	for known < len(messages) && !l.sent.unknown(len(messages[known].bytes)) {
		known++
	}
	learn, before := known == 0, 0
	if learn {
		before = queued(l.fd)
	}
	messages = messages[:max(known, 1)]
	n, err = l.out.write(l.fd, messages)
	for _, m := range messages[:n] {
		if learn {
			l.sent.learn(len(m.bytes), queued(l.fd)-before)
		}
		l.sent.add(m)
	}
	return n, err
}

// queued is the memory, in bytes, of what we have sent and nobody has read (unix(7), SIOCOUTQ).
func queued(fd int) int {
	n, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
	if err != nil {
		return 0
	}
	return n
}

// stirs notes that the agent reads or sends: then the length of its queue does not matter. l.mu is held.
func (l *Link) stirs(now cc.Time) {
	l.sent.stirred = now
	l.agent.Unread(0)
}

// look finds out since when a message has waited, and the agent has neither read nor sent anything, and tells
// the flows; 0: none waits. l.mu is held.
func (l *Link) look(now cc.Time) (since cc.Time) {
	l.looked = now
	if l.fd < 0 {
		return 0
	}
	memory := queued(l.fd)
	since = l.sent.waits(now, memory)
	if since == 0 && !l.waiting.empty() { // its queue is full of what others have sent
		since = max(l.waiting.messages[0].at, l.sent.stirred)
	}
	if l.sent.begins(now, memory) == 0 {
		l.agent.Unread(since)
	} else {
		l.agent.Unread(0)
	}
	return since
}
