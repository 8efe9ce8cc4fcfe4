package userspace

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"

	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/udpbatch"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

const (
	bindBuffer  = 7 << 20 // bytes of a socket's buffers, as far as the system allows; wireguard-go's choice
	bindTries   = 100     // ports that are tried to find one that is free for both families
	bindOOB     = 128     // bytes of control messages
	maxSegments = 64      // packets of one message (UDP_MAX_SEGMENTS)
	maxMessage  = 65535 - ipv4Header - udpHeader
	cookieReply = 3 // WireGuard: the type of a message to a peer that is not authenticated
)

// udpBind has the sockets of a WireGuard device. The bind of wireguard-go lets the kernel cut each
// message into packets (UDP_SEGMENT). Linux refuses that for packets larger than the path's MTU, and
// wireguard-go would lose them each time. udpBind passes larger packets one by one, and the kernel
// sends them in fragments, as it does for its own WireGuard.
type udpBind struct {
	paths  *paths
	errors sendErrors

	// mu guards sockets and mark. Send holds it for reading only to choose a socket.
	mu sync.RWMutex
	// sockets are those of IPv4 and IPv6; nil: closed, or the machine lacks the family.
	sockets [2]*udpSocket
	// mark is the SO_MARK of the sockets; 0: none.
	mark uint32
}

// udpSocket is the socket of one family.
type udpSocket struct {
	*net.UDPConn
	// batch is used for IPv6 too: its WriteBatch is the same.
	batch  *ipv4.PacketConn
	reader *udpbatch.Reader
	// noSegmentation is set once UDP_SEGMENT has failed because a network device computes no checksums.
	noSegmentation atomic.Bool
}

func newUDPBind() *udpBind { return &udpBind{paths: newPaths(readRouteMTU, pathPeriod)} }

// udpEndpoint is the address of a peer, and the address of this machine that the peer sent to.
type udpEndpoint struct {
	to   netip.AddrPort
	addr *net.UDPAddr
	// source is the address of this machine; invalid: the kernel chooses.
	source netip.Addr
	// device is the index of the interface, for a link-local source.
	device uint32
	// unpinned is set once source must not be used any more, because it has left the machine.
	unpinned atomic.Bool
}

func newEndpoint(addr *net.UDPAddr) *udpEndpoint {
	to := addr.AddrPort()
	return &udpEndpoint{addr: addr, to: netip.AddrPortFrom(to.Addr().Unmap(), to.Port())}
}

func (e *udpEndpoint) ClearSrc() { e.unpinned.Store(true) }

func (e *udpEndpoint) SrcToString() string { return e.SrcIP().String() }

func (e *udpEndpoint) DstToString() string { return e.to.String() }

func (e *udpEndpoint) DstIP() netip.Addr { return e.to.Addr() }

func (e *udpEndpoint) DstToBytes() []byte {
	b, _ := e.to.MarshalBinary() //nolint:errcheck // it never fails
	return b
}

func (e *udpEndpoint) SrcIP() netip.Addr {
	if e.unpinned.Load() {
		return netip.Addr{}
	}
	return e.source
}

// readSource reads the address that a packet was sent to from its control messages.
func (e *udpEndpoint) readSource(control []byte) {
	for len(control) >= unix.SizeofCmsghdr {
		h, data, rest, err := unix.ParseOneSocketControlMessage(control)
		if err != nil {
			return
		}
		switch {
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO && len(data) >= unix.SizeofInet4Pktinfo:
			e.source = netip.AddrFrom4([4]byte(data[4:8]))
		case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO && len(data) >= unix.SizeofInet6Pktinfo:
			e.source = netip.AddrFrom16([16]byte(data[:16]))
			if e.source.IsLinkLocalUnicast() {
				e.device = binary.NativeEndian.Uint32(data[16:])
			}
		}
		control = rest
	}
}

