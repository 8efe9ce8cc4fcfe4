//go:build race

package need

// Raced is whether the race detector watches: what is one goroutine and takes minutes
// under it can be left out.
const Raced = true
