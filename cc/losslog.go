package cc

// lossLog records losses by time, to tell how much was lost since some byte left. It has room for the
// reports of a round trip or two.
type lossLog struct {
	ring  [32]lossEntry
	n     int // entries so far
	total Bytes
}

type lossEntry struct {
	at    Time
	total Bytes // lost by then
}

// addLoss adds a loss. Reports less than a sixteenth of a round trip apart share an entry.
func (l *lossLog) addLoss(e Loss) {
	l.total += min(max(e.Lost, 0), MaxCwnd)
	if last := l.entryBefore(0); l.n == 0 || e.Now.Sub(last.at) >= e.SRTT/16 {
		l.n++
		*l.entryBefore(0) = lossEntry{at: e.Now}
	}
	l.entryBefore(0).total = l.total
}

// entryBefore returns the entry i before the newest.
func (l *lossLog) entryBefore(i int) *lossEntry { return &l.ring[(l.n-1-i+len(l.ring))%len(l.ring)] }

// lostSince returns how much was lost after that time.
func (l *lossLog) lostSince(then Time) Bytes {
	for i := range min(l.n, len(l.ring)) {
		if e := l.entryBefore(i); e.at <= then {
			return l.total - e.total
		}
	}
	if l.n > len(l.ring) {
		return l.total - l.entryBefore(len(l.ring)-1).total
	}
	return l.total
}
