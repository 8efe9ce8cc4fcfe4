package cc

import (
	"sort"
	"time"
)

// history keeps how many bytes had been delivered by when, to compute delivery rates over windows of time.
type history struct {
	marks [historyMarks]deliveryMark
	head  int // index of the oldest mark
	n     int // marks in use
}

const (
	historyMarks   = 64 // 1 KiB
	historySpacing = 50 // a window over this is the time between two marks, at least
)

type deliveryMark struct {
	at        Time
	delivered Bytes
}

func (h *history) markAt(i int) *deliveryMark { return &h.marks[(h.head+i)%historyMarks] }

// addMark adds a mark. It replaces the newest one if that follows the one before too closely. The window of time that
// the marks are for may differ from call to call.
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

// rateOver returns the bytes/s delivered within the window before the newest mark, or since the oldest mark if that is
// later. It returns 0 if there are fewer than two marks.
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

// growth divides what was delivered in the window before the newest mark by what was delivered in the window before
// that. It returns 0 if the marks do not reach back over both.
func (h *history) growth(window time.Duration) float64 {
	twice := h.rateOver(2 * window)
	if h.n < 2 || h.markAt(h.n-1).at.Sub(h.markAt(0).at) < 2*window {
		return 0
	}
	once := h.rateOver(window)
	return once / max(2*twice-once, 1)
}

// keepLast drops marks that the rate over the last d does not need.
func (h *history) keepLast(d time.Duration) {
	for h.n > 2 && h.markAt(h.n-1).at.Sub(h.markAt(1).at) >= d {
		h.head = (h.head + 1) % historyMarks
		h.n--
	}
}

func (h *history) reset() { h.head, h.n = 0, 0 }
