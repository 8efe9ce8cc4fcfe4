package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

const (
	probeEvery = time.Second // between two requests to a host that is not known to answer
	maxProbes  = 3           // requests without an answer; after them the host is asked once in ProbeLater
	// ProbeLater is the time between two requests to a host that has answered none.
	ProbeLater = 30 * time.Second
)

// Probing says when a host that is not known to answer echo requests is asked whether it does. The zero value asks at
// once.
type Probing struct {
	Asked int     // requests without an answer
	Next  cc.Time // when the next request is due
}

// ProbingLater returns the state for a host that does not answer any more.
func ProbingLater(now cc.Time) Probing { return Probing{maxProbes, now.Add(ProbeLater)} }

// Ask reports whether a request is due, and counts it if it is.
func (p *Probing) Ask(now cc.Time) bool {
	if now < p.Next {
		return false
	}
	p.Asked++
	p.Next = now.Add(probeEvery)
	if p.Asked >= maxProbes {
		p.Next = now.Add(ProbeLater)
	}
	return true
}
