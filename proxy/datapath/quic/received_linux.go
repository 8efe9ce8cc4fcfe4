package quic

import (
	"encoding/binary"
	"net"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

const (
	trains    = 8       // messages that one system call reads
	trainSize = 1 << 16 // bytes
	trainOOB  = 128     // bytes of control messages
)

// arrived is what a socket has received and quic-go has not read yet. The kernel joins successive
// packets of one size from one address into one message (UDP_GRO), which is called a train here.
type arrived struct {
	conn   *ipv4.PacketConn // for IPv6 as well: ReadBatch is the same
	trains []ipv4.Message   // what the last system call has read
	next   int              // index of the first train that is not read to its end
	at     int              // where in it the next packet begins
	size   int              // of its packets, in bytes
	spare  []ipv4.Message
}

// arrivals returns an arrived for a socket. If the kernel has no UDP_GRO each train is one packet.
func arrivals(udp *net.UDPConn) arrived {
	if raw, err := udp.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_GRO, 1) })
	}
	a := arrived{conn: ipv4.NewPacketConn(udp), spare: make([]ipv4.Message, trains)}
	for i := range a.spare {
		a.spare[i] = ipv4.Message{Buffers: [][]byte{make([]byte, trainSize)}, OOB: make([]byte, trainOOB)}
	}
	return a
}

// ReadBatch implements the interface that quic-go reads from: it fills at least one of ms, each
// with one packet.
func (a *arrived) ReadBatch(ms []ipv4.Message, flags int) (n int, err error) {
	if a.next == len(a.trains) {
		if n, err = a.conn.ReadBatch(a.spare, flags); err != nil {
			return 0, err
		}
		a.trains, a.next = a.spare[:n], 0
		a.begin()
	}
	for n = 0; n < len(ms) && a.next < len(a.trains); n++ {
		t, m := &a.trains[a.next], &ms[n]
		end := min(a.at+a.size, t.N)
		m.N, m.NN = copy(m.Buffers[0], t.Buffers[0][a.at:end]), copy(m.OOB, t.OOB[:t.NN])
		m.Addr, m.Flags = t.Addr, t.Flags
		if a.at = end; a.at >= t.N {
			a.next++
			a.begin()
		}
	}
	return n, nil
}

// begin looks at the next train.
func (a *arrived) begin() {
	if a.next == len(a.trains) {
		return
	}
	t := &a.trains[a.next]
	a.at, a.size = 0, max(1, t.N)
	for left := t.OOB[:t.NN]; len(left) >= unix.SizeofCmsghdr; {
		h, data, after, err := unix.ParseOneSocketControlMessage(left)
		if err != nil {
			return
		}
		if h.Level == unix.IPPROTO_UDP && h.Type == unix.UDP_GRO && len(data) >= 4 {
			if size := int(binary.NativeEndian.Uint32(data)); size > 0 {
				a.size = size
			}
		}
		left = after
	}
}
