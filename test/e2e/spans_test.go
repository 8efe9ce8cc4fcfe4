//go:build linux

package e2e

import (
	"cmp"
	"slices"
)

// span is a run of a stream's bytes, hi excluded.
type span struct{ lo, hi int64 }

// spans are runs that neither overlap nor touch, in order.
type spans []span

// add puts a run in.
func (s *spans) add(n span) {
	if n.lo >= n.hi {
		return
	}
	first, _ := slices.BinarySearchFunc(*s, n.lo, func(p span, lo int64) int { return cmp.Compare(p.hi, lo) })
	last := first
	for last < len(*s) && (*s)[last].lo <= n.hi {
		n.lo, n.hi = min(n.lo, (*s)[last].lo), max(n.hi, (*s)[last].hi)
		last++
	}
	*s = slices.Replace(*s, first, last, n)
}

// trim takes out all below lo.
func (s *spans) trim(lo int64) {
	n := 0
	for n < len(*s) && (*s)[n].hi <= lo {
		n++
	}
	*s = slices.Delete(*s, 0, n)
	if len(*s) > 0 {
		(*s)[0].lo = max((*s)[0].lo, lo)
	}
}

// size is how many bytes there are.
func (s spans) size() (n int64) {
	for _, p := range s {
		n += p.hi - p.lo
	}
	return n
}

// within is how many bytes there are of w.
func (s spans) within(w span) (n int64) {
	first, _ := slices.BinarySearchFunc(s, w.lo, func(p span, lo int64) int { return cmp.Compare(p.hi, lo) })
	for _, p := range s[first:] {
		if p.lo >= w.hi {
			break
		}
		n += max(0, min(p.hi, w.hi)-max(p.lo, w.lo))
	}
	return n
}
