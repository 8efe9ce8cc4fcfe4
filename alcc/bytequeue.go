package alcc

// byteQueue is a queue of bytes. Its zero value is empty.
type byteQueue struct {
	b     []byte
	start int // what stands before it has been taken
}

// length returns the number of bytes in the queue.
func (q *byteQueue) length() int { return len(q.b) - q.start }

// push appends bytes. The room of what was taken is used again once it is half of all.
func (q *byteQueue) push(b []byte) {
	if q.start > len(q.b)/2 {
		q.b = q.b[:copy(q.b, q.b[q.start:])]
		q.start = 0
	}
	q.b = append(q.b, b...)
}

// first returns up to n bytes of the queue, which stay valid until the next push.
func (q *byteQueue) first(n int) []byte { return q.b[q.start : q.start+min(n, q.length())] }

// take removes n bytes. An empty queue gives its memory back.
func (q *byteQueue) take(n int) {
	if q.start += n; q.start == len(q.b) {
		*q = byteQueue{}
	}
}
