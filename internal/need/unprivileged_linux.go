package need

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// Unprivileged calls f on a thread that has no capabilities, and returns its error.
func Unprivileged(f func() error) error {
	failed := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		err := unix.Capset(&header, &(&[2]unix.CapUserData{})[0])
		if err == nil {
			err = f()
		}
		failed <- err
	}()
	return <-failed
}
