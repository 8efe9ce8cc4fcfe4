// Package bpf is a congestion control for the kernel, in eBPF, that obeys user
// space: it holds the window and the pacing rate that it is told, and tells what
// every acknowledgement brought. Both go through memory that the kernel and this
// process share, so neither costs a system call. See control.bpf.c.
package bpf

import "errors"

// What Bind and Open say when they cannot.
var (
	ErrFull        = errors.New("bpf: all cells are taken")
	ErrUnsupported = errors.New("bpf: the kernel cannot be made to hold the window")
)

// Config is what a Control starts from.
type Config struct {
	Cells int // sockets bound at a time; 0: DefaultCells
	Ring  int // bytes of the ring of single acknowledgements; 0: DefaultRing
}

// Sizes that serve 16,384 managed legs, in 3 MiB, and some 3,800 acknowledgements
// between two looks at the ring.
const (
	DefaultCells = 16 << 10
	DefaultRing  = 512 << 10
)

// namePrefix is followed by the process's number: the kernel keeps one list of
// congestion controls for the whole host.
const namePrefix = "penstock"
