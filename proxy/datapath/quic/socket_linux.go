package quic

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/udpbatch"
)

const (
	maxSegments = 32       // packets that one system call sends
	maxBatch    = 48 << 10 // their bytes; a UDP message has less than 64 KiB
	maxWaiting  = 16       // batches; with as many a write waits
	maxPaths    = 4096     // addresses with a known largest packet

	flushWithin = 100 * time.Millisecond // bound of how long Close waits for what was written last
)

// Socket is a UDP socket for quic-go. It passes several packets of one size to one address to the
// kernel in one system call (UDP_SEGMENT), and receives several from one address in one
// (UDP_GRO). quic-go uses UDP_SEGMENT only for packets as large as the path carries, and those
// with a tunnel's packets in them are smaller; it does not use UDP_GRO. A packet that is written
// waits only while the kernel is busy with earlier ones.
//
// quic-go raises the size of its packets as the path allows, and never lowers it. Where a path
// becomes narrower, packets of sizes that it has carried before leave in fragments. Larger packets
// are quic-go's probes of the path's MTU, which have to fail.
//
// Writes append to waiting under mu, from any goroutine. One goroutine, sendLoop, takes the
// batches out and sends them without mu. One goroutine reads.
type Socket struct {
	*net.UDPConn
	*udpbatch.Reader // used by one goroutine, as quic-go does
	write            func(b, oob []byte, to *net.UDPAddr) error

	// Only sendLoop uses these.
	noSegments  bool                   // UDP_SEGMENT fails, as a device cannot do it
	carriedSize map[netip.AddrPort]int // bytes of the largest packet that has left whole for an address
	fragment    func(allow bool) error // sets whether the kernel may make fragments
	fragmentSet bool                   // fragment has been called; quic-go sets the option, too, before it sends

	mu           sync.Mutex
	changed      sync.Cond
	waiting      []*batch // the oldest first
	otherControl []byte   // scratch: control messages without UDP_SEGMENT
	closed       bool
	writeErr     error          // the next write to the address at returns it
	writeErrAddr netip.AddrPort // address of the packets that failed
	ended        chan struct{}
}

// batch is packets of one size to one address; the last may be smaller.
type batch struct {
	to      netip.AddrPort
	addr    *net.UDPAddr
	oob     []byte // control messages without UDP_SEGMENT
	segment int    // bytes of a packet
	data    []byte
	full    bool // the last packet is smaller, so none may follow
}

// batchPool keeps batches, each with room for maxBatch bytes.
var batchPool = sync.Pool{New: func() any { return &batch{data: make([]byte, 0, maxBatch)} }}

// ListenUDP opens a socket at addr; nil: at any port.
func ListenUDP(addr *net.UDPAddr) (*Socket, error) {
	socket, err := net.ListenUDP("udp", addr)
	if err != nil {
		return nil, err
	}
	return newSocket(socket, func(b, oob []byte, to *net.UDPAddr) error {
		_, _, err := socket.WriteMsgUDP(b, oob, to)
		return err
	}), nil
}

// newSocket returns a Socket that reads from conn and writes by write, and starts its goroutine.
func newSocket(conn *net.UDPConn, write func(b, oob []byte, to *net.UDPAddr) error) *Socket {
	w := &Socket{
		UDPConn: conn, Reader: udpbatch.NewReader(conn), write: write, ended: make(chan struct{}),
		carriedSize: map[netip.AddrPort]int{}, fragment: func(allow bool) error { return setFragments(conn, allow) },
	}
	w.changed.L = &w.mu
	go w.sendLoop()
	return w
}

// WriteMsgUDP queues a packet, or several with their size in oob (UDP_SEGMENT). An error is that of
// an earlier packet to the same address.
func (w *Socket) WriteMsgUDP(b, oob []byte, to *net.UDPAddr) (n, oobn int, err error) {
	addr := to.AddrPort()
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.waiting) >= maxWaiting && !w.closed {
		w.changed.Wait()
	}
	switch {
	case w.closed:
		return 0, 0, net.ErrClosed
	case w.writeErr != nil && w.writeErrAddr == addr:
		err, w.writeErr = w.writeErr, nil
		return 0, 0, err
	}
	var segment int
	segment, w.otherControl = splitSegmentSize(oob, w.otherControl[:0])
	if segment == 0 || segment > len(b) {
		segment = max(1, len(b))
	}
	if !w.appendToBatch(addr, b, w.otherControl, segment) {
		p := batchPool.Get().(*batch)
		p.to, p.addr, p.segment, p.full = addr, to, segment, len(b)%segment != 0
		p.data, p.oob = append(p.data[:0], b...), append(p.oob[:0], w.otherControl...)
		w.waiting = append(w.waiting, p)
		w.changed.Broadcast()
	}
	return len(b), len(oob), nil
}

