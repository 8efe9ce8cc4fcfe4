package cc

import (
	"sort"
	"time"
)

// windowLogSlots bounds a windowLog.
const windowLogSlots = 256

// windowLog remembers which window was in force when, for the last
// windowLogSlots changes.
type windowLog struct {
	ring    [windowLogSlots]windowChange
	head, n int // the oldest, and how many
}

type windowChange struct {
	at     Time
	window float32
}

func (l *windowLog) changeAt(i int) *windowChange { return &l.ring[(l.head+i)%len(l.ring)] }

func (l *windowLog) reset() { l.head, l.n = 0, 0 }

// addChange notes a change at now. Changes closer together than apart share a slot,
// so that a round trip of them fits.
func (l *windowLog) addChange(now Time, window float64, apart time.Duration) {
	if l.n > 0 {
		last := l.changeAt(l.n - 1)
		if float64(last.window) == window {
			return
		}
		if now.Sub(last.at) <= apart {
			last.window = float32(window)
			return
		}
	}
	if l.n == len(l.ring) {
		l.head, l.n = (l.head+1)%len(l.ring), l.n-1
	}
	l.n++
	*l.changeAt(l.n - 1) = windowChange{now, float32(window)}
}

// windowAt returns the window in force when a packet left, the oldest known if that
// was earlier, and otherwise if none is.
func (l *windowLog) windowAt(left Time, otherwise float64) float64 {
	if l.n == 0 {
		return otherwise
	}
	i := sort.Search(l.n, func(i int) bool { return l.changeAt(i).at > left })
	return float64(l.changeAt(max(0, i-1)).window)
}
