package flow

import (
	"math"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// CoDelInterval is the usual interval of CoDel (RFC 8289 §4.2): a long round trip.
const CoDelInterval = 100 * time.Millisecond

// CoDel is the state of RFC 8289 §5 for one queue.
type CoDel struct {
	Target time.Duration // that packets may stand for
	Spare  cc.Bytes      // a queue with no more behind a packet is no standing one

	above      cc.Time // when the delay will have been above the target for an interval; 0: it is not
	next       cc.Time // when to signal again, while signalling
	count      int     // signals since it began
	last       int     // count when it last began
	signalling bool
}

// Signals reports whether the packet at the head, which has waited for sojourn in a
// queue with so many bytes behind it, is to tell its sender of congestion: by a drop
// or, where it allows that, a mark.
func (c *CoDel) Signals(now cc.Time, sojourn time.Duration, behind cc.Bytes) bool {
	if sojourn < c.Target || behind <= c.Spare {
		c.above, c.signalling = 0, false
		return false
	}
	if c.above == 0 {
		c.above = now.Add(CoDelInterval)
	}
	switch {
	case now < c.above:
		c.signalling = false
		return false
	case !c.signalling:
		c.signalling = true
		since := c.count - c.last
		c.count = 1
		if since > 1 && now.Sub(c.next) < 16*CoDelInterval { // it did so a moment ago: go on from there
			c.count = since
		}
		c.last = c.count
		c.next = now
	case now < c.next:
		return false
	default:
		c.count++
	}
	c.next = c.next.Add(time.Duration(float64(CoDelInterval) / math.Sqrt(float64(c.count))))
	return true
}
