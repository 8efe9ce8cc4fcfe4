package agent

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
)

// maxWaiting bounds the messages that wait for room at the agent.
const maxWaiting = 1 << 14

// backlog is the queue of messages to the agent. While the agent's socket is full, it has at most one report and one
// Create of each flow.
type backlog struct {
	messages []message     // removed ones inside the queue have no bytes; the first one always has
	gone     int           // messages that have left the queue at its front
	full     bool          // the agent's socket has no room
	waits    map[about]int // gone + index of each Create, and while full of each message
}

// message is a message to the agent.
type message struct {
	bytes []byte
	at    cc.Time // when the flow sent it
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

// noteFull notes that the agent's socket is full.
func (q *backlog) noteFull() {
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

// indexMessage adds message i to waits, if it belongs there.
func (q *backlog) indexMessage(i int, what about) {
	if !q.full && what.kind != ccp.KindCreate {
		return
	}
	if q.waits == nil {
		q.waits = map[about]int{}
	}
	q.waits[what] = q.gone + i
}

// addMessage adds a copy of a message; false: the backlog has no room for it, or the agent's socket is full and a
// report of the flow waits already. A report that closes its flow replaces one that waits.
func (q *backlog) addMessage(now cc.Time, b []byte) bool {
	what := aboutOf(b)
	if at, waits := q.waits[what]; waits {
		if what.kind == ccp.KindMeasure && !closesFlow(b) {
			return false
		}
		q.messages[at-q.gone].bytes = slices.Clone(b)
		return true
	}
	if len(q.messages) >= maxWaiting {
		return false
	}
	q.messages = append(q.messages, message{slices.Clone(b), now})
	q.indexMessage(len(q.messages)-1, what)
	return true
}

// firstMessages returns up to n messages from the front, as far as none was removed between them.
func (q *backlog) firstMessages(n int) []message {
	first := q.messages[:min(n, len(q.messages))]
	if i := slices.IndexFunc(first, func(m message) bool { return m.bytes == nil }); i >= 0 {
		first = first[:i]
	}
	return first
}

// removeFirst removes and returns the first message.
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

// skipRemoved drops removed messages from the front.
func (q *backlog) skipRemoved() {
	for !q.isEmpty() && q.messages[0].bytes == nil {
		q.messages, q.gone = q.messages[1:], q.gone+1
	}
}

// Hold keeps back messages of flows until Release, so that those of a tick leave with one system
// call, while no group is locked. It first puts the decisions into force that the agent has sent.
func (l *Link) Hold() {
	now := l.cfg.Clock()
	l.held.Add(1)
	l.tryTakeDatagrams()
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.checkedAt) >= unreadPeriod {
		l.checkUnread(now)
	}
}

// Release ends a Hold.
func (l *Link) Release() {
	l.held.Add(-1)
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.sendAndArm() // watchAgent ends the connection after an error
}

// transmitMessage is the agent's ccp.Transmit. Messages wait for room at the agent's socket, which may hold only ten
// (net.unix.max_dgram_qlen), while many flows report at once.
func (l *Link) transmitMessage(b []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.open {
		return unix.ENOTCONN
	}
	now := l.cfg.Clock()
	if what := aboutOf(b); what.kind == ccp.KindCreate && l.sent.hasPendingCreate(now, what.flow, unreadMemory(l.fd)) {
		return nil // at a second Create the agent would start the flow anew
	} else if closesFlow(b) {
		l.waiting.dropCreate(what.flow) // else it may follow the closing report, which takes the place of an earlier one
	}
	if !l.waiting.addMessage(now, b) {
		return ccp.ErrBusy
	}
	l.openReports.noteSent(now, b)
	if !l.watching {
		l.watching = true
		notifyChannel(l.wakeWatch)
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

// sendAndArm sends the messages that find room, and leaves the rest to serveEvents or sendRemote. l.mu is held.
func (l *Link) sendAndArm() error {
	wasFull := l.waiting.full
	err := l.flushBacklog()
	switch {
	case l.fd < 0 && !l.waiting.isEmpty():
		notifyChannel(l.wakeSender)
	case !wasFull && l.waiting.full:
		l.armEvents()
	}
	return err
}

// flushBacklog sends waiting messages to an agent on this machine, as far as they find room. An error ends the
// connection. l.mu is held.
func (l *Link) flushBacklog() error {
	for now := l.cfg.Clock(); l.fd >= 0 && !l.waiting.isEmpty(); {
		n, err := l.postMessages(l.waiting.firstMessages(batchLen))
		if n > 0 && l.waiting.full {
			l.noteAlive(now) // the agent has read something, since there was no room before
		}
		for range n {
			l.waiting.removeFirst()
		}
		switch {
		case errors.Is(err, ccp.ErrBusy):
			l.waiting.noteFull()
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

// postMessages sends the first of up to batchLen messages to an agent on this machine with one system call, and
// returns how many. A message of a length with unknown memory it sends alone, and measures how much memory that
// takes.
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

// unreadMemory returns the memory, in bytes, of messages that we have sent and the agent has not read (unix(7),
// SIOCOUTQ).
func unreadMemory(fd int) int {
	n, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
	if err != nil {
		return 0
	}
	return n
}

// noteAlive notes that the agent reads or sends. However long its queue is, it is then not stuck. l.mu is held.
func (l *Link) noteAlive(now cc.Time) {
	l.sent.lastActive = now
	l.agent.SetUnread(0)
}

// checkUnread returns since when a message has been unread while the agent has neither read nor sent anything, and
// lets the flows know; 0: none is unread. l.mu is held.
func (l *Link) checkUnread(now cc.Time) (since cc.Time) {
	l.checkedAt = now
	if l.fd < 0 {
		return 0
	}
	memory := unreadMemory(l.fd)
	since = l.sent.unreadSince(now, memory)
	if since == 0 && !l.waiting.isEmpty() { // messages of other processes fill its queue
		since = max(l.waiting.messages[0].at, l.sent.lastActive)
	}
	if l.sent.flowBeingSetUp(now, memory) == 0 {
		l.agent.SetUnread(since)
	} else {
		l.agent.SetUnread(0)
	}
	return since
}
