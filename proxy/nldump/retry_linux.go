// Package nldump repeats netlink dumps that changes interrupt.
package nldump

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// Retry calls list again while changes interrupt its dump, up to ten times.
func Retry[T any](list func() ([]T, error)) ([]T, error) {
	for range 10 {
		all, err := list()
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return all, err
		}
	}
	return list()
}
