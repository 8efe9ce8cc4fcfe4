package datapath

import "github.com/penstock-net/penstock/cc"

// Ending is implemented by legs that can tell how a connection ends. A relay
// needs it to pass on a RST as a RST, after what came before it.
type Ending interface {
	// Undelivered returns how many of the bytes written the peer has not
	// acknowledged and still may; the end of the stream counts as one. Reset throws them away.
	Undelivered() (cc.Bytes, error)

	// Aborted tells a connection that the peer, or a timeout, has torn down
	// from one that the peer has finished sending on: once a write has
	// collected the error, Read says io.EOF for both. It is meaningful until
	// CloseWrite.
	Aborted() bool

	// InProcess tells whether the transport runs in this process: what it has not
	// delivered when that ends is lost, Close or not.
	InProcess() bool
}
