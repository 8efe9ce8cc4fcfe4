package netstack

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip"
)

// queue holds the packets that wait to be collected.
type queue struct {
	most  int           // packets; what comes beyond it is lost
	ready chan struct{} // one is in it while packets wait
	ended chan struct{}
	drops *atomic.Uint64

	mu      sync.Mutex
	waiting []outgoing
	packets int // once cut into segments
	over    bool
}

func newQueue(most int, drops *atomic.Uint64) *queue {
	return &queue{most: most, ready: make(chan struct{}, 1), ended: make(chan struct{}), drops: drops}
}

// enqueue appends a packet, or as many of its segments as there is room for. over: the queue is closed.
func (q *queue) enqueue(o outgoing) (fits, over bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.over {
		return false, true
	}
	n := o.end
	if o.end = min(n, q.most-q.packets); o.end < n {
		q.drops.Add(uint64(n - o.end))
	}
	if o.end > 0 {
		o.pkt.IncRef()
		q.waiting = append(q.waiting, o)
		q.packets += o.end
		q.wakeReader()
	}
	return o.end > 0 || n == 0, false
}

func (q *queue) wakeReader() {
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

// dequeue moves what waits into pieces, which own it then, up to most segments, and returns how
// many pieces there are.
func (q *queue) dequeue(pieces []outgoing, most int) (n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	whole := 0
	for n < len(pieces) && n < len(q.waiting) && most > 0 {
		o := &q.waiting[n]
		p := *o
		p.end = min(o.end, o.next+most)
		most -= p.end - p.next
		q.packets -= p.end - p.next
		pieces[n] = p
		n++
		if p.end < o.end {
			o.pkt.IncRef()
			o.next = p.end
			break
		}
		whole++
	}
	q.waiting = slices.Delete(q.waiting, 0, whole)
	if len(q.waiting) > 0 {
		q.wakeReader() // another may collect, too
	}
	return n
}

// waitAndDequeue is take once something waits; 0: the queue is closed, or ctx is done.
func (q *queue) waitAndDequeue(ctx context.Context, pieces []outgoing, most int) int {
	for {
		if n := q.dequeue(pieces, most); n > 0 {
			return n
		}
		select {
		case <-q.ready:
		case <-q.ended:
			return 0
		case <-ctx.Done():
			return 0
		}
	}
}

func (q *queue) isEmpty() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting) == 0
}

// closeQueue drops what waits; false: the queue was closed before.
func (q *queue) closeQueue() bool {
	q.mu.Lock()
	again := q.over
	q.over = true
	q.mu.Unlock()
	if again {
		return false
	}
	q.dropAll()
	close(q.ended)
	return true
}

// dropAll drops what waits, and returns how many packets that was.
func (q *queue) dropAll() (n int) {
	var p [1]outgoing
	for q.dequeue(p[:], q.most) > 0 {
		n += p[0].end - p[0].next
		p[0].pkt.DecRef()
	}
	return n
}

// Outlet is a queue of its own for the packets to some addresses.
type Outlet struct {
	*queue
	stack *Stack
	addrs []tcpip.Address
}

// Outlet opens an outlet in which at most most packets wait. An address has one outlet at a time.
func (s *Stack) Outlet(most int, addrs []netip.Addr) *Outlet {
	o := &Outlet{queue: newQueue(most, &s.wire.drops), stack: s}
	s.wire.mu.Lock()
	defer s.wire.mu.Unlock()
	for _, a := range addrs {
		o.addrs = append(o.addrs, tcpip.AddrFromSlice(a.AsSlice()))
		s.wire.outlets[o.addrs[len(o.addrs)-1]] = o.queue
	}
	return o
}

// Close ends an outlet: what waits is lost, and packets to its addresses go to Stack.Collect.
func (o *Outlet) Close() {
	o.stack.wire.mu.Lock()
	for _, a := range o.addrs {
		delete(o.stack.wire.outlets, a)
	}
	o.stack.wire.mu.Unlock()
	o.closeQueue()
}

// Collect waits for packets that are to go into the tunnel and copies as many
// as there are, at most len(bufs), each into its buffer from offset on. It sets
// their lengths in sizes, in bytes, and returns how many there are.
func (o *Outlet) Collect(ctx context.Context, bufs [][]byte, sizes []int, offset int) (n int, err error) {
	return o.stack.collectFrom(ctx, o.queue, bufs, sizes, offset)
}

// Collect is like Outlet.Collect, for the packets that no outlet is for.
func (s *Stack) Collect(ctx context.Context, bufs [][]byte, sizes []int, offset int) (n int, err error) {
	return s.collectFrom(ctx, s.wire.queue, bufs, sizes, offset)
}

func (s *Stack) collectFrom(
	ctx context.Context, from *queue, bufs [][]byte, sizes []int, offset int,
) (n int, err error) {
	var batch [128]outgoing
	took := from.waitAndDequeue(ctx, batch[:], len(bufs))
	if took == 0 {
		return 0, fmt.Errorf("netstack: collect: %w", os.ErrClosed)
	}
	for _, o := range batch[:took] {
		for range o.copySegments(bufs[n:], sizes[n:], offset) {
			s.collected.Add(uint64(sizes[n]))
			n++
		}
		o.pkt.DecRef()
	}
	return n, nil
}
