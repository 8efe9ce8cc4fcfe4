package cc

import "time"

// filterSlots bounds a windowed filter's memory. Samples closer together than
// window/filterSlots share a slot, so expiry is exact to that fraction.
const filterSlots = 32

// windowedFilter keeps the extreme of the samples of a sliding window as a
// monotonic deque. Old samples go, but the last one always stays, so that a
// long silence leaves something usable.
type windowedFilter struct {
	less func(a, b time.Duration) bool // a is more extreme than b
	// Twice the slots: a window that widens finds samples closer together than
	// its own slots are.
	ring [2 * filterSlots]filterSample
	head int // index of the oldest sample, which is the extreme
	n    int
}

type filterSample struct {
	at Time
	v  time.Duration
}

func minFilter() windowedFilter {
	return windowedFilter{less: func(a, b time.Duration) bool { return a < b }}
}

func maxFilter() windowedFilter {
	return windowedFilter{less: func(a, b time.Duration) bool { return a > b }}
}

func (f *windowedFilter) slot(i int) *filterSample { return &f.ring[(f.head+i)%len(f.ring)] }

// add takes a sample and forgets those older than window, which may differ from
// call to call.
func (f *windowedFilter) add(now Time, v time.Duration, window time.Duration) {
	for f.n > 0 && !f.less(f.slot(f.n-1).v, v) {
		f.n--
	}
	f.expire(now, window)
	// A sample right behind a more extreme one is covered by it.
	if f.n > 0 && now.Sub(f.slot(f.n-1).at) < window/filterSlots {
		return
	}
	if f.n == len(f.ring) {
		f.thin()
	}
	*f.slot(f.n) = filterSample{now, v}
	f.n++
	f.expire(now, window)
}

// expire forgets samples older than window, but never the last.
func (f *windowedFilter) expire(now Time, window time.Duration) {
	for f.n > 1 && now.Sub(f.slot(0).at) > window {
		f.head = (f.head + 1) % len(f.ring)
		f.n--
	}
}

// thin drops every other sample. Refusing the newest instead would leave a hole
// that nothing fills once the old ones have expired.
func (f *windowedFilter) thin() {
	for i := range f.n / 2 {
		*f.slot(i) = *f.slot(2 * i)
	}
	f.n /= 2
}

// get returns the extreme of the window; 0 before the first sample.
func (f *windowedFilter) get() time.Duration {
	if f.n == 0 {
		return 0
	}
	return f.slot(0).v
}

func (f *windowedFilter) reset() { f.head, f.n = 0, 0 }
