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
	Cells int // sockets bound at a time, of 192 bytes each
	Ring  int // bytes of the ring of single acknowledgements; 0: DefaultRing
}

// DefaultRing has room for some 3,600 acknowledgements between two looks at it.
const DefaultRing = 512 << 10

// namePrefix is followed by the process's number: the kernel keeps one list of
// congestion controls for the whole host.
const namePrefix = "penstock"