// appendSource appends the control message that sets a packet's source address. It leaves the
// interface to the routes, which may depend on the address.
func (e *udpEndpoint) appendSource(oob []byte) []byte {
	switch source := e.SrcIP(); {
	case !source.IsValid():
		return oob
	case source.Is4():
		var info [unix.SizeofInet4Pktinfo]byte
		copy(info[4:], source.AsSlice())
		return udpbatch.AppendControl(oob, unix.IPPROTO_IP, unix.IP_PKTINFO, info[:])
	default:
		info := append(source.AsSlice(), 0, 0, 0, 0)
		binary.NativeEndian.PutUint32(info[16:], e.device)
		return udpbatch.AppendControl(oob, unix.IPPROTO_IPV6, unix.IPV6_PKTINFO, info)
	}
}

// ParseEndpoint implements conn.Bind.
func (b *udpBind) ParseEndpoint(s string) (conn.Endpoint, error) {
	at, err := netip.ParseAddrPort(s)
	if err != nil {
		return nil, err
	}
	return newEndpoint(net.UDPAddrFromAddrPort(netip.AddrPortFrom(at.Addr().Unmap(), at.Port()))), nil
}

// BatchSize implements conn.Bind.
func (b *udpBind) BatchSize() int { return conn.IdealBatchSize }

// Open implements conn.Bind. With port 0 it looks for a port that is free for both families.
func (b *udpBind) Open(port uint16) (receive []conn.ReceiveFunc, actual uint16, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sockets[0] != nil || b.sockets[1] != nil {
		return nil, 0, conn.ErrBindAlreadyOpen
	}
	for range bindTries {
		if actual, err = b.openPort(port); port != 0 || !errors.Is(err, unix.EADDRINUSE) {
			break
		}
	}
	if err != nil {
		return nil, 0, err
	}
	for _, s := range b.sockets {
		if s != nil {
			receive = append(receive, s.newReceiver())
		}
	}
	return receive, actual, nil
}

// openPort opens the port for both families. The caller holds b.mu.
func (b *udpBind) openPort(port uint16) (uint16, error) {
	for i, network := range []string{"udp4", "udp6"} {
		s, err := b.openSocket(network, port)
		switch {
		case errors.Is(err, unix.EAFNOSUPPORT):
			continue
		case err != nil:
			return 0, errors.Join(err, b.closeSockets())
		}
		b.sockets[i], port = s, uint16(s.LocalAddr().(*net.UDPAddr).Port)
	}
	if b.sockets[0] == nil && b.sockets[1] == nil {
		return 0, unix.EAFNOSUPPORT
	}
	return port, nil
}

func (b *udpBind) openSocket(network string, port uint16) (*udpSocket, error) {
	listen := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		return datapath.Control(raw, func(fd int) error { return setUpSocket(fd, network == "udp6", b.mark) })
	}}
	c, err := listen.ListenPacket(context.Background(), network, fmt.Sprintf(":%d", port))
	if err != nil {
		return nil, err
	}
	s := &udpSocket{UDPConn: c.(*net.UDPConn)}
	s.batch, s.reader = ipv4.NewPacketConn(s.UDPConn), udpbatch.NewReader(s.UDPConn)
	return s, nil
}

// setUpSocket sets buffers, the mark, and the reports of destination addresses. It switches path
// MTU discovery off, so that the kernel fragments large packets.
func setUpSocket(fd int, six bool, mark uint32) error {
	for _, buffer := range []int{unix.SO_RCVBUF, unix.SO_SNDBUF, unix.SO_RCVBUFFORCE, unix.SO_SNDBUFFORCE} {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, buffer, bindBuffer)
	}
	if mark != 0 {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
			return fmt.Errorf("mark %d: %w", mark, err)
		}
	}
	options := []struct{ level, name, value int }{
		{unix.IPPROTO_IP, unix.IP_PKTINFO, 1},
		{unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DONT},
	}
	if six {
		options = []struct{ level, name, value int }{
			{unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1},
			{unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1},
			{unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DONT},
		}
	}
	for _, o := range options {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			return fmt.Errorf("set option %d of a UDP socket: %w", o.name, err)
		}
	}
	return nil
}

