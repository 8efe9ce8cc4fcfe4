// Package takeover passes the listening sockets of a running proxy to the process that replaces it. Both processes
// accept from the same sockets for a moment, so no new connection is refused in between. Established connections stay
// with the old process.
//
// The processes talk over a Unix socket of type SOCK_SEQPACKET, in JSON:
//
//	the new process                     the running process
//	ask                         ──▶
//	                            ◀──     sockets, with their descriptors; as often as more is true
//	begin: it serves            ──▶
//	                            ◀──     draining, with the number of connections left, until it ends
//
// A conversation that ends before begin leaves the running process as it was. Only processes of the same user, or of
// root, are listened to.
package takeover

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Version is that of the messages. A process of another version is refused.
const Version = 1

const (
	// maxMessage bounds a message, in bytes.
	maxMessage = 64 << 10
	// socketsAtOnce is how many descriptors one message carries; Linux allows 253.
	socketsAtOnce = 64
	// maxSockets bounds what a process takes over.
	maxSockets = 4096
)

// step is what a message asks for, or answers.
type step string

const (
	stepAsk      step = "ask"
	stepSockets  step = "sockets"
	stepBegin    step = "begin"
	stepDraining step = "draining"
	stepRefused  step = "refused"
)

// message is one datagram of a conversation.
type message struct {
	Step    step     `json:"step"`
	Version int      `json:"version,omitempty"`
	PID     int      `json:"pid,omitempty"`
	Sockets []Socket `json:"sockets,omitempty"` // one for each descriptor
	More    bool     `json:"more,omitempty"`    // sockets follow in another message
	Stays   []string `json:"stays,omitempty"`   // in words, what cannot be taken over
	Open    int      `json:"open,omitempty"`    // connections
	Reason  string   `json:"reason,omitempty"`
}

// Socket is a listening socket of the running process.
type Socket struct {
	Role    string `json:"role"`    // what it is for: "listener", or a key of the configuration
	Address string `json:"address"` // where it listens
	FD      int    `json:"-"`       // this process's descriptor of it
}

// Listening is a listener of the net package.
type Listening interface {
	syscall.Conn
	Addr() net.Addr
}

// Duplicate returns a Socket with a descriptor of its own for a listener.
func Duplicate(role string, ln Listening) (Socket, error) {
	s := Socket{Role: role, Address: ln.Addr().String()}
	raw, err := ln.SyscallConn()
	if err == nil {
		ctlErr := raw.Control(func(fd uintptr) { s.FD, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) })
		err = errors.Join(ctlErr, err)
	}
	if err != nil {
		return Socket{}, fmt.Errorf("takeover: %s %s: %w", role, s.Address, err)
	}
	return s, nil
}

// Listener returns a listener with a descriptor of its own, and closes FD.
func (s Socket) Listener() (net.Listener, error) {
	f := os.NewFile(uintptr(s.FD), s.Address)
	ln, err := net.FileListener(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("takeover: %s %s: %w", s.Role, s.Address, err)
	}
	return ln, nil
}

// SameAddress reports whether a listener at address, of a configuration, would listen at at. An address without a host,
// such as ":443", stands for every address.
func SameAddress(address, at string) bool {
	want, err := net.ResolveTCPAddr("tcp", address)
	has, hasErr := net.ResolveTCPAddr("tcp", at)
	if err != nil || hasErr != nil || want.Port != has.Port || want.Zone != has.Zone {
		return false
	}
	return want.IP.Equal(has.IP) || want.IP == nil && has.IP.IsUnspecified()
}

// closeSockets closes the descriptors.
func closeSockets(all []Socket) {
	for _, s := range all {
		_ = unix.Close(s.FD)
	}
}

// errNotUs refuses a process of another user.
var errNotUs = errors.New("the process at the other end belongs to another user")

// checkPeer refuses a process that is neither of this process's user nor of root. It returns the process's number.
func checkPeer(conn *net.UnixConn) (pid int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var peer *unix.Ucred
	if ctlErr := raw.Control(func(fd uintptr) {
		peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); ctlErr != nil || err != nil {
		return 0, errors.Join(ctlErr, err)
	}
	if peer.Uid != 0 && int(peer.Uid) != os.Geteuid() {
		return int(peer.Pid), fmt.Errorf("%w: uid %d", errNotUs, peer.Uid)
	}
	return int(peer.Pid), nil
}

// waitAtMost has reads and writes of conn fail after d.
func waitAtMost(conn *net.UnixConn, d time.Duration) {
	_ = conn.SetDeadline(time.Now().Add(d)) //nolint:forbidigo // a deadline is a date
}

// send sends a message with the descriptors of its sockets.
func send(conn *net.UnixConn, m message) error {
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	fds := make([]int, len(m.Sockets))
	for i, s := range m.Sockets {
		fds[i] = s.FD
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	_, _, err = conn.WriteMsgUnix(text, rights, nil)
	return err
}

// receive returns the next message, and takes the descriptors that come with it. io.EOF: the other end is gone.
func receive(conn *net.UnixConn) (message, error) {
	text, rights := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(4*socketsAtOnce))
	n, control, flags, _, err := conn.ReadMsgUnix(text, rights)
	if err != nil {
		return message{}, err
	}
	fds, err := descriptors(rights[:control])
	m, decodeErr := decode(text[:n], len(fds))
	switch {
	case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
		err = errors.New("the message is longer than any of this version")
	case err == nil:
		err = decodeErr
	}
	if err != nil {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
		return message{}, err
	}
	for i, fd := range fds {
		m.Sockets[i].FD = fd
	}
	return m, nil
}

// decode reads a message that came with that many descriptors.
func decode(text []byte, descriptors int) (m message, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	if err := d.Decode(&m); err != nil {
		return message{}, fmt.Errorf("the message is not one of a takeover: %w", err)
	}
	if m.Step == stepRefused {
		return message{}, fmt.Errorf("%w: %s", ErrRefused, m.Reason)
	}
	if len(m.Sockets) != descriptors {
		return message{}, fmt.Errorf("the message names %d sockets and has %d", len(m.Sockets), descriptors)
	}
	return m, nil
}

// descriptors returns the descriptors in control messages, which programs that are started do not inherit.
func descriptors(control []byte) (fds []int, err error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, err
	}
	for _, c := range messages {
		some, err := unix.ParseUnixRights(&c)
		if err != nil {
			continue // another kind of message
		}
		for _, fd := range some {
			unix.CloseOnExec(fd)
		}
		fds = append(fds, some...)
	}
	return fds, nil
}

// expect receives a message of a kind.
func expect(conn *net.UnixConn, want step) (message, error) {
	m, err := receive(conn)
	switch {
	case err != nil:
		return message{}, err
	case m.Step != want:
		closeSockets(m.Sockets)
		return message{}, fmt.Errorf("the other process said %q, not %q", m.Step, want)
	}
	return m, nil
}
