//go:build race

package flow

// raced: the race detector watches, and what nothing runs beside need not run.
const raced = true
