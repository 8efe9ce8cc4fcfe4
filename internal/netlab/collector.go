package netlab

import "runtime/debug"

// collectorLimit is how much memory makes the garbage collector work even
// during a run; a minute at 50 Mbit/s needs a tenth of it.
const collectorLimit = 512 << 20

// QuietCollector keeps the garbage collector out of the runs, as it would delay
// the emulator's packets, and returns what undoes it.
func QuietCollector() func() {
	percent := debug.SetGCPercent(-1)
	limit := debug.SetMemoryLimit(collectorLimit)
	return func() {
		debug.SetGCPercent(percent)
		debug.SetMemoryLimit(limit)
	}
}
