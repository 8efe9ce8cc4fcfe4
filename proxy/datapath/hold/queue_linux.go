package hold

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Messages, attributes and flags of nfnetlink_queue (linux/netfilter/nfnetlink_queue.h).
const (
	messagePacket  = unix.NFNL_SUBSYS_QUEUE << 8
	messageVerdict = unix.NFNL_SUBSYS_QUEUE<<8 | 1
	messageConfig  = unix.NFNL_SUBSYS_QUEUE<<8 | 2

	// Notifications of nf_tables to all that listen (linux/netfilter/nf_tables.h).
	messageNewTable    = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWTABLE
	messageDeleteTable = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELTABLE
	tablesGroup        = 1 << (unix.NFNLGRP_NFTABLES - 1)

	packetHeaderAttr = 1
	verdictAttr      = 2
	markAttr         = 3
	payloadAttr      = 10
	lengthAttr       = 13

	configCommandAttr = 1
	configParamsAttr  = 2
	configLengthAttr  = 3
	configMaskAttr    = 4
	configFlagsAttr   = 5

	bindCommand = 1
	copyPackets = 2

	failOpenFlag = 1 << 0 // a packet that finds the queue full passes
	gsoFlag      = 1 << 2 // segments that stand in one packet (GSO) stay in it

	verdictDrop   = 0
	verdictAccept = 1
)

const (
	copiedBytes   = 128     // of each packet: an IPv6 header with some extension headers, and the transport's
	receiveBuffer = 8 << 20 // bytes of the socket, for bursts
	receiveBatch  = 64      // packets that one system call reads, at most
	messageRoom   = 1 << 10 // bytes of a packet's message: copiedBytes and some 200 of attributes
	verdictBatch  = 16 << 10
)

// Packet is a packet that waits in the kernel for a verdict.
type Packet struct {
	ID      uint32
	Mark    uint32 // the kernel's, of the packet
	Length  int    // bytes of the whole packet, all its segments
	Content []byte // its beginning; valid until the next one is received
}

// Queue is a netfilter queue: the kernel keeps packets in it until they have a verdict.
// One goroutine at a time may use it, save for Wake. Every message needs CAP_NET_ADMIN of the calling thread.
type Queue struct {
	number   uint16
	socket   int
	wakes    int    // an eventfd
	buffer   []byte // messageRoom for each of inbox
	inbox    []receivedMessage
	received int    // messages of inbox
	pending  []byte // verdicts and settings to be written
	polled   []unix.PollFd
	// hasNewTables reports whether tables of nf_tables have come or gone. Its reader resets it.
	hasNewTables bool
}

// receivedMessage is the kernel's struct mmsghdr: a message that recvmmsg(2) fills.
type receivedMessage struct {
	header unix.Msghdr
	length uint32 // bytes that were received
}

// newInbox returns messages that parts of buffer have room for.
func newInbox(buffer []byte) []receivedMessage {
	inbox, rooms := make([]receivedMessage, receiveBatch), make([]unix.Iovec, receiveBatch)
	for i := range inbox {
		rooms[i].Base = &buffer[i*messageRoom]
		rooms[i].SetLen(messageRoom)
		inbox[i].header.Iov = &rooms[i]
		inbox[i].header.SetIovlen(1)
	}
	return inbox
}

// OpenQueue binds the netfilter queue of that number, which keeps up to length packets.
// Packets beyond those pass, and so do all of them once the queue is closed or its process is gone.
func OpenQueue(number uint16, length uint32) (*Queue, error) {
	q := &Queue{number: number, socket: -1, wakes: -1, buffer: make([]byte, receiveBatch*messageRoom)}
	q.inbox = newInbox(q.buffer)
	if err := q.open(length); err != nil {
		q.Close()
		return nil, fmt.Errorf("hold: netfilter queue %d: %w", number, explainError(err, "nfnetlink_queue"))
	}
	return q, nil
}

