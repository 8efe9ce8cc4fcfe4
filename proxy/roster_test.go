package proxy

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"pgregory.net/rapid"
)

// A roster is a set in the order of numbers, whatever comes and goes, and its memory goes
// with its members.
func TestRoster(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		var got connectionList
		var want []*connection
		var last uint64
		for range rapid.IntRange(1, 2000).Draw(r, "steps") {
			if len(want) == 0 || rapid.Float64Range(0, 1).Draw(r, "which") < .55 {
				last++
				c := &connection{id: last}
				got.addConnection(c)
				want = append(want, c)
				continue
			}
			i := rapid.IntRange(0, len(want)-1).Draw(r, "who")
			got.removeConnection(want[i])
			got.removeConnection(want[i])
			want = slices.Delete(want, i, i+1)
		}
		assert.Equal(r, want, dropGone(slices.Clone(got.conns)))
		assert.LessOrEqual(r, len(got.conns), 2*len(want)+minGone)
	})
}

// BenchmarkRoster copies 10,000 connections: for so long a look at all of them holds the
// lock that connections are opened and closed under.
func BenchmarkRoster(b *testing.B) {
	var all connectionList
	for i := range 10_000 {
		all.addConnection(&connection{id: uint64(i)})
	}
	out := make([]*connection, 0, len(all.conns))
	for b.Loop() {
		out = append(out[:0], all.conns...)
	}
}