// newReceiver returns the function that reads packets from the socket. One goroutine calls it.
func (s *udpSocket) newReceiver() conn.ReceiveFunc {
	messages := make([]ipv4.Message, conn.IdealBatchSize)
	for i := range messages {
		messages[i] = ipv4.Message{Buffers: make([][]byte, 1), OOB: make([]byte, bindOOB)}
	}
	return func(packets [][]byte, sizes []int, from []conn.Endpoint) (int, error) {
		ms := messages[:min(len(packets), len(messages))]
		for i := range ms {
			ms[i].Buffers[0] = packets[i]
		}
		n, err := s.reader.ReadBatch(ms, 0)
		if err != nil {
			return 0, err
		}
		var e *udpEndpoint
		for i, m := range ms[:n] {
			if sizes[i] = m.N; m.N == 0 {
				continue
			}
			if addr := m.Addr.(*net.UDPAddr); e == nil || e.addr != addr {
				e = newEndpoint(addr)
				e.readSource(m.OOB[:m.NN])
			}
			from[i] = e
		}
		return n, nil
	}
}

// Close implements conn.Bind.
func (b *udpBind) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.closeSockets()
}

// closeSockets closes the sockets. The caller holds b.mu.
func (b *udpBind) closeSockets() (err error) {
	for i, s := range b.sockets {
		if s != nil {
			err = errors.Join(err, s.Close())
			b.sockets[i] = nil
		}
	}
	return err
}

// SetMark implements conn.Bind.
func (b *udpBind) SetMark(mark uint32) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mark = mark
	for _, s := range b.sockets {
		if s == nil {
			continue
		}
		raw, err := s.SyscallConn()
		if err == nil {
			err = datapath.Control(raw, func(fd int) error {
				return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark))
			})
		}
		if err != nil {
			return fmt.Errorf("mark %d: %w", mark, err)
		}
	}
	return nil
}

// Send implements conn.Bind.
func (b *udpBind) Send(packets [][]byte, to conn.Endpoint) error {
	e, ok := to.(*udpEndpoint)
	if !ok {
		return conn.ErrWrongEndpointType
	}
	b.mu.RLock()
	s := b.sockets[0]
	if e.to.Addr().Is6() {
		s = b.sockets[1]
	}
	b.mu.RUnlock()
	if s == nil {
		return unix.EAFNOSUPPORT
	}
	return b.sendPackets(s.batch.WriteBatch, &s.noSegmentation, packets, e)
}

// outbox is the memory of one Send.
type outbox struct{ messages []ipv4.Message }

var outboxes = sync.Pool{New: func() any { return new(outbox) }}

// writeBatch passes messages to the kernel, and returns how many it took.
type writeBatch func(messages []ipv4.Message, flags int) (int, error)

// sendPackets passes packets to the kernel, and counts those that the kernel refuses.
func (b *udpBind) sendPackets(write writeBatch, noSegmentation *atomic.Bool, packets [][]byte, e *udpEndpoint) error {
	box := outboxes.Get().(*outbox)
	largest := maxMessage
	if noSegmentation.Load() {
		largest = 0
	} else if packets[0][0] != cookieReply {
		largest = b.paths.largestPayload(e)
	}
	ms := box.fillMessages(packets, e, largest)
	err := b.sendMessages(write, noSegmentation, ms, e)
	for i := range ms {
		ms[i].Buffers = nil // the caller's
	}
	outboxes.Put(box)
	return err
}

// sendMessages writes all messages. After an error that may come from UDP_SEGMENT it tries again with
// one packet in each message, and after one that may come from the source address, without that.
func (b *udpBind) sendMessages(write writeBatch, noSegmentation *atomic.Bool, ms []ipv4.Message, e *udpEndpoint) error {
	var failure error
	pinned := true // messages may have a source address
	for len(ms) > 0 {
		n, err := write(ms, 0)
		if ms = ms[max(n, 0):]; err == nil {
			continue
		}
		packets := ms[0].Buffers
		switch {
		case len(packets) > 1 && (isTooLarge(err) || errors.Is(err, unix.EIO)):
			if errors.Is(err, unix.EIO) {
				noSegmentation.Store(true)
			} else {
				b.paths.recordTooLarge(e, len(packets[0]))
			}
			if err := b.sendMessages(write, noSegmentation, new(outbox).fillMessages(packets, e, 0), e); err != nil {
				failure = err
			}
			ms = ms[1:]
		case isSourceGone(err) && pinned:
			pinned = false
			e.ClearSrc()
			for i := range ms {
				ms[i].OOB = appendSize(ms[i].OOB[:0], ms[i].Buffers)
			}
		case isTooLarge(err): // the others may fit
			failure = err
			b.errors.countError(err, len(packets))
			ms = ms[1:]
		default:
			for _, m := range ms {
				b.errors.countError(err, len(m.Buffers))
			}
			return err
		}
	}
	return failure
}

