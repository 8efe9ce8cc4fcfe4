package cc

import (
	"sort"
	"time"
)

// history remembers how many bytes had been delivered by when, for as long as a
// window, to tell the delivery rate over it.
type history struct {
	marks [historyMarks]deliveryMark
	head  int // index of the oldest
	n     int
}

const (
	// historyMarks bounds its memory: 1 KiB.
	historyMarks = 64
	// historySpacing is the part of the window within which one note will do.
	historySpacing = 50
)

type deliveryMark struct {
	at        Time
	delivered Bytes
}

func (h *history) markAt(i int) *deliveryMark { return &h.marks[(h.head+i)%historyMarks] }

// addMark notes the bytes delivered by now, for a window that may differ from call to call.
func (h *history) addMark(now Time, delivered Bytes, window time.Duration) {
	if h.n > 1 && now.Sub(h.markAt(h.n-2).at) < window/historySpacing {
		*h.markAt(h.n - 1) = deliveryMark{now, delivered}
		return
	}
	if h.n == historyMarks {
		h.head = (h.head + 1) % historyMarks
		h.n--
	}
	*h.markAt(h.n) = deliveryMark{now, delivered}
	h.n++
}

// rateOver returns the bytes per second delivered within the window before the
// newest note; over less time where there is less to remember, and 0 where there
// is nothing.
func (h *history) rateOver(window time.Duration) float64 {
	if h.n < 2 {
		return 0
	}
	newest, from := h.markAt(h.n-1), h.markAt(0)
	if since := newest.at.Add(-window); from.at <= since {
		later := sort.Search(h.n-1, func(i int) bool { return h.markAt(i).at > since })
		from = h.markAt(later - 1)
	} else {
		window = newest.at.Sub(from.at)
	}
	return float64(newest.delivered-from.delivered) / max(window, minDivisor).Seconds()
}

// growth returns how many times as much was delivered in the window before the newest note as in the window before
// that; 0 where less than both is remembered.
func (h *history) growth(window time.Duration) float64 {
	twice := h.rateOver(2 * window)
	if h.n < 2 || h.markAt(h.n-1).at.Sub(h.markAt(0).at) < 2*window {
		return 0
	}
	once := h.rateOver(window)
	return once / max(2*twice-once, 1)
}

// keepLast forgets all but the last d.
func (h *history) keepLast(d time.Duration) {
	for h.n > 2 && h.markAt(h.n-1).at.Sub(h.markAt(1).at) >= d {
		h.head = (h.head + 1) % historyMarks
		h.n--
	}
}

func (h *history) reset() { h.head, h.n = 0, 0 }
