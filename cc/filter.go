package cc

import "time"

// filterSlots bounds a windowed filter's memory. Samples closer together than
// window/filterSlots share a slot, so expiry is exact to that fraction.
const filterSlots = 32

// windowedFilter keeps the extreme of the samples of a sliding window as a monotonic deque. Old samples
// expire, but the last one always stays, so that there is a value after a long silence.
type windowedFilter struct {
	less func(a, b time.Duration) bool // a is more extreme than b
	// Twice the slots: a window that widens finds samples closer together than
	// its own slots are.
	ring [2 * filterSlots]filterSample
	head int // index of the oldest sample, which is the extreme
	n    int
}

// leastAtFirst returns the least round trip that is known with an algorithm's first sample. If the flow has sent
// before, under another algorithm or from another process, its own queue is in that sample.
func leastAtFirst(s State, rtt time.Duration) time.Duration {
	if s.MinRTT > 0 {
		return min(rtt, s.MinRTT)
	}
	return rtt
}

type filterSample struct {
	at Time
	v  time.Duration
}

func newMinFilter() windowedFilter {
	return windowedFilter{less: func(a, b time.Duration) bool { return a < b }}
}

func newMaxFilter() windowedFilter {
	return windowedFilter{less: func(a, b time.Duration) bool { return a > b }}
}

func (f *windowedFilter) sampleAt(i int) *filterSample { return &f.ring[(f.head+i)%len(f.ring)] }

// addSample adds a sample and drops those older than window, which may differ from call to call.
func (f *windowedFilter) addSample(now Time, v time.Duration, window time.Duration) {
	for f.n > 0 && !f.less(f.sampleAt(f.n-1).v, v) {
		f.n--
	}
	f.expireSamples(now, window)
	// A sample right behind a more extreme one is covered by it.
	if f.n > 0 && now.Sub(f.sampleAt(f.n-1).at) < window/filterSlots {
		return
	}
	if f.n == len(f.ring) {
		f.dropEverySecond()
	}
	*f.sampleAt(f.n) = filterSample{now, v}
	f.n++
	f.expireSamples(now, window)
}

// expireSamples forgets samples older than window, but never the last.
func (f *windowedFilter) expireSamples(now Time, window time.Duration) {
	for f.n > 1 && now.Sub(f.sampleAt(0).at) > window {
		f.head = (f.head + 1) % len(f.ring)
		f.n--
	}
}

// dropEverySecond drops every other sample. Refusing the newest instead would leave a hole
// that nothing fills once the old ones have expired.
func (f *windowedFilter) dropEverySecond() {
	for i := range f.n / 2 {
		*f.sampleAt(i) = *f.sampleAt(2 * i)
	}
	f.n /= 2
}

// extreme returns the extreme of the window; 0 before the first sample.
func (f *windowedFilter) extreme() time.Duration {
	if f.n == 0 {
		return 0
	}
	return f.sampleAt(0).v
}

func (f *windowedFilter) reset() { f.head, f.n = 0, 0 }
