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

	"golang.org/x/sys/unix"
)

const (
	// startPatience is how long a new process may take from asking to serving.
	startPatience = 2 * time.Minute
	// reportEvery is the time between two reports of a process that drains.
	reportEvery = 200 * time.Millisecond
)

// Offer lets another process take over from a running proxy.
type Offer struct {
	// Sockets returns descriptors of the listening sockets, which the Offer closes. stays describes what cannot be
	// taken over.
	Sockets func() (sockets Sockets, stays []string, err error)
	// Leave makes the proxy stop accepting, and drain.
	Leave func(pid int)
	// Open returns how many connections are left.
	Open func() int
	// Left returns for how long they are kept; 0: as long as they last.
	Left func() time.Duration
	// Park takes established connections out of service. Without FDs in b there are none at present. settle is called
	// once it is known which of them the new process serves; nil: none. last: no further batch follows. A nil Park
	// means that no connections move.
	Park func() (b Batch, settle func(adopted []bool, last bool))
	Log  *slog.Logger

	takesBatches bool // the new process has asked for batches
}

// Listen listens at path, where it replaces a socket of another process. The file stays when the process ends.
func Listen(path string) (*net.UnixListener, error) {
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() != fs.ModeSocket {
		return nil, fmt.Errorf("takeover: %s is there and is no socket; remove it", path)
	}
	// The socket is made beside path and renamed, so that there is always one to connect to.
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

// Serve answers processes that ask, one after the other, until ctx is done. Once one has taken over, Serve answers no
// other: it passes connections to that one, and reports how many are left. It closes ln.
func (o *Offer) Serve(ctx context.Context, ln *net.UnixListener) {
	stop := context.AfterFunc(ctx, func() { _ = ln.Close() })
	defer stop()
	defer ln.Close()
	for {
		conn, err := ln.AcceptUnix()
		if err != nil {
			return // ctx is done
		}
		pid, err := o.answerUntilBegin(ctx, conn)
		if err == nil {
			_ = ln.Close() // another process that asks is refused at once
			o.Leave(pid)
			o.reportDrain(ctx, conn)
			return
		}
		o.Log.Warn("a process asked to take over and did not; this one goes on", "pid", pid, "err", err)
		_ = sendMessage(conn, message{Step: stepRefused, Reason: err.Error()})
		_ = conn.Close()
	}
}

// reportDrain passes connections to the new process and reports how many are left, until ctx is done or that process
// has gone. It closes conn.
func (o *Offer) reportDrain(ctx context.Context, conn *net.UnixConn) {
	defer conn.Close()
	tick := time.NewTicker(reportEvery)
	defer tick.Stop()
	for {
		waitAtMost(conn, patience)
		err := sendMessage(conn, message{Step: stepDraining, Open: o.Open(), Left: o.Left()})
		if err == nil {
			err = o.sendBatches(conn)
		}
		if err != nil && ctx.Err() == nil {
			o.Log.Warn("the process that has taken over says no more; what is open here drains", "open", o.Open(), "err", err)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// sendBatches passes all connections that can move to the new process.
func (o *Offer) sendBatches(conn *net.UnixConn) error {
	for o.Park != nil && o.takesBatches {
		b, settle := o.Park()
		if len(b.FDs) == 0 {
			return nil
		}
		adopted, err := exchangeBatch(conn, b)
		settle(adopted, err != nil)
		if err != nil {
			return err
		}
	}
	return nil
}

// exchangeBatch sends a batch and returns which of its connections the other process serves. After an error the
// conversation is over.
func exchangeBatch(conn *net.UnixConn, b Batch) (adopted []bool, err error) {
	m, err := b.makeMessage()
	if err != nil {
		return nil, err
	}
	defer unix.Close(m.fds[0]) //nolint:errcheck // the other process has its own
	waitAtMost(conn, patience)
	if err = sendMessage(conn, m); err == nil {
		var answer message
		if answer, err = expectStep(conn, stepAdopted); err == nil {
			return answer.Adopted, nil
		}
	}
	// The other process may be about to answer. After the shutdown it has answered, or it cannot any more.
	_ = errors.Join(conn.CloseWrite(), conn.CloseRead())
	waitAtMost(conn, patience)
	for range 2 { // a process that died before it read all leaves an error in front of its last message
		if answer, lastErr := expectStep(conn, stepAdopted); lastErr == nil {
			return answer.Adopted, err
		}
	}
	return nil, err
}

// answerUntilBegin holds a conversation up to begin. After an error the proxy continues as before.
func (o *Offer) answerUntilBegin(ctx context.Context, conn *net.UnixConn) (pid int, err error) {
	waitAtMost(conn, startPatience)
	stop := context.AfterFunc(ctx, func() { waitAtMost(conn, 0) })
	defer stop()
	if pid, err = checkPeer(conn); err != nil {
		return pid, err
	}
	m, err := expectStep(conn, stepAsk)
	if err != nil {
		return pid, err
	}
	if m.Version != Version {
		return pid, fmt.Errorf("process %d speaks version %d, not %d", pid, m.Version, Version)
	}
	o.takesBatches = m.Batches
	if err := o.sendSockets(conn); err != nil {
		return pid, err
	}
	_, err = expectStep(conn, stepBegin)
	return pid, err
}

// sendSockets sends the listening sockets, in several messages if there are many.
func (o *Offer) sendSockets(conn *net.UnixConn) error {
	all, stays, err := o.Sockets()
	defer func() { all.CloseAll() }()
	if err != nil {
		return err
	}
	for rest := all; ; {
		some := rest[:min(len(rest), socketsAtOnce)]
		rest = rest[len(some):]
		err := sendMessage(conn, message{
			Step: stepSockets, Version: Version, PID: os.Getpid(), Sockets: some, More: len(rest) > 0, Stays: stays,
		})
		if err != nil || len(rest) == 0 {
			return err
		}
	}
}
