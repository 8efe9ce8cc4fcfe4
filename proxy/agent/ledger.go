package agent

import (
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
)

const (
	marks    = 1024 // messages remembered; more than a socket's queue has room for
	classLen = 64   // bytes of length per class: the kernel's memory for a message comes in steps
	learning = 8    // messages of a class before their memory is known

	// beginning is how long an agent may work on a flow's Create, and neither read nor send anything: it may
	// have much to set up, and if its flows were taken away they would only be announced again.
	beginning = time.Second
)

// ledger finds out when the messages were sent that an agent has not read, from the memory that they take.
type ledger struct {
	sizes   map[int]*size // by class of length
	total   int64         // memory of all that was sent, in bytes
	ring    [marks]mark
	n       int64           // marks made so far
	unread  int             // memory of what was not read when waits was called last
	stirred cc.Time         // when the agent was last seen to read or send something
	begun   map[uint32]bool // flows announced by a Create, and neither answered nor closed
}

// size is the memory that a message takes of the sender's buffer (SO_SNDBUF), and how often that was measured.
type size struct{ memory, seen int }

// mark is a message that was sent, and ledger.total including it.
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

// isUnknown reports whether the memory of messages that long is still to be learnt.
func (l *ledger) isUnknown(length int) bool { return l.sizeOf(length).seen < learning }

// learnGrowth takes the growth of the memory in use by one message: too little where the agent has read others since.
func (l *ledger) learnGrowth(length, grown int) {
	s := l.sizeOf(length)
	s.seen++
	s.memory = max(s.memory, grown)
}

// addMessage notes a message that has left.
func (l *ledger) addMessage(m message) {
	l.total += int64(l.sizeOf(len(m.bytes)).memory)
	what := aboutOf(m.bytes)
	switch {
	case what.kind == ccp.KindCreate:
		if l.begun == nil {
			l.begun = map[uint32]bool{}
		}
		l.begun[what.flow] = true
	case closesFlow(m.bytes):
		delete(l.begun, what.flow)
	}
	l.ring[l.n%marks] = mark{what, m.at, l.total}
	l.n++
}

// flowBeingSetUp is the flow that the agent is setting up: its Create is what the agent read last, and not answered
// yet; 0: none. memory is what unread messages take, here and below.
func (l *ledger) flowBeingSetUp(now cc.Time, memory int) (flow uint32) {
	i := l.oldestUnread(memory) - 1
	if i < max(0, l.n-marks) {
		return 0
	}
	m := l.ring[i%marks]
	if m.about.kind != ccp.KindCreate || !l.begun[m.about.flow] || now.Sub(max(m.at, l.stirred)) >= beginning {
		return 0
	}
	return m.about.flow
}

// unreadSince is since when a message has been unread, and the agent has neither read nor sent anything; 0: none is.
func (l *ledger) unreadSince(now cc.Time, memory int) cc.Time {
	if memory < l.unread {
		l.stirred = now
	}
	l.unread = memory
	i := l.oldestUnread(memory)
	if i == l.n {
		return 0
	}
	return max(l.ring[i%marks].at, l.stirred)
}

// isHearingOf reports whether a flow's Create is among the unread messages, or the agent is at work on it.
func (l *ledger) isHearingOf(now cc.Time, flow uint32, memory int) bool {
	if l.flowBeingSetUp(now, memory) == flow {
		return true
	}
	for i := l.oldestUnread(memory); i < l.n; i++ {
		if l.ring[i%marks].about == (about{ccp.KindCreate, flow}) {
			return true
		}
	}
	return false
}

// oldestUnread is the number of the oldest unread message's mark; l.n: there is none.
func (l *ledger) oldestUnread(memory int) int64 {
	if memory <= 0 || l.n == 0 {
		return l.n
	}
	// Marks in order, the oldest first: the first with a total beyond what was read.
	lo, hi := max(0, l.n-marks), l.n-1
	for read := l.total - int64(memory); lo < hi; {
		mid := (lo + hi) / 2
		if l.ring[mid%marks].total > read {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	return lo
}