// appendToBatch adds packets to the last batch for their address; false: they do not fit it.
func (w *Socket) appendToBatch(addr netip.AddrPort, b, oob []byte, segment int) bool {
	for i := len(w.waiting) - 1; i >= 0; i-- {
		p := w.waiting[i]
		if p.to != addr {
			continue
		}
		if p.full || segment > p.segment || segment < min(p.segment, len(b)) ||
			len(p.data)+len(b) > min(maxBatch, maxSegments*p.segment) || !bytes.Equal(p.oob, oob) {
			return false
		}
		p.data = append(p.data, b...)
		p.full = len(b)%p.segment != 0
		return true
	}
	return false
}

// sendLoop sends batches until Close. The next write to an address returns the error of the last
// packet to it, because the write of that packet has returned before.
func (w *Socket) sendLoop() {
	defer close(w.ended)
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		for len(w.waiting) == 0 {
			if w.closed {
				return
			}
			w.changed.Wait()
		}
		p := w.waiting[0]
		w.waiting = append(w.waiting[:0], w.waiting[1:]...)
		w.mu.Unlock()
		err := w.sendBatch(p)
		w.mu.Lock()
		if err != nil && !errors.Is(err, unix.EMSGSIZE) { // a probe of the path's MTU is too large
			w.writeErr, w.writeErrAddr = err, p.to
		}
		batchPool.Put(p)
		w.changed.Broadcast()
	}
}

// sendBatch passes a batch to the kernel, packet by packet if UDP_SEGMENT fails.
func (w *Socket) sendBatch(p *batch) error {
	if !w.fragmentSet {
		w.fragmentSet = true
		_ = w.fragment(false) // on an error quic-go finds only the MTU of the device
	}
	if len(p.data) <= p.segment {
		return w.sendPacket(p, p.data)
	}
	if !w.noSegments {
		err := w.write(p.data, udpbatch.AppendSegmentSize(p.oob, p.segment), p.addr)
		switch {
		case err == nil:
			w.noteCarried(p.to, p.segment)
			return nil
		case errors.Is(err, unix.EIO):
			w.noSegments = true
		case !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EMSGSIZE): // they are larger than the path's MTU
			return err
		}
	}
	for b := p.data; len(b) > 0; {
		n := min(p.segment, len(b))
		if err := w.sendPacket(p, b[:n]); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// sendPacket sends one packet of a batch, in fragments if it is too large for the path now and was
// not before.
func (w *Socket) sendPacket(p *batch, packet []byte) error {
	err := w.write(packet, p.oob, p.addr)
	switch {
	case err == nil:
		w.noteCarried(p.to, len(packet))
		return nil
	case !errors.Is(err, unix.EMSGSIZE) || len(packet) > w.carriedSize[p.to] || w.fragment(true) != nil:
		return err
	}
	err = w.write(packet, p.oob, p.addr)
	return errors.Join(err, w.fragment(false))
}

// noteCarried notes that a packet of size bytes has left whole for an address.
func (w *Socket) noteCarried(to netip.AddrPort, size int) {
	if size <= w.carriedSize[to] {
		return
	}
	if len(w.carriedSize) >= maxPaths {
		clear(w.carriedSize)
	}
	w.carriedSize[to] = size
}

// setFragments sets whether the kernel fragments packets that are larger than the path's MTU, or
// refuses them. It sets both families' options, since an IPv6 socket sends IPv4, too.
func setFragments(conn *net.UDPConn, allow bool) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	four, six := unix.IP_PMTUDISC_DO, unix.IPV6_PMTUDISC_DO
	if allow {
		four, six = unix.IP_PMTUDISC_DONT, unix.IPV6_PMTUDISC_DONT
	}
	return datapath.Control(raw, func(fd int) error {
		err4 := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, four)
		err6 := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, six)
		if err4 == nil || err6 == nil {
			return nil // a socket of one family refuses the other's option
		}
		return err4
	})
}

// Close sends the waiting packets, and closes the socket.
func (w *Socket) Close() error {
	w.mu.Lock()
	w.closed = true
	w.changed.Broadcast()
	w.mu.Unlock()
	late := time.AfterFunc(flushWithin, func() { _ = w.UDPConn.Close() }) // ends a write for which the kernel has no room
	<-w.ended
	late.Stop()
	return w.UDPConn.Close()
}

// splitSegmentSize returns the size of packets in a UDP_SEGMENT control message; 0: there is none.
// It appends the other control messages to rest.
func splitSegmentSize(oob, rest []byte) (int, []byte) {
	segment := 0
	for left := oob; len(left) >= unix.SizeofCmsghdr; {
		h, data, after, err := unix.ParseOneSocketControlMessage(left)
		if err != nil {
			return 0, append(rest[:0], oob...)
		}
		if h.Level == unix.IPPROTO_UDP && h.Type == unix.UDP_SEGMENT && len(data) >= 2 {
			segment = int(binary.NativeEndian.Uint16(data))
		} else {
			rest = append(rest, left[:len(left)-len(after)]...)
		}
		left = after
	}
	return segment, rest
}
