package datapath

import "github.com/penstock-net/penstock/cc"

// Ending is implemented by legs that can tell how a connection ends. A relay
// needs it to pass on a RST as a RST, after what came before it.
type Ending interface {
	// Undelivered returns how many of the bytes written the peer has not
	// acknowledged and still may; the end of the stream counts as one. Reset throws them away.
	Undelivered() (cc.Bytes, error)

	// Aborted reports whether the peer, or a timeout, has torn the connection down. Read cannot say so once a write
	// has returned the error: it then returns io.EOF, as after the peer's orderly end. Aborted is meaningful until
	// CloseWrite.
	Aborted() bool

	// InProcess reports whether the transport runs in this process. Then what it has not delivered when the process
	// ends is lost, also after Close.
	InProcess() bool
}