func (q *Queue) open(length uint32) (err error) {
	const kind = unix.SOCK_RAW | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK
	q.socket, err = unix.Socket(unix.AF_NETLINK, kind, unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	if q.wakes, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("eventfd: %w", err)
	}
	// A larger buffer than others may have needs the capability that the queue needs anyway.
	if err = unix.SetsockoptInt(q.socket, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer); err != nil {
		return fmt.Errorf("receive buffer: %w", err)
	}
	if err = unix.Bind(q.socket, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: tablesGroup}); err != nil {
		return fmt.Errorf("bind: %w", err)
	}
	params := binary.BigEndian.AppendUint32(nil, copiedBytes)
	for _, attrs := range [][]byte{
		appendAttr(nil, configCommandAttr, []byte{bindCommand, 0, 0, 0}),
		appendAttr(nil, configParamsAttr, append(params, copyPackets)),
		lengthAttrs(length),
		flagAttrs(failOpenFlag, failOpenFlag),
	} {
		// A packet that comes in between passes unseen by its holder.
		err = configure(q.socket, q.buffer, messageConfig, q.number, attrs, func(messages []byte) {
			forEachMessage(messages, func(kind uint16, body []byte) {
				if p, ok := parsePacket(body); kind == messagePacket && ok {
					q.Accept(p.ID)
				}
			})
		})
		if err == nil {
			err = q.Flush()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// configure sends a configuration message for a queue, or for a group of the log, and waits for its answer. Messages
// that come in between are given to others.
func configure(socket int, buffer []byte, kind, number uint16, attrs []byte, others func(messages []byte)) error {
	message := appendMessage(nil, kind, unix.NLM_F_REQUEST|unix.NLM_F_ACK, number, attrs)
	if err := unix.Sendto(socket, message, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("configure: %w", err)
	}
	for {
		n, _, err := unix.Recvfrom(socket, buffer, 0) // the kernel has answered when Sendto returns
		if err != nil {
			return fmt.Errorf("configure: %w", err)
		}
		code, isAnswer := errorCode(buffer[:n])
		switch {
		case !isAnswer:
			others(buffer[:n])
		case code != 0:
			return fmt.Errorf("configure: %w", code)
		default:
			return nil
		}
	}
}

// Wait waits until there are packets, Wake is called, one of the other descriptors can be read, or timeout is over
// (below 0: no limit). It reports whether one of the others can be read.
func (q *Queue) Wait(timeout time.Duration, others ...int) (hasOthers bool, err error) {
	milliseconds := -1
	if timeout >= 0 {
		milliseconds = int(timeout.Milliseconds())
	}
	q.polled = append(q.polled[:0], pollIn(q.wakes), pollIn(q.socket))
	for _, fd := range others {
		q.polled = append(q.polled, pollIn(fd))
	}
	if _, err := unix.Poll(q.polled, milliseconds); errors.Is(err, unix.EINTR) {
		return false, nil // poll has set no Revents
	} else if err != nil {
		return false, fmt.Errorf("hold: poll: %w", err)
	}
	if q.polled[0].Revents != 0 {
		var count [8]byte
		_, _ = unix.Read(q.wakes, count[:]) // it reads all wakes at once
	}
	for _, p := range q.polled[2:] {
		hasOthers = hasOthers || p.Revents != 0
	}
	return hasOthers, nil
}

func pollIn(fd int) unix.PollFd { return unix.PollFd{Fd: int32(fd), Events: unix.POLLIN} }

// Receive reads the messages that have come, and returns how many there were: at most receiveBatch. Fewer than that:
// there are no others. ForEach then has the packets.
func (q *Queue) Receive() (messages int, err error) {
	for {
		n, _, code := unix.Syscall6(unix.SYS_RECVMMSG, uintptr(q.socket), uintptr(unsafe.Pointer(&q.inbox[0])),
			receiveBatch, unix.MSG_DONTWAIT, 0, 0)
		q.received = 0
		switch code {
		case 0:
			q.received = int(n)
			return q.received, nil
		case unix.EAGAIN:
			return 0, nil
		case unix.EINTR:
		case unix.ENOBUFS: // packets that found no room have passed, and changes of tables are lost
			q.hasNewTables = true
		default:
			return 0, fmt.Errorf("hold: receive: %w", code)
		}
	}
}

// ForEach calls handle with each packet that Receive has read.
func (q *Queue) ForEach(handle func(Packet)) {
	for i, m := range q.inbox[:q.received] {
		if m.header.Flags&unix.MSG_TRUNC != 0 { // only changes of tables are that long
			q.hasNewTables = true
		}
		forEachMessage(q.buffer[i*messageRoom:][:m.length], func(kind uint16, body []byte) {
			switch kind {
			case messagePacket:
				if p, ok := parsePacket(body); ok {
					handle(p)
				}
			case messageNewTable, messageDeleteTable:
				q.hasNewTables = true
			}
		})
	}
}

// Wake makes Wait return. Any goroutine may call it.
func (q *Queue) Wake() {
	one := [8]byte{}
	binary.NativeEndian.PutUint64(one[:], 1)
	_, _ = unix.Write(q.wakes, one[:]) // a full counter wakes as well
}

// Accept lets a packet go on with the next Flush.
func (q *Queue) Accept(id uint32) { q.appendVerdict(id, verdictAccept, nil) }

// AcceptWithMark lets a packet go on under another mark.
func (q *Queue) AcceptWithMark(id, mark uint32) {
	q.appendVerdict(id, verdictAccept, binary.BigEndian.AppendUint32(nil, mark))
}

// SetGSO makes the kernel leave several segments of a flow in one packet (GSO), or cut them into packets as at first.
// It takes effect with the next Flush.
func (q *Queue) SetGSO(on bool) {
	flags := uint32(0)
	if on {
		flags = gsoFlag
	}
	q.pending = appendMessage(q.pending, messageConfig, unix.NLM_F_REQUEST, q.number, flagAttrs(gsoFlag, flags))
}

// SetLength makes the kernel keep up to length packets. It takes effect with the next Flush.
func (q *Queue) SetLength(length uint32) {
	q.pending = appendMessage(q.pending, messageConfig, unix.NLM_F_REQUEST, q.number, lengthAttrs(length))
}

// Drop discards a packet with the next Flush.
func (q *Queue) Drop(id uint32) { q.appendVerdict(id, verdictDrop, nil) }

func (q *Queue) appendVerdict(id, verdict uint32, mark []byte) {
	var value [8]byte
	binary.BigEndian.PutUint32(value[:], verdict)
	binary.BigEndian.PutUint32(value[4:], id)
	start := len(q.pending)
	q.pending = appendMessage(q.pending, messageVerdict, unix.NLM_F_REQUEST, q.number, nil)
	q.pending = appendAttr(q.pending, verdictAttr, value[:])
	if mark != nil {
		q.pending = appendAttr(q.pending, markAttr, mark)
	}
	binary.NativeEndian.PutUint32(q.pending[start:], uint32(len(q.pending)-start))
	if len(q.pending) >= verdictBatch {
		_ = q.Flush() // the next Flush returns an error that lasts
	}
}

// Flush writes the verdicts.
func (q *Queue) Flush() error {
	if len(q.pending) == 0 {
		return nil
	}
	_, err := unix.Write(q.socket, q.pending) // to the kernel, which an unconnected netlink socket sends to
	q.pending = q.pending[:0]
	if err != nil {
		return fmt.Errorf("hold: verdicts: %w", err)
	}
	return nil
}

// Close gives the queue back. The kernel drops what still waits in it.
func (q *Queue) Close() {
	for _, fd := range []*int{&q.socket, &q.wakes} {
		if *fd >= 0 {
			_ = unix.Close(*fd) // nothing was written that could be lost
			*fd = -1
		}
	}
}

// explainError adds what an operator can do about an error of a kernel module that gives numbers to programs.
func explainError(err error, module string) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: it needs CAP_NET_ADMIN, which a proxy has at its start only (restart it), and no other "+
			"program may have that number (/proc/net/netfilter/%s lists them)", err, module)
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EPROTONOSUPPORT):
		return fmt.Errorf("%w: the kernel lacks %s; load it with: modprobe %[2]s", err, module)
	}
	return err
}

