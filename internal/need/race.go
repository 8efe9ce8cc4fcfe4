//go:build race

package need

// raced is whether the race detector watches.
const raced = true
