// Package bpf is a congestion control for the kernel, in eBPF, that enforces the
// window and the pacing rate that this process applies to a socket, and says what
// each acknowledgement brought. Both go through memory that the kernel and the
// process share, so neither costs a system call. See control.bpf.c.
package bpf

import "errors"

// What Bind and Open say when they cannot.
var (
	ErrFull        = errors.New("bpf: all cells are taken")
	ErrUnsupported = errors.New("bpf: the kernel cannot be made to enforce the window")
)

// Config is what a Control starts from.
type Config struct {
	Cells int // sockets bound at a time, of 192 bytes each
	// into which the cells are divided, each for a goroutine of its own; 0: 1. There are no more than ⌈Cells/64⌉
	Parts int
}

// namePrefix is followed by the process's number: the kernel keeps one list of
// congestion controls for the whole host.
const namePrefix = "penstock"
