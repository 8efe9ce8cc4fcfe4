package sim

// Ring is a queue. Its buffer grows and never shrinks, so a steady load allocates nothing.
type Ring[T any] struct {
	buf  []T // its length is a power of two
	head int
	n    int
}

// Len is the number of elements.
func (r *Ring[T]) Len() int { return r.n }

// At returns the element behind the i oldest ones; there must be one.
func (r *Ring[T]) At(i int) *T { return &r.buf[(r.head+i)&(len(r.buf)-1)] }

// Push adds an element behind all others.
func (r *Ring[T]) Push(p T) {
	if r.n == len(r.buf) {
		grown := make([]T, max(64, 2*len(r.buf)))
		k := copy(grown, r.buf[r.head:])
		copy(grown[k:], r.buf[:r.head])
		r.buf, r.head = grown, 0
	}
	r.n++
	*r.At(r.n - 1) = p
}

// Pop removes the oldest element and returns it; there must be one.
func (r *Ring[T]) Pop() T {
	p := *r.At(0)
	r.head = (r.head + 1) & (len(r.buf) - 1)
	r.n--
	return p
}
