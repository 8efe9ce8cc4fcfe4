package datapath

import "syscall"

// Control calls f with the descriptor behind raw, which stays open until f returns. The error is f's, or says that raw
// is closed.
func Control(raw syscall.RawConn, f func(fd int) error) error {
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return err
	}
	return inner
}
