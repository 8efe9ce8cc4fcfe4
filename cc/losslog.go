package cc

// lossLog remembers when how much was lost, so that one can tell what was since some
// byte left: exactly for as many reports, which are within a round trip or two.
type lossLog struct {
	ring  [32]lossEntry
	n     int // entries so far
	total Bytes
}

type lossEntry struct {
	at    Time
	total Bytes // lost by then
}

// add takes in a loss. Reports less than a sixteenth of a round trip apart share an entry.
func (l *lossLog) add(e Loss) {
	l.total += min(max(e.Lost, 0), MaxCwnd)
	if last := l.last(0); l.n == 0 || e.Now.Sub(last.at) >= e.SRTT/16 {
		l.n++
		*l.last(0) = lossEntry{at: e.Now}
	}
	l.last(0).total = l.total
}

// last is the entry i before the newest.
func (l *lossLog) last(i int) *lossEntry { return &l.ring[(l.n-1-i+len(l.ring))%len(l.ring)] }

// since is what has been lost after then.
func (l *lossLog) since(then Time) Bytes {
	for i := range min(l.n, len(l.ring)) {
		if e := l.last(i); e.at <= then {
			return l.total - e.total
		}
	}
	if l.n > len(l.ring) {
		return l.total - l.last(len(l.ring)-1).total
	}
	return l.total
}
