package hold

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Messages and attributes of nfnetlink_log (linux/netfilter/nfnetlink_log.h).
const (
	logPacket = unix.NFNL_SUBSYS_ULOG << 8
	logConfig = unix.NFNL_SUBSYS_ULOG<<8 | 1

	logPayloadAttr = 9
	logCommandAttr = 1
	logModeAttr    = 2

	maxCopy     = 16 << 10 // bytes of a packet
	copiesBatch = 64       // that are read at once
)

// Copies receives copies of the packets that a rule of nftables logs to a group. The packets themselves go on. Copies
// that find no room are lost. One goroutine at a time may use it.
type Copies struct {
	socket int
	buffer []byte
}

// OpenCopies binds a group of the kernel's log. It needs CAP_NET_ADMIN; later calls need nothing.
func OpenCopies(group uint16) (*Copies, error) {
	const kind = unix.SOCK_RAW | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK
	socket, err := unix.Socket(unix.AF_NETLINK, kind, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("hold: log group %d: socket: %w", group, err)
	}
	c := &Copies{socket, make([]byte, 1<<16)}
	mode := binary.BigEndian.AppendUint32(nil, maxCopy)
	err = unix.Bind(socket, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	for _, attrs := range [][]byte{
		appendAttr(nil, logCommandAttr, []byte{bindCommand}),
		appendAttr(nil, logModeAttr, append(mode, copyPackets, 0)),
	} {
		if err == nil { // copies may come before the answer
			err = configure(socket, c.buffer, logConfig, group, attrs, func([]byte) {})
		}
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("hold: log group %d: %w", group, explainError(err, "nfnetlink_log"))
	}
	return c, nil
}

// Receive calls handle with each copy that has come, at most a batch of them. The bytes are valid until handle returns.
func (c *Copies) Receive(handle func(packet []byte)) error {
	for range copiesBatch {
		n, _, err := unix.Recvfrom(c.socket, c.buffer, unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ENOBUFS):
			continue
		case err != nil:
			return fmt.Errorf("hold: copies of packets: %w", err)
		}
		forEachMessage(c.buffer[:n], func(kind uint16, body []byte) {
			const familyHeader = 4
			if kind == logPacket && len(body) >= familyHeader {
				forEachAttr(body[familyHeader:], func(kind uint16, value []byte) {
					if kind == logPayloadAttr {
						handle(value)
					}
				})
			}
		})
	}
	return nil
}

// Close gives the group back.
func (c *Copies) Close() { _ = unix.Close(c.socket) }
