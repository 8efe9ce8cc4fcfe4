package takeover

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// patience is how long the running process may take for an answer.
const patience = 10 * time.Second

// ErrRefused says that the running proxy refuses and continues.
var ErrRefused = errors.New("the running proxy refuses")

// ErrNoProxy says that no proxy to take over from runs.
var ErrNoProxy = errors.New("takeover: no proxy runs there")

// Predecessor is the running process for the new process, which takes over from it.
type Predecessor struct {
	PID     int
	conn    *net.UnixConn
	sockets Sockets       // not taken yet
	open    atomic.Int64  // connections left
	until   atomic.Int64  // when it resets open connections, in Unix nanoseconds; 0: never
	done    chan struct{} // closed: the predecessor has ended
	process *os.File      // its pidfd; nil: there is none
}

// Ask receives the sockets of the proxy that offers them at path. Close ends the conversation.
func Ask(path string) (*Predecessor, error) {
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return nil, ErrNoProxy
	case err != nil:
		return nil, fmt.Errorf("takeover: %w", err)
	}
	p := &Predecessor{conn: conn, done: make(chan struct{})}
	if err := p.askForSockets(); err != nil {
		p.Close()
		return nil, fmt.Errorf("takeover at %s: %w", path, err)
	}
	return p, nil
}

// askForSockets asks for the listening sockets and receives them.
func (p *Predecessor) askForSockets() error {
	pid, err := checkPeer(p.conn)
	if err != nil {
		return err
	}
	p.process = openPeer(p.conn, pid)
	waitAtMost(p.conn, patience)
	err = sendMessage(p.conn, message{Step: stepAsk, Version: Version, Batches: true})
	if err != nil && !errors.Is(err, syscall.EPIPE) {
		return err
	}
	for more := true; more; {
		m, err := expectStep(p.conn, stepSockets)
		if errors.Is(err, syscall.ECONNRESET) { // it has refused before it read ask; the refusal follows the error
			m, err = expectStep(p.conn, stepSockets)
		}
		if err != nil {
			return explainSilence(err)
		}
		p.PID, more = m.PID, m.More
		p.sockets = append(p.sockets, m.Sockets...)
		switch {
		case m.Version != Version:
			return fmt.Errorf("the running proxy speaks version %d, not %d; restart it", m.Version, Version)
		case len(m.Stays) > 0:
			return fmt.Errorf("process %d has what cannot be taken over: %s; restart it instead", m.PID,
				strings.Join(m.Stays, ", "))
		case len(p.sockets) > maxSockets:
			return fmt.Errorf("process %d has more than %d sockets", m.PID, maxSockets)
		}
	}
	return nil
}

// openPeer returns a pidfd of the process at the other end; nil: there is none. Before Linux 6.5 a process of another
// PID namespace, such as that of another container, has none.
func openPeer(conn *net.UnixConn, pid int) *os.File {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil
	}
	var fd int
	ctlErr := raw.Control(func(at uintptr) {
		if fd, err = unix.GetsockoptInt(int(at), unix.SOL_SOCKET, unix.SO_PEERPIDFD); err != nil {
			fd, err = unix.PidfdOpen(pid, 0)
		}
	})
	if ctlErr != nil || err != nil {
		return nil
	}
	return os.NewFile(uintptr(fd), "pidfd")
}

// explainSilence turns an error of a missing answer into words.
func explainSilence(err error) error {
	switch {
	case errors.Is(err, io.EOF):
		return errors.New("the running proxy ended the conversation; its log says why")
	case errors.Is(err, syscall.EAGAIN), isTimeout(err):
		return errors.New("the running proxy does not answer: another process is taking it over, or it hangs")
	}
	return err
}

// isTimeout reports whether a deadline has passed.
func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}

// TakeSockets removes and returns the sockets of a role for which want reports true. A nil predecessor has none.
func (p *Predecessor) TakeSockets(role string, want func(address string) bool) (taken []Socket) {
	if p == nil {
		return nil
	}
	return p.sockets.Take(role, want)
}

