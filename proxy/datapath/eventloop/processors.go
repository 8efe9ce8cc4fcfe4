package eventloop

import (
	"runtime"
	"sync"
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
