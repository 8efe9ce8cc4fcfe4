package agent

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// events waits until a socket can be read or written, once for each call of armOnce. If Go's poller watched the
// socket, it would wake a thread for each message that comes, and for each that the other side reads.
type events struct {
	file *os.File // of an epoll instance, which Go's poller watches
	raw  syscall.RawConn
	fd   int // file's
}

// newEvents watches a socket by an epoll instance of its own, so that a goroutine can wait for it as for a file.
func newEvents(socket int) (*events, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	err = unix.EpollCtl(fd, unix.EPOLL_CTL_ADD, socket, &unix.EpollEvent{Events: unix.EPOLLONESHOT})
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("epoll: %w", err)
	}
	e := &events{file: os.NewFile(uintptr(fd), "epoll"), fd: fd}
	if e.raw, err = e.file.SyscallConn(); err != nil {
		e.closeFile()
		return nil, err
	}
	return e, nil
}

// armOnce asks for one event of what (EPOLLIN, EPOLLOUT). It replaces an earlier call.
func (e *events) armOnce(socket int, what uint32) {
	_ = unix.EpollCtl(e.fd, unix.EPOLL_CTL_MOD, socket, &unix.EpollEvent{Events: what | unix.EPOLLONESHOT})
}

// waitForEvent waits for the event.
func (e *events) waitForEvent() error {
	var failed error
	err := e.raw.Read(func(fd uintptr) bool {
		var got [1]unix.EpollEvent
		n, err := unix.EpollWait(int(fd), got[:], 0)
		failed = err
		return n > 0 || err != nil
	})
	return errors.Join(failed, err)
}

// closeFile ends the watch. The socket itself stays open.
func (e *events) closeFile() { _ = e.file.Close() }
