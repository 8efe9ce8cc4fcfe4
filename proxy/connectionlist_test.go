package proxy

import (
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
)

// A connectionList is a set in the order of numbers, whatever comes and goes, and its memory goes
// with its members.
func TestConnectionList(t *testing.T) {
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

// BenchmarkConnectionList copies 10,000 connections: for so long a look at all of them holds the
// lock that connections are opened and closed under.
func BenchmarkConnectionList(b *testing.B) {
	var all connectionList
	for i := range 10_000 {
		all.addConnection(&connection{id: uint64(i)})
	}
	out := make([]*connection, 0, len(all.conns))
	for b.Loop() {
		out = append(out[:0], all.conns...)
	}
}

// An idle connection is this, its two legs, and little more. Go's allocator has pieces of 1792 and of
// 2048 bytes; one with pointers in it takes 8 more.
func TestAConnectionIsSmall(t *testing.T) {
	assert.LessOrEqual(t, unsafe.Sizeof(connection{}), uintptr(1792-8))
}

// A peer may leave its tunnel between the decision about a connection and the moment that counts it.
func TestAPeerThatHasLeftIsCountedUntilItsConnectionEnds(t *testing.T) {
	var sums totals
	vpn := access.Listener{Name: "vpn", Mode: "wireguard"}
	sums.dropStale(&config.Config{Listeners: []access.Listener{vpn}})
	route, peer := sums.countOpened(routeKey{listener: "vpn"}, "phone", "", "")
	rows, peers := sums.copyTotals()
	require.Len(t, rows, 1)
	require.Len(t, peers, 1)
	sums.countClosed(route, peer, &FlowInfo{}, Cause{}, 0)
	rows, peers = sums.copyTotals()
	assert.Len(t, rows, 1, "rule and listener are in force")
	assert.Empty(t, peers)
}