// fillMessages makes messages of packets. Successive packets of one size go into one message, where
// the last may be smaller. Packets of more than largest bytes get a message each.
func (o *outbox) fillMessages(packets [][]byte, e *udpEndpoint, largest int) []ipv4.Message {
	var source [bindOOB]byte
	pinned := e.appendSource(source[:0])
	n := 0
	for len(packets) > 0 {
		size, total, count := len(packets[0]), 0, 0
		for _, p := range packets {
			if count > 0 && (size > largest || len(p) > size || total%size != 0 || count == maxSegments ||
				total+len(p) > maxMessage) {
				break
			}
			total += len(p)
			count++
		}
		if n == len(o.messages) {
			o.messages = append(o.messages, ipv4.Message{})
		}
		m := &o.messages[n]
		m.Buffers, m.Addr = packets[:count:count], e.addr
		m.OOB = appendSize(append(m.OOB[:0], pinned...), m.Buffers)
		packets = packets[count:]
		n++
	}
	return o.messages[:n]
}

// appendSize appends the size of packets as a control message, if there are several.
func appendSize(oob []byte, packets [][]byte) []byte {
	if len(packets) == 1 {
		return oob
	}
	return udpbatch.AppendSegmentSize(oob, len(packets[0]))
}

// isTooLarge reports whether the kernel refused a message because its packets exceed the path's
// MTU. Older kernels return EINVAL for UDP_SEGMENT.
func isTooLarge(err error) bool { return errors.Is(err, unix.EMSGSIZE) || errors.Is(err, unix.EINVAL) }

// isSourceGone reports whether the reason of a failure may be the source address, which may have
// left the machine.
func isSourceGone(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.ENETUNREACH) ||
		errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.ENODEV)
}

// sendErrors counts packets that the kernel refused, by reason.
type sendErrors struct{ tooLarge, unreachable, forbidden, noBuffer, other atomic.Uint64 }

func (s *sendErrors) countError(err error, packets int) {
	counter := &s.other
	switch {
	case isTooLarge(err):
		counter = &s.tooLarge
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETDOWN):
		counter = &s.unreachable
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		counter = &s.forbidden
	case errors.Is(err, unix.ENOBUFS), errors.Is(err, unix.ENOMEM):
		counter = &s.noBuffer
	}
	counter.Add(uint64(packets))
}

// errorCounts returns the counters by reason.
func (s *sendErrors) errorCounts() tunnel.SendErrors {
	return tunnel.SendErrors{
		TooLarge: s.tooLarge.Load(), Unreachable: s.unreachable.Load(), Forbidden: s.forbidden.Load(),
		NoBuffer: s.noBuffer.Load(), Other: s.other.Load(),
	}
}

const (
	pathPeriod  = 10 * time.Second // how long a path's MTU is used where a send that exceeds it fails
	routePeriod = time.Second      // how long it is used where no send fails
	maxPaths    = 4096
	anyPort     = 9 // a route has none, but a socket needs one

	udpHeader       = 8
	wireGuardHeader = 16 + 16 // with the tag behind the packet
	wireGuardBlock  = 16      // packets are padded to a multiple of it
)

// paths has the MTUs of the paths to peers' endpoints, as the kernel's routes have them. It is safe
// for concurrent use.
type paths struct {
	// readMTU asks the kernel; tests answer in its place.
	readMTU func(from netip.Addr, to netip.AddrPort) (int, error)
	// period is how long an answer is used.
	period time.Duration
	// changed has a value once the MTU of a path has changed.
	changed chan struct{}

	mu         sync.Mutex
	byEndpoint map[netip.AddrPort]path
}