// errorCode returns the answer among messages, 0 for success; false: there is none.
func errorCode(messages []byte) (code unix.Errno, isAnswer bool) {
	forEachMessage(messages, func(kind uint16, body []byte) {
		if kind == unix.NLMSG_ERROR && len(body) >= 4 {
			code, isAnswer = unix.Errno(-int32(binary.NativeEndian.Uint32(body))), true
		}
	})
	return code, isAnswer
}

// forEachMessage calls handle with each netlink message's kind and body.
func forEachMessage(messages []byte, handle func(kind uint16, body []byte)) {
	for len(messages) >= unix.SizeofNlMsghdr {
		length := int(binary.NativeEndian.Uint32(messages))
		if length < unix.SizeofNlMsghdr || length > len(messages) {
			return
		}
		handle(binary.NativeEndian.Uint16(messages[4:]), messages[unix.SizeofNlMsghdr:length])
		messages = messages[min(len(messages), align4(length)):]
	}
}

// parsePacket reads the body of a packet message; false: it has no identifier.
func parsePacket(body []byte) (p Packet, ok bool) {
	const familyHeader = 4
	forEachAttr(body[min(familyHeader, len(body)):], func(kind uint16, value []byte) {
		switch {
		case kind == packetHeaderAttr && len(value) >= 4:
			p.ID, ok = binary.BigEndian.Uint32(value), true
		case kind == markAttr && len(value) >= 4:
			p.Mark = binary.BigEndian.Uint32(value)
		case kind == lengthAttr && len(value) >= 4:
			p.Length = int(binary.BigEndian.Uint32(value))
		case kind == payloadAttr:
			p.Content = value
		}
	})
	if p.Length == 0 {
		p.Length = len(p.Content)
	}
	return p, ok
}

