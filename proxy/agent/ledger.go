package agent

import "github.com/penstock-net/penstock/cc"

const (
	marks    = 1024 // messages whose times are known; more than a socket's queue has room for
	classLen = 64   // lengths that count as one: the kernel's memory for a message comes in steps
	learning = 8    // messages of a class whose memory is measured
)

// ledger knows when what an agent has not read was sent, from how much memory it takes.
type ledger struct {
	sizes map[int]*size // by class of length
	total int           // memory of all that was sent
	ring  [marks]mark
	n     int // marks made so far
}

// size is how much memory a message takes in the sender's account.
type size struct{ memory, seen int }

// mark says how much had been sent by then.
type mark struct {
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

// add notes a message.
func (l *ledger) add(now cc.Time, length int) {
	l.total += l.of(length).memory
	l.ring[l.n%marks] = mark{now, l.total}
	l.n++
}

// oldest is when the oldest message was sent of those that take so much memory; 0: none does.
func (l *ledger) oldest(memory int) cc.Time {
	if memory <= 0 || l.n == 0 {
		return 0
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
	return l.ring[lo%marks].at
}
