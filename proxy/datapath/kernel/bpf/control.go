// Package bpf is a congestion control for the kernel, in eBPF. It enforces the window and the pacing rate that this
// process applies to a socket, and says what each acknowledgement brought. Both go through memory that the kernel and
// the process share, so neither costs a system call. control.bpf.c has the rules of that memory.
//
// A Control is the congestion control under a name of its own. Sockets that are bound to it have a Cell each. The
// cells are divided into parts, each for one goroutine that asks for News.
//
//	process                                kernel (control.bpf.c)
//	Cell.Apply: window, rate         ──▶   in force with the next acknowledgement or transmission
//	Control.News, Cell.Read: Seen    ◀──   written at each acknowledgement and timeout, then a bit in news
//	Cell.Answer: At of a Seen        ──▶   a socket without one for 4 round trips (100 ms to 2 s) falls
//	                                       back to Reno, no faster than the last rate
package bpf

import "errors"

// ErrFull is Bind's error without a free cell, ErrUnsupported Open's with the cure in words.
var (
	ErrFull        = errors.New("bpf: all cells are taken")
	ErrUnsupported = errors.New("bpf: the kernel cannot be made to enforce the window")
)

// Config is what a Control starts from.
type Config struct {
	Cells int // sockets bound at a time, of 192 bytes each
	Parts int // into which the cells are divided, each for one goroutine; 0: 1. At most ⌈Cells/64⌉
}

// namePrefix is followed by the process's number: the kernel keeps one list of
// congestion controls for the whole host.
const namePrefix = "penstock"
