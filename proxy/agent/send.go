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

// aboutOf reads the header of a message of this process.
func aboutOf(b []byte) about {
	m, _, _ := ccp.Next(b) // never malformed: this process made it
	return about{m.Kind, m.Flow}
}

// isEmpty reports whether no message waits.
func (q *backlog) isEmpty() bool { return len(q.messages) == 0 }

// noteScarce notes that room is scarce.
func (q *backlog) noteScarce() {
	if q.full {
		return
	}
	q.full = true
	for i, m := range q.messages {
		if m.bytes != nil {
			q.indexMessage(i, aboutOf(m.bytes))
		}
	}
}

// indexMessage enters the i-th message into waits.
func (q *backlog) indexMessage(i int, what about) {
	if !q.full && what.kind != ccp.KindCreate {
		return
	}
	if q.waits == nil {
		q.waits = map[about]int{}
	}
	q.waits[what] = q.gone + i
}

// addMessage takes a copy of a message; false: there is no room, or room is scarce and a report of the flow
// waits already. A report that closes its flow takes the place of one that waits.
func (q *backlog) addMessage(now cc.Time, b []byte) bool {
	what := aboutOf(b)
	if at, waits := q.waits[what]; waits {
		if what.kind == ccp.KindMeasure && !closesFlow(b) {
			return false
		}
		q.messages[at-q.gone].bytes = slices.Clone(b)
		return true
	}
	if len(q.messages) >= mostWaiting {
		return false
	}
	q.messages = append(q.messages, message{slices.Clone(b), now})
	q.indexMessage(len(q.messages)-1, what)
	return true
}

// firstMessages are the first messages, up to n.
func (q *backlog) firstMessages(n int) []message {
	first := q.messages[:min(n, len(q.messages))]
	if i := slices.IndexFunc(first, func(m message) bool { return m.bytes == nil }); i >= 0 {
		first = first[:i]
	}
	return first
}

// removeFirst takes the first message off.
func (q *backlog) removeFirst() message {
	m := q.messages[0]
	if what := aboutOf(m.bytes); q.waits[what] == q.gone {
		delete(q.waits, what)
	}
	q.messages[0].bytes = nil
	q.skipRemoved()
	return m
}

// dropCreate removes the Create of a flow, if one waits.
func (q *backlog) dropCreate(flow uint32) {
	what := about{ccp.KindCreate, flow}
	if at, waits := q.waits[what]; waits {
		delete(q.waits, what)
		q.messages[at-q.gone].bytes = nil
		q.skipRemoved()
	}
}

// skipRemoved leaves the first message that has bytes in front.
func (q *backlog) skipRemoved() {
	for !q.isEmpty() && q.messages[0].bytes == nil {
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
		l.checkUnread(now)
	}
}

// Release ends a Hold.
func (l *Link) Release() {
	l.held.Add(-1)
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.sendAndArm() // watch ends the connection after an error
}

// transmitMessage is the agent's ccp.Transmit. What finds no room waits for it, so that the reports of
// many flows at once reach an agent with a socket that has room for ten (net.unix.max_dgram_qlen).
func (l *Link) transmitMessage(b []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.open {
		return unix.ENOTCONN
	}
	now := l.cfg.Clock()
	if what := aboutOf(b); what.kind == ccp.KindCreate && l.sent.isHearingOf(now, what.flow, unreadMemory(l.fd)) {
		return nil // the agent would begin anew
	} else if closesFlow(b) {
		l.waiting.dropCreate(what.flow) // it may be behind the report that b replaces
	}
	if !l.waiting.addMessage(now, b) {
		return ccp.ErrBusy
	}
	l.asked.noteSent(now, b)
	if !l.looking {
		l.looking = true
		notifyChannel(l.kick)
	}
	if l.held.Load() > 0 {
		return nil
	}
	return l.sendAndArm()
}

// notifyChannel wakes the reader of a channel of one place. Notifications that it has not read count as one.
func notifyChannel(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// sendAndArm sends what there is room for, and has attend send the rest. l.mu is held.
func (l *Link) sendAndArm() error {
	scarce := l.waiting.full
	err := l.flushBacklog()
	switch {
	case l.fd < 0 && !l.waiting.isEmpty():
		notifyChannel(l.room)
	case !scarce && l.waiting.full:
		l.armEvents()
	}
	return err
}

// flushBacklog sends what waits and finds room. An error ends the connection. l.mu is held.
func (l *Link) flushBacklog() error {
	for now := l.cfg.Clock(); l.fd >= 0 && !l.waiting.isEmpty(); {
		n, err := l.postMessages(l.waiting.firstMessages(together))
		if n > 0 && l.waiting.full {
			l.noteAlive(now) // there was no room before
		}
		for range n {
			l.waiting.removeFirst()
		}
		switch {
		case errors.Is(err, ccp.ErrBusy):
			l.waiting.noteScarce()
			return nil
		case err != nil:
			l.failWith(fmt.Errorf("nobody reads what is sent: %w", err))
			return err
		}
	}
	if l.fd >= 0 {
		l.waiting.full = false
	}
	return nil
}

// postMessages sends some of the messages, which are up to together, to an agent on this machine with one system
// call, and returns how many. For the first messages of a length it makes others, to learn how much memory they take.
func (l *Link) postMessages(messages []message) (n int, err error) {
	known := 0
	for known < len(messages) && !l.sent.isUnknown(len(messages[known].bytes)) {
		known++
	}
	learn, before := known == 0, 0
	if learn {
		before = unreadMemory(l.fd)
	}
	messages = messages[:max(known, 1)]
	n, err = l.out.sendMessages(l.fd, messages)
	for _, m := range messages[:n] {
		if learn {
			l.sent.learnGrowth(len(m.bytes), unreadMemory(l.fd)-before)
		}
		l.sent.addMessage(m)
	}
	return n, err
}

// unreadMemory is the memory, in bytes, of what we have sent and the agent has not read (unix(7), SIOCOUTQ).
func unreadMemory(fd int) int {
	n, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
	if err != nil {
		return 0
	}
	return n
}

// noteAlive notes that the agent reads or sends: then the length of its queue does not matter. l.mu is held.
func (l *Link) noteAlive(now cc.Time) {
	l.sent.stirred = now
	l.agent.Unread(0)
}

// checkUnread finds out since when a message has waited, and the agent has neither read nor sent anything, and tells
// the flows; 0: none waits. l.mu is held.
func (l *Link) checkUnread(now cc.Time) (since cc.Time) {
	l.looked = now
	if l.fd < 0 {
		return 0
	}
	memory := unreadMemory(l.fd)
	since = l.sent.unreadSince(now, memory)
	if since == 0 && !l.waiting.isEmpty() { // its queue is full of what others have sent
		since = max(l.waiting.messages[0].at, l.sent.stirred)
	}
	if l.sent.flowBeingSetUp(now, memory) == 0 {
		l.agent.Unread(since)
	} else {
		l.agent.Unread(0)
	}
	return since
}
