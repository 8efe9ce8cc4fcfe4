// Package takeover passes the sockets of a running proxy to the process that replaces it. Both processes accept from
// the same listening sockets for a moment, so no new connection is refused in between. Established connections follow,
// a batch at a time.
//
// The processes talk over a Unix socket of type SOCK_SEQPACKET, in JSON:
//
//	the new process                     the running process
//	ask                         ──▶
//	                            ◀──     sockets, with their descriptors; as often as more is true
//	begin: it serves            ──▶
//	                            ◀──     draining, with the number of connections left, now and then until it ends
//	                            ◀──     batch: connections that no process serves now, if the new one asked for any
//	adopted: it serves some now ──▶
//
// A conversation that ends before begin leaves the running process as it was. Processes of other users are refused,
// except root's.
//
// Each connection of a batch is served by one process at any time. The new process serves it once adopted is sent. The
// old one serves it again once adopted can come no more. To be sure of that, it shuts the conversation down: earlier
// messages can still be read, and none can be sent after. If adopted cannot be sent, the new process serves the
// connections only if the old one is dead. Both processes have descriptors, so the sockets outlive either of them.
package takeover

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
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
	// maxSockets bounds the listening sockets that a process takes over.
	maxSockets = 4096
)

// step is the kind of a message.
type step string

const (
	stepAsk      step = "ask"
	stepSockets  step = "sockets"
	stepBegin    step = "begin"
	stepDraining step = "draining"
	stepBatch    step = "batch"
	stepAdopted  step = "adopted"
	stepRefused  step = "refused"
)

// message is one datagram of a conversation.
type message struct {
	Step    step     `json:"step"`
	Version int      `json:"version,omitempty"`
	PID     int      `json:"pid,omitempty"`
	Sockets []Socket `json:"sockets,omitempty"` // one for each descriptor
	More    bool     `json:"more,omitempty"`    // sockets follow in another message
	Stays   []string `json:"stays,omitempty"`   // descriptions of what cannot be taken over
	Open    int      `json:"open,omitempty"`    // connections
	// Left is for how long they are kept, in nanoseconds; 0: as long as they last.
	Left    time.Duration `json:"left,omitempty"`
	Batches bool          `json:"batches,omitempty"` // of ask: this process takes batches
	Batch   int           `json:"batch,omitempty"`   // descriptors of a batch, the first of its record
	Adopted []bool        `json:"adopted,omitempty"` // in the order of the batch
	Reason  string        `json:"reason,omitempty"`

	fds []int // of the batch
}

// Batch is established connections on their way to another process.
type Batch struct {
	Record []byte // describes them; opaque to this package
	FDs    []int  // their sockets, MaxBatch at most
}

// MaxBatch is how many descriptors a Batch has at most: Linux passes 253 in one message, and the record is one more.
const MaxBatch = 252

// maxRecord bounds Batch.Record, in bytes.
const maxRecord = 256 << 20

// CloseDescriptors closes descriptors.
func CloseDescriptors(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// makeMessage returns the message of a batch. fds[0] is a file with the record, which the caller closes.
func (b Batch) makeMessage() (message, error) {
	fd, err := unix.MemfdCreate("penstock", unix.MFD_CLOEXEC)
	if err != nil {
		return message{}, fmt.Errorf("memfd_create: %w", err)
	}
	for rest := b.Record; len(rest) > 0; {
		n, err := unix.Write(fd, rest)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return message{}, errors.Join(fmt.Errorf("write a record: %w", err), unix.Close(fd))
		}
		rest = rest[max(0, n):]
	}
	return message{Step: stepBatch, Batch: 1 + len(b.FDs), fds: append([]int{fd}, b.FDs...)}, nil
}

