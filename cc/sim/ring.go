package sim

// ring is a queue that grows to what it once held and allocates no more.
type ring[T any] struct {
	buf  []T // its length is a power of two
	head int
	n    int
}

func (r *ring[T]) first() *T { return &r.buf[r.head] }

func (r *ring[T]) push(p T) {
	if r.n == len(r.buf) {
		grown := make([]T, max(64, 2*len(r.buf)))
		k := copy(grown, r.buf[r.head:])
		copy(grown[k:], r.buf[:r.head])
		r.buf, r.head = grown, 0
	}
	r.buf[(r.head+r.n)&(len(r.buf)-1)] = p
	r.n++
}

func (r *ring[T]) pop() T {
	p := r.buf[r.head]
	r.head = (r.head + 1) & (len(r.buf) - 1)
	r.n--
	return p
}
