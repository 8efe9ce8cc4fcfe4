package takeover

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"time"
)

const (
	// startPatience is how long a new process may take from asking to serving.
	startPatience = 2 * time.Minute
	// reportEvery is the time between two reports of a process that drains.
	reportEvery = 200 * time.Millisecond
)

// Offer is what a running proxy lets another process take over.
type Offer struct {
	// Sockets returns descriptors of the listening sockets, which the Offer closes, and in words what cannot be taken
	// over.
	Sockets func() (sockets []Socket, stays []string, err error)
	// Leave has the proxy accept nothing any more. It drains.
	Leave func(pid int)
	// Open returns how many connections are left.
	Open func() int
	Log  *slog.Logger
}

// Listen listens at path, where it replaces a socket of another process. The file stays when the process ends.
func Listen(path string) (*net.UnixListener, error) {
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() != fs.ModeSocket {
		return nil, fmt.Errorf("takeover: %s is there and is no socket; remove it", path)
	}
	// It is made beside its place and moved there, so that there is always one to connect to.
	fresh := fmt.Sprintf("%s.%d", path, os.Getpid())
	_ = os.Remove(fresh)
	ln, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: fresh, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("takeover: %w", err)
	}
	ln.SetUnlinkOnClose(false)
	if err := errors.Join(os.Chmod(fresh, 0o600), os.Rename(fresh, path)); err != nil {
		return nil, errors.Join(fmt.Errorf("takeover: %w", err), ln.Close(), os.Remove(fresh))
	}
	return ln, nil
}

// Serve answers processes that ask, one after the other, until ctx is done. Once one has taken over it only
// reports to that one how many connections are left. It closes ln.
func (o *Offer) Serve(ctx context.Context, ln *net.UnixListener) {
	stop := context.AfterFunc(ctx, func() { _ = ln.Close() })
	defer stop()
	defer ln.Close()
	for {
		conn, err := ln.AcceptUnix()
		if err != nil {
			return // ctx is done
		}
		pid, err := o.answer(ctx, conn)
		if err == nil {
			_ = ln.Close() // another process that asks is refused at once
			o.Leave(pid)
			o.reportDrain(ctx, conn)
			return
		}
		o.Log.Warn("a process asked to take over and did not; this one goes on", "pid", pid, "err", err)
		_ = send(conn, message{Step: stepRefused, Reason: err.Error()})
		_ = conn.Close()
	}
}

// reportDrain says how many connections are left, until ctx is done or the new process has gone. It closes conn.
func (o *Offer) reportDrain(ctx context.Context, conn *net.UnixConn) {
	defer conn.Close()
	tick := time.NewTicker(reportEvery)
	defer tick.Stop()
	for {
		waitAtMost(conn, patience)
		if send(conn, message{Step: stepDraining, Open: o.Open()}) != nil {
			return // this process drains all the same
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// answer goes through a conversation up to begin. After an error all is as before.
func (o *Offer) answer(ctx context.Context, conn *net.UnixConn) (pid int, err error) {
	waitAtMost(conn, startPatience)
	stop := context.AfterFunc(ctx, func() { waitAtMost(conn, 0) })
	defer stop()
	if pid, err = checkPeer(conn); err != nil {
		return pid, err
	}
	m, err := expect(conn, stepAsk)
	if err != nil {
		return pid, err
	}
	if m.Version != Version {
		return pid, fmt.Errorf("process %d speaks version %d, not %d", pid, m.Version, Version)
	}
	if err := o.sendSockets(conn); err != nil {
		return pid, err
	}
	_, err = expect(conn, stepBegin)
	return pid, err
}

// sendSockets sends all sockets.
func (o *Offer) sendSockets(conn *net.UnixConn) error {
	all, stays, err := o.Sockets()
	defer closeSockets(all)
	if err != nil {
		return err
	}
	for rest := all; ; {
		some := rest[:min(len(rest), socketsAtOnce)]
		rest = rest[len(some):]
		err := send(conn, message{
			Step: stepSockets, Version: Version, PID: os.Getpid(), Sockets: some, More: len(rest) > 0, Stays: stays,
		})
		if err != nil || len(rest) == 0 {
			return err
		}
	}
}
