//go:build linux

package netlab

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// Direction of a path.
type Direction uint8

// Down runs from the path's far end to its near end, as a download does.
const (
	Down Direction = iota
	Up
)

func (d Direction) String() string {
	if d == Up {
		return "up"
	}
	return "down"
}

// DataSize is the IP length from which a packet counts as carrying data; pure
// acknowledgements and handshakes stay below.
const DataSize = 500

// dropHeld marks a packet that the emulator had no room to hold: its own bound,
// not the link's queue.
const dropHeld sim.Drop = math.MaxUint8

// Values of entry.late other than nanoseconds.
const (
	latePending int32 = math.MinInt32 // not handed over yet
	lateFailed  int32 = latePending + 1
)

// entry is what is remembered of one packet: 40 bytes, no pointers, so that the
// garbage collector never looks inside.
type entry struct {
	at, departs, arrives cc.Time // departs and arrives are 0 for a dropped packet
	late                 int32   // ns after arrives that it was handed over; written once, atomically
	size                 uint16
	dir                  Direction
	drop                 sim.Drop
	host                 uint16 // that it is for or from
}

const entriesPerBlock = 1 << 14

type block [entriesPerBlock]entry

// record is an append-only list with one writer and any number of readers. It
// grows by whole blocks, the next one made ahead of need off the writer's thread.
type record struct {
	mu     sync.Mutex // guards blocks against readers; the writer takes it once per block
	blocks []*block
	count  atomic.Int64 // published entries

	cur   *block
	spare chan *block
	want  chan struct{}
}

func newRecord() *record {
	r := &record{spare: make(chan *block, 1), want: make(chan struct{}, 1)}
	r.want <- struct{}{}
	return r
}

// supply makes spare blocks until quit.
func (r *record) supply(quit <-chan struct{}) {
	for {
		select {
		case <-r.want:
			b := new(block)
			for i := range b { // touch the pages here rather than in the emulator
				b[i].late = latePending
			}
			r.spare <- b
		case <-quit:
			return
		}
	}
}

// add publishes e and returns where it lives.
func (r *record) add(e entry) *entry {
	n := r.count.Load()
	i := n % entriesPerBlock
	if i == 0 {
		r.cur = <-r.spare
		r.want <- struct{}{}
		r.mu.Lock()
		r.blocks = append(r.blocks, r.cur)
		r.mu.Unlock()
	}
	p := &r.cur[i]
	*p = e
	r.count.Store(n + 1)
	return p
}

// settle notes how late the packet was handed over.
func (e *entry) settle(late time.Duration) {
	atomic.StoreInt32(&e.late, int32(min(max(late, 0), math.MaxInt32)))
}

// fail notes that the packet could not be handed over.
func (e *entry) fail() { atomic.StoreInt32(&e.late, lateFailed) }

// lateness returns how late the packet was handed over, and false when it was not.
func (e *entry) lateness() (time.Duration, bool) {
	v := atomic.LoadInt32(&e.late)
	return time.Duration(v), v >= 0
}

// published returns how many entries there are, and where each is. They are in the order in which their fates were
// settled: that of arrival, but in a cell.
func (r *record) published() (count int64, at func(n int64) *entry) {
	count = r.count.Load()
	r.mu.Lock()
	blocks := r.blocks
	r.mu.Unlock()
	return count, func(n int64) *entry { return &blocks[n/entriesPerBlock][n%entriesPerBlock] }
}

// since calls note for each entry from number n on, and returns the number of the next.
func (r *record) since(n int64, note func(*entry)) int64 {
	end, at := r.published()
	for ; n < end; n++ {
		note(at(n))
	}
	return n
}

// all calls yield for each entry.
func (r *record) all(yield func(*entry) bool) {
	end, at := r.published()
	for n := int64(0); n < end && yield(at(n)); n++ {
	}
}

// from calls yield for each entry from the first on that arrived at the moment or later.
func (r *record) from(moment cc.Time) func(yield func(*entry) bool) {
	return func(yield func(*entry) bool) {
		end, at := r.published()
		first := end
		for first > 0 && at(first-1).at >= moment {
			first--
		}
		for ; first < end && yield(at(first)); first++ {
		}
	}
}
