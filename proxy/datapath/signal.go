package datapath

// Signal puts a token into a channel with room for one, unless a token is there. It never waits.
func Signal(tokens chan<- struct{}) {
	select {
	case tokens <- struct{}{}:
	default:
	}
}

// IsClosed reports whether a channel that nothing is sent to is closed.
func IsClosed(ended <-chan struct{}) bool {
	select {
	case <-ended:
		return true
	default:
		return false
	}
}
