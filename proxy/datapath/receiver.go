package datapath

import (
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// Receiver is implemented by legs that can bound what they take in from their peer
// before somebody reads it.
type Receiver interface {
	// LimitReceive bounds the memory for it, overhead included. It returns false where
	// it leaves that to the transport, which it does with a bound as high as the
	// transport's own.
	LimitReceive(n cc.Bytes) (limited bool)

	// LeastRTT is the least round trip to the peer so far.
	LeastRTT() time.Duration
}

// Advertiser is implemented by legs whose transport tells what has come from the peer, and
// lets the window that it advertises be bounded. One goroutine at a time calls them.
type Advertiser interface {
	// Arrivals tells what has come so far; At and Unread are left to the caller. Its error
	// says why the peer's queue cannot be seen: then the window is not to be bounded.
	Arrivals() (flow.Arrivals, error)

	// Advertise has the transport advertise no more than a window from now on, in the
	// steps and above the least that it has; what was advertised is never taken back.
	// 0: as much as there is room for. It is to be called again after each Arrivals.
	Advertise(window cc.Bytes) error
}