// forEachAttr calls handle with the kind and value of each netlink attribute.
func forEachAttr(attrs []byte, handle func(kind uint16, value []byte)) {
	for len(attrs) >= 4 {
		length := int(binary.NativeEndian.Uint16(attrs))
		if length < 4 || length > len(attrs) {
			return
		}
		const kindBits = 0x3fff // without the flags for nesting and byte order
		handle(binary.NativeEndian.Uint16(attrs[2:])&kindBits, attrs[4:length])
		attrs = attrs[min(len(attrs), align4(length)):]
	}
}

func align4(n int) int { return (n + 3) &^ 3 }

// appendAttr appends a netlink attribute.
func appendAttr(b []byte, kind uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(4+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

// appendMessage appends a message for a queue with its attributes.
func appendMessage(b []byte, kind, flags, queue uint16, attrs []byte) []byte {
	const familyHeader = 4
	b = binary.NativeEndian.AppendUint32(b, uint32(unix.SizeofNlMsghdr+familyHeader+len(attrs)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = binary.NativeEndian.AppendUint16(b, flags)
	b = append(b, 0, 0, 0, 0, 0, 0, 0, 0) // sequence and port: nothing here waits for them
	b = append(b, unix.AF_UNSPEC, 0)
	b = binary.BigEndian.AppendUint16(b, queue)
	return append(b, attrs...)
}

func flagAttrs(mask, flags uint32) []byte {
	attrs := appendAttr(nil, configMaskAttr, binary.BigEndian.AppendUint32(nil, mask))
	return appendAttr(attrs, configFlagsAttr, binary.BigEndian.AppendUint32(nil, flags))
}

func lengthAttrs(length uint32) []byte {
	return appendAttr(nil, configLengthAttr, binary.BigEndian.AppendUint32(nil, length))
}
