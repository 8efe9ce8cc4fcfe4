package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

const (
	// markEvery is how many requests have one that is marked. With fewer, a lost marked request and a lost other one
	// would be taken for each other too often.
	markEvery      = 8
	maxUnanswered  = 64              // requests that a Numbering remembers
	numberingLimit = 3 * time.Second // an older request has no answer any more
)

// Numbering finds which request an answer is to, where answers carry no number, as those of ARP (RFC 826). Answers come
// in the order of their requests, and some are lost. One request in markEvery is marked, and so is its answer: it shows
// that requests before it were lost. Until then an answer counts as one to an earlier request, so it acknowledges too
// little, never too much.
//
// T is what the owner knows a request by. The zero value is ready for use.
type Numbering[T any] struct {
	requests []numberedRequest[T] // without an answer, the oldest first
	sent     int
}

// numberedRequest is a request without an answer.
type numberedRequest[T any] struct {
	value  T
	marked bool
	at     cc.Time
}

// Ask remembers a request that is sent now, and reports whether to mark it.
func (n *Numbering[T]) Ask(now cc.Time, value T) (marked bool) {
	if len(n.requests) == maxUnanswered {
		n.requests = n.requests[1:]
	}
	marked = n.sent%markEvery == 0
	n.sent++
	n.requests = append(n.requests, numberedRequest[T]{value, marked, now})
	return marked
}

// Answer returns the request that an answer is to, the oldest of its kind; false: there is none.
func (n *Numbering[T]) Answer(now cc.Time, marked bool) (value T, ok bool) {
	for i, r := range n.requests {
		if r.marked == marked && now.Sub(r.at) <= numberingLimit {
			n.requests = n.requests[i+1:]
			return r.value, true
		}
	}
	return value, false
}
