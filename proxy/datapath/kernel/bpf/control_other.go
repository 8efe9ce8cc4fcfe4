//go:build !linux

package bpf

import "fmt"

// Check says that there is no Control here.
func Check() error {
	return fmt.Errorf("%w: it is Linux that it is for", ErrUnsupported)
}
