package datapath

import "github.com/penstock-net/penstock/cc"

// Receiver is implemented by legs that can bound what they take in from their peer
// before somebody reads it. They begin with a bound.
type Receiver interface {
	// LimitReceive bounds the memory for it, overhead included. It returns false where
	// it leaves that to the transport, which it does with a bound as high as the
	// transport's own.
	LimitReceive(n cc.Bytes) (limited bool)
}
