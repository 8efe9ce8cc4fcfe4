package datapath

import (
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// Receiver is implemented by legs that can bound what they take in from their peer unread.
type Receiver interface {
	// LimitReceive bounds the memory for it to n bytes, overhead included. It returns false if the transport's own
	// bound is in force, as it is if n is no lower.
	LimitReceive(n cc.Bytes) (limited bool)

	// LeastRTT is the least round trip to the peer so far.
	LeastRTT() time.Duration
}

// Advertiser is implemented by legs over a transport that counts what comes from the peer, and that can bound the
// window that it advertises. One goroutine at a time calls the methods.
type Advertiser interface {
	// Arrivals returns what has come so far; At and Unread are left to the caller. Its error says why the peer's queue
	// cannot be seen. Then the window must not be bounded.
	Arrivals() (flow.Arrivals, error)

	// Advertise has the transport advertise no more than a window from now on, rounded up to the transport's steps and
	// to its least window. What was advertised is never taken back. 0: as much as there is room for. Call it again
	// after each Arrivals.
	Advertise(window cc.Bytes) error
}
