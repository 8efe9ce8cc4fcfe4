package happyeyeballs

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
)

// maxNamed is how many failed attempts of each family an error names.
const maxNamed = 3

// Error tells why a host could not be reached. It wraps the failure of the last attempt,
// preferably of one that left this machine; where there was no attempt, that of a lookup.
type Error struct {
	Host string

	lookups [2]error
	named   [2][]error
	failed  [2]int // attempts
	last    error
}

// addAttempt notes a failed attempt.
func (e *Error) addAttempt(addr netip.Addr, err error) {
	f := familyOf(addr)
	e.failed[f]++
	if len(e.named[f]) < maxNamed {
		e.named[f] = append(e.named[f], err)
	}
	if e.last == nil || isLocal(e.last) || !isLocal(err) {
		e.last = err
	}
}

// isLocal reports whether an attempt failed for lack of an address or a route of its family.
func isLocal(err error) bool {
	return errors.Is(err, syscall.EADDRNOTAVAIL) || errors.Is(err, syscall.ENETUNREACH) ||
		errors.Is(err, syscall.EAFNOSUPPORT)
}

// Error implements error.
func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "no address of %s could be reached", e.Host)
	said := false
	for _, f := range []family{ipv6, ipv4} {
		reasons := e.named[f]
		if e.lookups[f] != nil {
			reasons = []error{e.lookups[f]}
		}
		for i, err := range reasons {
			fmt.Fprintf(&b, "; %v: %v", f, err)
			if more := e.failed[f] - maxNamed; i == maxNamed-1 && more > 0 {
				fmt.Fprintf(&b, "; and %d more", more)
			}
			said = true
		}
	}
	if !said {
		fmt.Fprintf(&b, ": %v", e.last)
	}
	return b.String()
}

// Unwrap returns the failure that decided.
func (e *Error) Unwrap() error { return e.last }
