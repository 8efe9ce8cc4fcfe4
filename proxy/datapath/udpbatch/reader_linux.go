// Package udpbatch moves several UDP packets in one system call.
package udpbatch

import (
	"encoding/binary"
	"net"
	"unsafe"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
)

const (
	trains    = 8       // messages that one system call reads
	trainSize = 1 << 16 // bytes
	trainOOB  = 128     // bytes of control messages
)

// Reader reads packets from a socket. The kernel joins successive packets of one size from one
// address into one message (UDP_GRO), which is called a train here. One goroutine may use it.
type Reader struct {
	conn   *ipv4.PacketConn // for IPv6 as well: ReadBatch is the same
	trains []ipv4.Message   // what the last system call has read
	next   int              // index of the first train that is not read to its end
	at     int              // where in it the next packet begins
	size   int              // of its packets, in bytes
	spare  []ipv4.Message
}

// NewReader returns a Reader of a socket. If the kernel has no UDP_GRO each train is one packet.
func NewReader(socket *net.UDPConn) *Reader {
	if raw, err := socket.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_GRO, 1) })
	}
	r := &Reader{conn: ipv4.NewPacketConn(socket), spare: make([]ipv4.Message, trains)}
	for i := range r.spare {
		r.spare[i] = ipv4.Message{Buffers: [][]byte{make([]byte, trainSize)}, OOB: make([]byte, trainOOB)}
	}
	return r
}

// ReadBatch fills at least one of ms, each with one packet. Packets of one train have the same Addr,
// and the same control messages, among them that of UDP_GRO.
func (r *Reader) ReadBatch(ms []ipv4.Message, flags int) (n int, err error) {
	if r.next == len(r.trains) {
		if n, err = r.conn.ReadBatch(r.spare, flags); err != nil {
			return 0, err
		}
		r.trains, r.next = r.spare[:n], 0
		r.beginTrain()
	}
	for n = 0; n < len(ms) && r.next < len(r.trains); n++ {
		t, m := &r.trains[r.next], &ms[n]
		end := min(r.at+r.size, t.N)
		m.N, m.NN = copy(m.Buffers[0], t.Buffers[0][r.at:end]), copy(m.OOB, t.OOB[:t.NN])
		m.Addr, m.Flags = t.Addr, t.Flags
		if r.at = end; r.at >= t.N {
			r.next++
			r.beginTrain()
		}
	}
	return n, nil
}

// beginTrain reads the size of the next train's packets.
func (r *Reader) beginTrain() {
	if r.next == len(r.trains) {
		return
	}
	t := &r.trains[r.next]
	r.at, r.size = 0, max(1, t.N)
	for left := t.OOB[:t.NN]; len(left) >= unix.SizeofCmsghdr; {
		h, data, after, err := unix.ParseOneSocketControlMessage(left)
		if err != nil {
			return
		}
		if h.Level == unix.IPPROTO_UDP && h.Type == unix.UDP_GRO && len(data) >= 4 {
			if size := int(binary.NativeEndian.Uint32(data)); size > 0 {
				r.size = size
			}
		}
		left = after
	}
}

// AppendControl appends a control message to oob.
func AppendControl(oob []byte, level, kind int32, data []byte) []byte {
	at := len(oob)
	oob = append(oob, make([]byte, unix.CmsgSpace(len(data)))...)
	h := (*unix.Cmsghdr)(unsafe.Pointer(&oob[at]))
	h.Level, h.Type = level, kind
	h.SetLen(unix.CmsgLen(len(data)))
	copy(oob[at+unix.CmsgLen(0):], data)
	return oob
}

// AppendSegmentSize appends the control message that has the kernel cut a message into packets of
// size bytes (UDP_SEGMENT).
func AppendSegmentSize(oob []byte, size int) []byte {
	return AppendControl(oob, unix.IPPROTO_UDP, unix.UDP_SEGMENT, binary.NativeEndian.AppendUint16(nil, uint16(size)))
}
