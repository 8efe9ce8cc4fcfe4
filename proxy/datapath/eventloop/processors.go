package eventloop

import (
	"runtime"
	"sync"
	"time"
)

// processors counts the threads that wait in system calls of their own, in all loops and ticks of the process.
var processors struct {
	sync.Mutex
	reserved int // GOMAXPROCS is higher by that
}

// ReserveProcessors raises GOMAXPROCS by n, for n threads that wait in blocking system calls; a negative n lowers it
// again. Such a thread keeps one of Go's processors while it waits. Where no other is free, goroutines stand still
// until Go's monitor takes it away, after 20 µs to 10 ms. GOMAXPROCS then no longer follows the limits of a container.
func ReserveProcessors(n int) {
	processors.Lock()
	defer processors.Unlock()
	processors.reserved += n
	runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + n)
}

// Processors returns GOMAXPROCS without what was reserved.
func Processors() int {
	processors.Lock()
	defer processors.Unlock()
	return max(1, runtime.GOMAXPROCS(0)-processors.reserved)
}

// Slice is the time for which a goroutine has had its processor. The zero value is ready for Renew. One goroutine uses
// it.
type Slice struct{ began time.Time }

// maxSlice is below the 10 ms after which Go's monitor acts.
const maxSlice = 5 * time.Millisecond

// Renew lets Go's scheduler run, if it has not run for maxSlice. A goroutine that waits in system calls again and again
// calls it after each. The scheduler does not count such a call as its own turn (retake in runtime/proc.go of Go 1.26).
// Without Renew the monitor takes the goroutine's processor in each call, and looks for more each 20 µs.
func (s *Slice) Renew() {
	if now := currentTime(); now.Sub(s.began) > maxSlice {
		s.began = now
		runtime.Gosched()
	}
}

// currentTime returns the real time: deadlines and slices are of real time.
func currentTime() time.Time { return time.Now() } //nolint:forbidigo // see above
