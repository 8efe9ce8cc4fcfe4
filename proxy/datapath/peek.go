package datapath

// Peeker is implemented by legs that can show what has come without taking it.
type Peeker interface {
	// Peek waits until bytes have come and calls look with all that there are, up to len(b) of
	// them and in b; and again whenever there are more, until look returns true or there cannot
	// be more: b is full, or the peer has ended. It returns nil then, without having called look
	// where there was nothing. A read deadline, or closing the leg, makes it fail. Read returns
	// the same bytes afterwards.
	Peek(b []byte, look func([]byte) bool) error
}