// Begin tells the predecessor that this process serves, so that it stops accepting. adopt prepares to serve a batch
// of its connections, and returns which it can serve. start is called once it is known whether this process serves
// them. ended is called once the predecessor has ended. After an error other than ErrRefused the predecessor may have
// got the message, so this process must serve.
func (p *Predecessor) Begin(adopt func(Batch) (adopted []bool, start func(kept bool)), ended func()) error {
	p.sockets.CloseAll()
	waitAtMost(p.conn, patience)
	err := sendMessage(p.conn, message{Step: stepBegin})
	var m message
	if err == nil {
		m, err = expectStep(p.conn, stepDraining)
	}
	if err != nil {
		return fmt.Errorf("takeover: begin: %w", err)
	}
	p.noteDrain(m)
	_ = p.conn.SetDeadline(time.Time{})
	go func() {
		defer close(p.done)
		for p.handleNext(adopt) {
		}
		p.noteDrain(message{})
		ended()
	}()
	return nil
}

// handleNext handles the next message of the predecessor. It reports whether there may be more.
func (p *Predecessor) handleNext(adopt func(Batch) (adopted []bool, start func(kept bool))) bool {
	m, err := receiveMessage(p.conn)
	switch {
	case err != nil:
		return false
	case m.Step == stepDraining:
		p.noteDrain(m)
		return true
	case m.Step != stepBatch:
		m.closeDescriptors()
		return false
	}
	b, err := m.readBatch()
	if err != nil {
		return sendMessage(p.conn, message{Step: stepAdopted}) == nil
	}
	adopted, start := adopt(b)
	err = sendMessage(p.conn, message{Step: stepAdopted, Adopted: adopted})
	start(err == nil || p.isDead())
	return err == nil
}

// noteDrain notes the contents of a message of stepDraining.
func (p *Predecessor) noteDrain(m message) {
	p.open.Store(int64(m.Open))
	var until int64
	if m.Left > 0 {
		until = time.Now().Add(m.Left).UnixNano() //nolint:forbidigo // Left must count down between two messages
	}
	p.until.Store(until)
}

// exitPatience is how long a process may take from the end of its sockets to its exit.
const exitPatience = 2 * time.Second

// isDead reports whether the predecessor has exited, or does so within exitPatience.
func (p *Predecessor) isDead() bool {
	if p.process == nil {
		return false
	}
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(p.process.Fd()), Events: unix.POLLIN}}, int(exitPatience.Milliseconds()))
	return err == nil && n > 0
}

// Open returns how many connections the predecessor still has; 0 once it has ended.
func (p *Predecessor) Open() int {
	if p == nil {
		return 0
	}
	return int(p.open.Load())
}

// Left returns for how long the predecessor keeps its connections; 0: as long as they last, or it has ended.
func (p *Predecessor) Left() time.Duration {
	until := p.until.Load()
	if until == 0 {
		return 0
	}
	return max(0, time.Until(time.Unix(0, until))) //nolint:forbidigo // see noteDrain
}

// DescribeDrain says in words how many connections the predecessor has, and for how long; empty: none.
func (p *Predecessor) DescribeDrain() string {
	n := p.Open()
	if n == 0 {
		return ""
	}
	words := fmt.Sprintf("process %d, which this one took over from, drains %d connections", p.PID, n)
	if n == 1 {
		words = strings.TrimSuffix(words, "s")
	}
	if left := p.Left(); left > 0 {
		return words + fmt.Sprintf(" for %s at most", left.Round(time.Second))
	}
	return words + " as long as they last"
}

// Close ends the conversation, and closes the sockets that were not taken. Without a Begin the predecessor then
// continues as before.
func (p *Predecessor) Close() {
	if p == nil {
		return
	}
	p.sockets.CloseAll()
	_ = p.conn.Close()
}
