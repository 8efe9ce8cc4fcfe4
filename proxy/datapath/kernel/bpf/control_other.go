//go:build !linux || !(amd64 || arm64)

package bpf

import "fmt"

// Check says that there is no Control here.
func Check() error {
	return fmt.Errorf("%w: there is a program for Linux on amd64 and arm64 only", ErrUnsupported)
}
