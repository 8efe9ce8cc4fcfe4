package agent

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/ccp"
)

// watchAgent looks since when messages have been unread, while any are; whether the agent can still answer; and
// whether it is still there, while nothing is sent to it or nothing that was sent is read.
func (l *Link) watchAgent(ctx context.Context) error {
	timer := time.NewTimer(probes)
	defer timer.Stop()
	seen := int64(0)       // messages that had been sent when it looked
	tried := l.cfg.Clock() // when it last decided to look whether the agent is there
	for quiet := false; ; {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-l.kick: // what was just sent has its time
			timer.Reset(ccp.Patience(0))
			if l.failureCause() == nil {
				continue
			}
		case <-timer.C:
			if !l.own.isBound(l.cfg.Reply) {
				return errors.New("it answers at " + l.cfg.Reply + ", which somebody has removed or made anew")
			}
			if quiet && !l.isReachable() {
				return errors.New("it listens no more at " + l.cfg.Socket)
			}
		}
		now := l.cfg.Clock()
		l.mu.Lock()
		since := l.checkUnread(now)
		idle := since == 0 && l.sent.n == seen
		hangs := since != 0 && now.Sub(max(since, tried)) >= probes // another may have taken its place
		if quiet = idle || hangs; quiet {
			tried = now
		}
		l.looking, seen = !idle, l.sent.n
		l.mu.Unlock()
		if err := l.failureCause(); err != nil {
			return err
		}
		next := ccp.Patience(0)
		switch {
		case idle:
			next = probes
		case since != 0:
			next = max(next-now.Sub(since), looks)
		}
		timer.Reset(next)
	}
}

// failWith ends the connection. l.mu is held.
func (l *Link) failWith(why error) {
	l.open, l.fd, l.failed = false, -1, why
	notifyChannel(l.kick)
}

// failureCause is what has ended the connection.
func (l *Link) failureCause() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.failed
}

// isReachable tries the agent's path with a socket of its own, unless another agent has made that path anew. One
// that is connected to ours (EPERM) is there, too.
func (l *Link) isReachable() bool {
	at, err := os.Stat(l.cfg.Socket)
	if err != nil || !isSameFile(at, l.there) {
		return false
	}
	err = unixConnect(l.cfg.Socket)
	return err == nil || errors.Is(err, unix.EPERM)
}

// unixConnect connects a socket of its own to a path, for as long as it takes to see how that
// goes: ECONNREFUSED says that no process has it open any more.
func unixConnect(path string) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil // which says nothing about the path
	}
	defer func() { _ = unix.Close(fd) }()
	return unix.Connect(fd, &unix.SockaddrUnix{Name: path})
}