// path is what was read about one endpoint.
type path struct {
	// mtu is that of the route, in bytes. 0: the kernel does not know it.
	mtu int
	// largest is the largest payload that UDP_SEGMENT is used for, in bytes.
	largest int
	read    time.Time
}

func newPaths(readMTU func(netip.Addr, netip.AddrPort) (int, error), period time.Duration) *paths {
	return &paths{readMTU: readMTU, period: period, changed: make(chan struct{}, 1), byEndpoint: map[netip.AddrPort]path{}}
}

// largestPayload returns the largest payload to an endpoint that leaves in one packet, in bytes.
func (p *paths) largestPayload(e *udpEndpoint) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.findPath(e.SrcIP(), e.to).largest
}

// routeMTU returns the MTU of the route to an address in bytes. 0: the kernel does not know it.
func (p *paths) routeMTU(to netip.Addr) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.findPath(netip.Addr{}, netip.AddrPortFrom(to, anyPort)).mtu
}

// findPath returns a path that was read within the last period. The caller holds p.mu.
func (p *paths) findPath(from netip.Addr, to netip.AddrPort) path {
	known, exists := p.byEndpoint[to]
	if !exists || time.Since(known.read) > p.period { //nolint:forbidigo // the kernel's routes are of the real clock
		return p.readPath(from, to)
	}
	return known
}

// recordTooLarge records that UDP_SEGMENT failed for packets of size bytes. If the route's MTU is not
// the reason, UDP_SEGMENT is not used until a period is over.
func (p *paths) recordTooLarge(e *udpEndpoint, size int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if now := p.readPath(e.SrcIP(), e.to); now.largest >= size {
		now.largest = 0
		p.byEndpoint[e.to] = now
	}
}

// readPath asks the kernel for the path to an address. It forgets old paths where there are
// maxPaths. The caller holds p.mu.
func (p *paths) readPath(from netip.Addr, to netip.AddrPort) path {
	now := path{largest: maxMessage, read: time.Now()} //nolint:forbidigo // see above
	if mtu, err := p.readMTU(from, to); err == nil {
		now.mtu, now.largest = mtu, mtu-outerHeaders(to.Addr())
	}
	before, exists := p.byEndpoint[to]
	if !exists && len(p.byEndpoint) >= maxPaths {
		for other, old := range p.byEndpoint {
			if now.read.Sub(old.read) > p.period {
				delete(p.byEndpoint, other)
			}
		}
		if len(p.byEndpoint) >= maxPaths {
			return now
		}
	}
	p.byEndpoint[to] = now
	if before.mtu != now.mtu {
		select {
		case p.changed <- struct{}{}:
		default:
		}
	}
	return now
}

// largestInner returns the largest packet inside WireGuard that needs no fragments around it, in
// bytes. 0: the path is not known.
func (p *paths) largestInner(to netip.AddrPort) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	known := p.byEndpoint[to]
	if known.mtu == 0 {
		return 0
	}
	return (known.mtu - outerHeaders(to.Addr()) - wireGuardHeader) / wireGuardBlock * wireGuardBlock
}

// outerHeaders returns the size of the IP and UDP headers around a message, in bytes.
func outerHeaders(to netip.Addr) int {
	if to.Is4() {
		return ipv4Header + udpHeader
	}
	return ipv6Header + udpHeader
}

// readRouteMTU returns the MTU of the route to an endpoint, with reports of routers on the path. It
// connects a socket and sends nothing.
func readRouteMTU(from netip.Addr, to netip.AddrPort) (int, error) {
	family, level, option := unix.AF_INET, unix.IPPROTO_IP, unix.IP_MTU
	if to.Addr().Is6() {
		family, level, option = unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_MTU
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd) //nolint:errcheck // it has sent nothing
	if from.IsValid() && !from.IsLinkLocalUnicast() {
		_ = unix.Bind(fd, sockaddrOf(netip.AddrPortFrom(from, 0))) // it may have left; the route may do without
	}
	if err := unix.Connect(fd, sockaddrOf(to)); err != nil {
		return 0, err
	}
	return unix.GetsockoptInt(fd, level, option)
}

func sockaddrOf(at netip.AddrPort) unix.Sockaddr {
	if at.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}
}
