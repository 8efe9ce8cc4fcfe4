package agent

import (
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
)

const (
	marks    = 1024 // messages whose times are known; more than a socket's queue has room for
	classLen = 64   // lengths that count as one: the kernel's memory for a message comes in steps
	learning = 8    // messages of a class whose memory is measured

	// beginning is how long an agent may take over the announcement of a flow, and meanwhile neither read nor
	// say anything: it may have much to set up, and flows that it lost over that would only come back as new ones.
	beginning = time.Second
)

// ledger knows when what an agent has not read was sent, from how much memory it takes.
type ledger struct {
	sizes   map[int]*size // by class of length
	total   int           // memory of all that was sent
	ring    [marks]mark
	n       int             // marks made so far
	unread  int             // memory of what was not read when somebody looked
	stirred cc.Time         // when it was seen last that the agent goes on
	begun   map[uint32]bool // flows that were announced, and not answered for or closed
}

// size is how much memory a message takes in the sender's account.
type size struct{ memory, seen int }

// mark is a message, and how much had been sent with it.
type mark struct {
	about about
	at    cc.Time
	total int
}

func (l *ledger) of(length int) *size {
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

// unknown reports whether the memory of messages that long is still to be learnt.
func (l *ledger) unknown(length int) bool { return l.of(length).seen < learning }

// learn takes the growth of the account by one message; less, where some were read meanwhile.
func (l *ledger) learn(length, grown int) {
	s := l.of(length)
	s.seen++
	s.memory = max(s.memory, grown)
}

// add notes a message that has left.
func (l *ledger) add(m message) {
	l.total += l.of(len(m.bytes)).memory
	what := aboutOf(m.bytes)
	switch {
	case what.kind == ccp.KindCreate:
		if l.begun == nil {
			l.begun = map[uint32]bool{}
		}
		l.begun[what.flow] = true
	case what.kind == ccp.KindMeasure && len(m.bytes) == closeLen:
		delete(l.begun, what.flow)
	}
	l.ring[l.n%marks] = mark{what, m.at, l.total}
	l.n++
}

// begins is the flow that the agent is at work to begin: it has read the announcement last, and not answered
// yet; 0: none.
func (l *ledger) begins(now cc.Time, memory int) (flow uint32) {
	i := l.oldest(memory) - 1
	if i < max(0, l.n-marks) {
		return 0
	}
	m := l.ring[i%marks]
	if m.about.kind != ccp.KindCreate || !l.begun[m.about.flow] || now.Sub(max(m.at, l.stirred)) >= beginning {
		return 0
	}
	return m.about.flow
}

// waits is since when a message has waited, and the agent has not gone on, where those that are unread
// take so much memory; 0: none does.
func (l *ledger) waits(now cc.Time, memory int) cc.Time {
	if memory < l.unread {
		l.stirred = now
	}
	l.unread = memory
	i := l.oldest(memory)
	if i == l.n {
		return 0
	}
	return max(l.ring[i%marks].at, l.stirred)
}

// hears reports whether the announcement of a flow is among those messages, or the agent is at work on it.
func (l *ledger) hears(now cc.Time, flow uint32, memory int) bool {
	if l.begins(now, memory) == flow {
		return true
	}
	for i := l.oldest(memory); i < l.n; i++ {
		if l.ring[i%marks].about == (about{ccp.KindCreate, flow}) {
			return true
		}
	}
	return false
}

// oldest is the mark of the oldest of those messages; l.n: there are none.
func (l *ledger) oldest(memory int) int {
	if memory <= 0 || l.n == 0 {
		return l.n
	}
	// Marks in order, the oldest first: the first whose total is beyond what was read.
	lo, hi := max(0, l.n-marks), l.n-1
	for read := l.total - memory; lo < hi; {
		mid := (lo + hi) / 2
		if l.ring[mid%marks].total > read {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	return lo
}
