package alcc

// byteQueue is a queue of bytes. Its zero value is empty.
type byteQueue struct {
	b     []byte
	start int // index of the first byte in the queue; bytes before it have been removed
}

// length returns the number of bytes in the queue.
func (q *byteQueue) length() int { return len(q.b) - q.start }

// push appends bytes. It reuses the room of removed bytes once they are more than half of b.
func (q *byteQueue) push(b []byte) {
	if q.start > len(q.b)/2 {
		q.b = q.b[:copy(q.b, q.b[q.start:])]
		q.start = 0
	}
	q.b = append(q.b, b...)
}

// first returns up to n bytes of the queue, which stay valid until the next push.
func (q *byteQueue) first(n int) []byte { return q.b[q.start : q.start+min(n, q.length())] }

// removeFirst removes n bytes. It frees the memory of a queue that is empty then.
func (q *byteQueue) removeFirst(n int) {
	if q.start += n; q.start == len(q.b) {
		*q = byteQueue{}
	}
}