// readBatch returns the batch of a message, and closes the descriptor of its record. After an error all are closed.
func (m message) readBatch() (b Batch, err error) {
	if len(m.fds) == 0 {
		return b, errors.New("a batch has no record")
	}
	defer unix.Close(m.fds[0]) //nolint:errcheck // it was read
	b.FDs = m.fds[1:]
	var stat unix.Stat_t
	if err = unix.Fstat(m.fds[0], &stat); err == nil && (stat.Size < 0 || stat.Size > maxRecord) {
		err = fmt.Errorf("the record of a batch has %d bytes", stat.Size)
	}
	if err == nil {
		b.Record = make([]byte, stat.Size)
		var n int
		n, err = unix.Pread(m.fds[0], b.Record, 0)
		b.Record = b.Record[:max(0, n)]
	}
	if err != nil {
		CloseDescriptors(b.FDs)
	}
	return b, err
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

// Duplicate returns a Socket with a new descriptor of a listener.
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

// Listener returns a listener with a new descriptor, and closes FD.
func (s Socket) Listener() (net.Listener, error) {
	f := os.NewFile(uintptr(s.FD), s.Address)
	ln, err := net.FileListener(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("takeover: %s %s: %w", s.Role, s.Address, err)
	}
	return ln, nil
}

// SameAddress reports whether a socket at address is right for a listener with the address configured. A configured
// address without a host, such as ":443", stands for every address.
func SameAddress(configured, address string) bool {
	want, err := net.ResolveTCPAddr("tcp", configured)
	has, hasErr := net.ResolveTCPAddr("tcp", address)
	if err != nil || hasErr != nil || want.Port != has.Port || want.Zone != has.Zone {
		return false
	}
	return want.IP.Equal(has.IP) || want.IP == nil && has.IP.IsUnspecified()
}

// Sockets are listening sockets that were not taken yet.
type Sockets []Socket

// Take removes and returns the sockets of a role for which want reports true.
func (s *Sockets) Take(role string, want func(address string) bool) (taken []Socket) {
	*s = slices.DeleteFunc(*s, func(one Socket) bool {
		if one.Role != role || !want(one.Address) {
			return false
		}
		taken = append(taken, one)
		return true
	})
	return taken
}

// CloseAll closes the descriptors of the sockets that are left.
func (s *Sockets) CloseAll() {
	for _, one := range *s {
		_ = unix.Close(one.FD)
	}
	*s = nil
}

// errOtherUser refuses a process of another user.
var errOtherUser = errors.New("the process at the other end belongs to another user")

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
		return int(peer.Pid), fmt.Errorf("%w: uid %d", errOtherUser, peer.Uid)
	}
	return int(peer.Pid), nil
}

// waitAtMost makes reads and writes of conn fail after d.
func waitAtMost(conn *net.UnixConn, d time.Duration) {
	_ = conn.SetDeadline(time.Now().Add(d)) //nolint:forbidigo // a deadline is a date
}

// sendMessage sends a message with the descriptors of its sockets.
func sendMessage(conn *net.UnixConn, m message) error {
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	fds := m.fds
	for _, s := range m.Sockets {
		fds = append(fds, s.FD)
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	_, _, err = conn.WriteMsgUnix(text, rights, nil)
	return err
}

// receiveMessage returns the next message with its descriptors. io.EOF: the other end is gone.
func receiveMessage(conn *net.UnixConn) (message, error) {
	text, rights := make([]byte, maxMessage), make([]byte, unix.CmsgSpace(4*(1+MaxBatch)))
	n, control, flags, _, err := conn.ReadMsgUnix(text, rights)
	if err != nil {
		return message{}, err
	}
	fds, err := parseDescriptors(rights[:control])
	m, decodeErr := decodeMessage(text[:n], len(fds))
	switch {
	case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
		err = errors.New("the message is longer than any of this version")
	case err == nil:
		err = decodeErr
	}
	if err != nil {
		CloseDescriptors(fds)
		return message{}, err
	}
	m.fds = fds[:m.Batch]
	for i, fd := range fds[m.Batch:] {
		m.Sockets[i].FD = fd
	}
	return m, nil
}

// decodeMessage reads a message that came with that many descriptors.
func decodeMessage(text []byte, descriptors int) (m message, err error) {
	d := json.NewDecoder(bytes.NewReader(text))
	if err := d.Decode(&m); err != nil {
		return message{}, fmt.Errorf("the message is not one of a takeover: %w", err)
	}
	if m.Step == stepRefused {
		return message{}, fmt.Errorf("%w: %s", ErrRefused, m.Reason)
	}
	if m.Batch < 0 || m.Batch > 1+MaxBatch || m.Batch+len(m.Sockets) != descriptors {
		return message{}, fmt.Errorf("the message names %d sockets and has %d", m.Batch+len(m.Sockets), descriptors)
	}
	return m, nil
}

// parseDescriptors returns the descriptors in control messages, and marks them as close-on-exec.
func parseDescriptors(control []byte) (fds []int, err error) {
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

// closeDescriptors closes the descriptors that came with the message.
func (m message) closeDescriptors() {
	sockets := Sockets(m.Sockets)
	sockets.CloseAll()
	CloseDescriptors(m.fds)
}

// expectStep receives a message, which must be of a step.
func expectStep(conn *net.UnixConn, want step) (message, error) {
	m, err := receiveMessage(conn)
	switch {
	case err != nil:
		return message{}, err
	case m.Step != want:
		m.closeDescriptors()
		return message{}, fmt.Errorf("the other process said %q, not %q", m.Step, want)
	}
	return m, nil
}
