package sim

// Ring is a queue that grows to what it once held and allocates no more.
type Ring[T any] struct {
	buf  []T // its length is a power of two
	head int
	n    int
}

// Len is how many wait.
func (r *Ring[T]) Len() int { return r.n }

// At is the one that i others came before, which is there.
func (r *Ring[T]) At(i int) *T { return &r.buf[(r.head+i)&(len(r.buf)-1)] }

// Push adds one at the end.
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

// Pop takes the first, which is there.
func (r *Ring[T]) Pop() T {
	p := *r.At(0)
	r.head = (r.head + 1) & (len(r.buf) - 1)
	r.n--
	return p
}
