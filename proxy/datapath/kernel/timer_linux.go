package kernel

import (
	"encoding/binary"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// timer is a timerfd in Go's netpoller. Go's own timers wake in whole
// milliseconds, so below about 2 ms they are ten times later than this.
type timer struct {
	fd   int // valid until the owner calls close; settime needs it raw
	file *os.File
	buf  [8]byte
}

func newTimer() (*timer, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create timerfd: %w", err)
	}
	return &timer{fd: fd, file: os.NewFile(uintptr(fd), "timerfd")}, nil
}

// set fires first after the given time, then once each period; a period of 0
// fires once, and both 0 not at all.
func (t *timer) set(first, period time.Duration) error {
	spec := unix.ItimerSpec{
		Value:    unix.NsecToTimespec(int64(first)),
		Interval: unix.NsecToTimespec(int64(period)),
	}
	return unix.TimerfdSettime(t.fd, 0, &spec, nil)
}

// wait blocks until the timer has fired and returns how often since last time.
func (t *timer) wait() (uint64, error) {
	if _, err := t.file.Read(t.buf[:]); err != nil {
		return 0, err
	}
	return binary.NativeEndian.Uint64(t.buf[:]), nil
}

func (t *timer) close() error { return t.file.Close() }
