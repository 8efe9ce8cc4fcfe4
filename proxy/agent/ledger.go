package agent

import (
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
)

const (
	maxMarks     = 1024 // messages remembered; more than a socket's queue has room for
	classLen     = 64   // bytes of length per class: the kernel's memory for a message comes in steps
	learnSamples = 8    // messages of a class that are measured before their memory is known

	// maxSetUp is how long an agent may work on a flow's Create and neither read nor send anything. Setting up a
	// flow may take long. If the fallback took over its flows, they would only be announced to it again.
	maxSetUp = time.Second
)

// ledger finds out when the messages were sent that an agent has not read, from the memory that they take in the
// socket's queue.
type ledger struct {
	sizes      map[int]*size // by class of length
	total      int64         // memory of all messages sent, in bytes
	ring       [maxMarks]mark
	n          int64           // marks made so far
	unread     int             // memory of unread messages at the last call of unreadSince
	lastActive cc.Time         // when the agent was last seen to read or send something
	announced  map[uint32]bool // flows with a Create that the agent has not answered; closed ones are not among them
}

// size is the memory that a message takes of the sender's buffer (SO_SNDBUF), and how often that was measured.
type size struct{ memory, seen int }

// mark is a message that was sent, with ledger.total after it.
type mark struct {
	about about
	at    cc.Time
	total int64
}

// sizeOf returns the size of messages of a length.
func (l *ledger) sizeOf(length int) *size {
	s := l.sizes[length/classLen]
	if s == nil {
		if l.sizes == nil {
			l.sizes = map[int]*size{}
		}
		s = &size{memory: length}
		l.sizes[length/classLen] = s
	}
	return s
}

// isUnknown reports whether the memory of messages of a length must still be measured.
func (l *ledger) isUnknown(length int) bool { return l.sizeOf(length).seen < learnSamples }

// learnGrowth adds a measurement: one message of a length has grown the memory in use by grown bytes. That is too
// little if the agent has read others in the meantime, so the largest one counts.
func (l *ledger) learnGrowth(length, grown int) {
	s := l.sizeOf(length)
	s.seen++
	s.memory = max(s.memory, grown)
}

// addMessage makes a mark of a message that was sent.
func (l *ledger) addMessage(m message) {
	l.total += int64(l.sizeOf(len(m.bytes)).memory)
	what := aboutOf(m.bytes)
	switch {
	case what.kind == ccp.KindCreate:
		if l.announced == nil {
			l.announced = map[uint32]bool{}
		}
		l.announced[what.flow] = true
	case closesFlow(m.bytes):
		delete(l.announced, what.flow)
	}
	l.ring[l.n%maxMarks] = mark{what, m.at, l.total}
	l.n++
}

// flowBeingSetUp returns the flow that the agent is setting up, since it has read its Create last and not answered
// yet; 0: none. memory, here and below, is that of the unread messages.
func (l *ledger) flowBeingSetUp(now cc.Time, memory int) (flow uint32) {
	i := l.oldestUnread(memory) - 1
	if i < max(0, l.n-maxMarks) {
		return 0
	}
	m := l.ring[i%maxMarks]
	if m.about.kind != ccp.KindCreate || !l.announced[m.about.flow] || now.Sub(max(m.at, l.lastActive)) >= maxSetUp {
		return 0
	}
	return m.about.flow
}

// unreadSince returns when the agent was last active, or when the oldest unread message was sent if that is later; 0:
// no message is unread.
func (l *ledger) unreadSince(now cc.Time, memory int) cc.Time {
	if memory < l.unread {
		l.lastActive = now
	}
	l.unread = memory
	i := l.oldestUnread(memory)
	if i == l.n {
		return 0
	}
	return max(l.ring[i%maxMarks].at, l.lastActive)
}

// hasPendingCreate reports whether a flow's Create is among the unread messages, or the agent is setting the flow up.
func (l *ledger) hasPendingCreate(now cc.Time, flow uint32, memory int) bool {
	if l.flowBeingSetUp(now, memory) == flow {
		return true
	}
	for i := l.oldestUnread(memory); i < l.n; i++ {
		if l.ring[i%maxMarks].about == (about{ccp.KindCreate, flow}) {
			return true
		}
	}
	return false
}

// oldestUnread returns the number of the oldest unread message's mark; l.n: all were read.
func (l *ledger) oldestUnread(memory int) int64 {
	if memory <= 0 || l.n == 0 {
		return l.n
	}
	// Search the marks, which are in order of total, for the first with a total beyond what was read.
	lo, hi := max(0, l.n-maxMarks), l.n-1
	for read := l.total - int64(memory); lo < hi; {
		mid := (lo + hi) / 2
		if l.ring[mid%maxMarks].total > read {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	return lo
}
