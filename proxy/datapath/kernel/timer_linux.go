package kernel

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// timer is a timerfd that a thread waits for by a blocking read. Go's poller, and its
// own timers, make a goroutine runnable only, behind all that are so already.
type tickTimer struct{ fd int }

func newTimer() (tickTimer, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC)
	if err != nil {
		return tickTimer{}, fmt.Errorf("create timerfd: %w", err)
	}
	return tickTimer{fd}, nil
}

// fireAfter fires once after the given time, instead of whatever was set before.
func (t tickTimer) fireAfter(after time.Duration) error {
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(max(1, after)))}
	return unix.TimerfdSettime(t.fd, 0, &spec, nil)
}

// waitUntilFired blocks until the timer has fired.
func (t tickTimer) waitUntilFired() error {
	var count [8]byte
	for {
		_, err := unix.Read(t.fd, count[:])
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func (t tickTimer) closeTimer() error { return unix.Close(t.fd) }
