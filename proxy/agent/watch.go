package agent

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/ccp"
)

// watchAgent returns once the agent is gone, or cannot answer because our path was removed. It checks how long
// messages have been unread. While nothing is sent, or nothing is read, it probes whether the agent still listens.
func (l *Link) watchAgent(ctx context.Context) error {
	timer := time.NewTimer(probePeriod)
	defer timer.Stop()
	seen := int64(0)        // messages sent by the last check
	probed := l.cfg.Clock() // when it last decided to probe
	for probe := false; ; {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-l.wakeWatch: // the agent has Patience to read the message just sent
			timer.Reset(ccp.Patience(0))
			if l.failureCause() == nil {
				continue
			}
		case <-timer.C:
			if !l.own.isBound(l.cfg.Reply) {
				return errors.New("it answers at " + l.cfg.Reply + ", which somebody has removed or made anew")
			}
			if probe && !l.isReachable() {
				return errors.New("it listens no more at " + l.cfg.Socket)
			}
		}
		now := l.cfg.Clock()
		l.mu.Lock()
		since := l.checkUnread(now)
		idle := since == 0 && l.sent.n == seen
		hangs := since != 0 && now.Sub(max(since, probed)) >= probePeriod // perhaps another process has replaced it
		if probe = idle || hangs; probe {
			probed = now
		}
		l.watching, seen = !idle, l.sent.n
		l.mu.Unlock()
		if err := l.failureCause(); err != nil {
			return err
		}
		next := ccp.Patience(0)
		switch {
		case idle:
			next = probePeriod
		case since != 0:
			next = max(next-now.Sub(since), unreadPeriod)
		}
		timer.Reset(next)
	}
}

// failWith ends the connection because of why. l.mu is held.
func (l *Link) failWith(why error) {
	l.open, l.fd, l.failed = false, -1, why
	notifyChannel(l.wakeWatch)
}

// failureCause returns the error that has ended the connection; nil: it has not ended.
func (l *Link) failureCause() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.failed
}

// isReachable reports whether the agent still listens at its path. It connects another socket to the path: EPERM says
// that the agent's socket is connected to ours, so it exists. A path that was made anew is another agent's.
func (l *Link) isReachable() bool {
	file, err := os.Stat(l.cfg.Socket)
	if err != nil || !isSameFile(file, l.agentFile) {
		return false
	}
	err = unixConnect(l.cfg.Socket)
	return err == nil || errors.Is(err, unix.EPERM)
}

// unixConnect connects a new socket to a path, closes it again, and returns the error of the connect. ECONNREFUSED
// says that no process has the path's socket open any more.
func unixConnect(path string) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil // the error says nothing about the path
	}
	defer func() { _ = unix.Close(fd) }()
	return unix.Connect(fd, &unix.SockaddrUnix{Name: path})
}
