package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// peerClocks reads the timestamps of acknowledgements (RFC 7323) for polled legs, since TCP_INFO does not have them.
// Packet sockets put copies of pure acknowledgements into rings of memory that the ticks look through, without system
// calls. It needs CAP_NET_RAW at the start. Connections of a listener of mode redirect have none: their packets carry
// the address from before it was translated. A forged acknowledgement can give a wrong reading, as the peer can;
// oneWayEstimator bounds what that does.
//
// Readings are as good as those of a cell but for one thing: a leg reads its round trip with TCP_INFO, up to a tick
// after the acknowledgement came. oneWayEstimator allows for two ticks of the peer's clock, which are as long.
//
//	kernel: packet ──filter──▶ ring        tick: readRings ──▶ peerReading        poll: readingOf ──▶ flow.Report.Peer
//	        (softirq, stamped)             (all that came since the last)         (the leg's newest)
//
// mu guards the readings and the places in the rings. Nothing is locked under it.
type peerClocks struct {
	clock func() cc.Time // of the datapath

	mu    sync.Mutex
	rings []*ackRing                      // of IPv4 and IPv6; nil: no packet socket may be opened, or all are closed
	legs  map[connectionEnds]*peerReading // observed polled legs
}

// connectionEnds are the addresses of a connection. Those of IPv4 are not mapped to IPv6.
type connectionEnds struct{ local, remote netip.AddrPort }

// peerReading is the newest timestamp of one leg's peer. mu of peerClocks guards it.
type peerReading struct {
	ends   connectionEnds
	newest flow.PeerClock // zero value: none yet
}

// ackRing is the memory that the kernel writes the acknowledgements of one address family into.
type ackRing struct {
	fd   int
	ring []byte // ackBlockSize bytes; nil: not mapped yet
	next int    // frame that the kernel writes next
}

// Sizes of a ring. A tick comes each millisecond, so 256 frames hold the acknowledgements of 3 to 6 Gbit/s. What finds
// the ring full is dropped, and costs a reading.
const (
	ackFrameSize = 256 // bytes: the kernel's header and the longest headers of IP and TCP, which take 120
	ackBlockSize = 1 << 16
)

// open opens the packet sockets. After an error there are no readings.
func (p *peerClocks) open(clock func() cc.Time) error {
	p.clock, p.legs = clock, map[connectionEnds]*peerReading{}
	for _, family := range []struct {
		protocol uint16
		filter   []unix.SockFilter
	}{{unix.ETH_P_IP, acksOverIPv4}, {unix.ETH_P_IPV6, acksOverIPv6}} {
		r, err := newAckRing(family.protocol, family.filter)
		if err != nil {
			return errors.Join(fmt.Errorf("packet socket: %w", err), p.close())
		}
		p.rings = append(p.rings, r)
	}
	return nil
}

// close ends the readings. Legs keep their last ones.
func (p *peerClocks) close() (err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.rings {
		err = errors.Join(err, r.close())
	}
	p.rings = nil
	return err
}

// watchLeg begins to read the timestamps of a leg's peer. nil: there are no readings.
func (p *peerClocks) watchLeg(local, remote netip.AddrPort) *peerReading {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.rings == nil || !local.IsValid() {
		return nil
	}
	r := &peerReading{ends: connectionEnds{remote: datapath.PlainAddr(remote), local: datapath.PlainAddr(local)}}
	p.legs[r.ends] = r
	return r
}

// forgetLeg ends what watchLeg began, but not for a later leg with the same ends. r may be nil.
func (p *peerClocks) forgetLeg(r *peerReading) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r != nil && p.legs[r.ends] == r {
		delete(p.legs, r.ends)
	}
}

// readingOf returns the newest timestamp of a leg's peer. r may be nil.
func (p *peerClocks) readingOf(r *peerReading) flow.PeerClock {
	if r == nil {
		return flow.PeerClock{}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return r.newest
}

// readRings takes in the acknowledgements that have come. A tick calls it before it polls legs.
func (p *peerClocks) readRings() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.legs) == 0 {
		return
	}
	var wall unix.Timespec // the kernel stamps packets with this clock
	if unix.ClockGettime(unix.CLOCK_REALTIME, &wall) != nil {
		return
	}
	now := p.clock()
	// A step of the wall clock between the two shifts one reading, which the estimator takes for a clock that was set.
	for _, r := range p.rings {
		for frame, stamp := r.nextFrame(); frame != nil; frame, stamp = r.nextFrame() {
			ends, value, ok := parseAck(frame)
			r.releaseFrame()
			if leg := p.legs[ends]; ok && leg != nil {
				leg.newest = flow.PeerClock{At: min(now, now.Add(time.Duration(stamp-wall.Nano()))), Value: value}
			}
		}
	}
}

// newAckRing opens a packet socket for one protocol, ETH_P_IP or ETH_P_IPV6. It sets the filter before it binds the
// socket, which then gets packets. A socket for one protocol does not get what this host sends.
func newAckRing(protocol uint16, filter []unix.SockFilter) (*ackRing, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	r := &ackRing{fd: fd}
	err = errors.Join(
		unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}),
		unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VERSION, unix.TPACKET_V2),
		unix.SetsockoptTpacketReq(fd, unix.SOL_PACKET, unix.PACKET_RX_RING, &unix.TpacketReq{
			Block_size: ackBlockSize, Block_nr: 1, Frame_size: ackFrameSize, Frame_nr: ackBlockSize / ackFrameSize,
		}))
	if err == nil {
		r.ring, err = unix.Mmap(fd, 0, ackBlockSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err == nil { // the protocol is in network order
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: bits.ReverseBytes16(protocol)})
	}
	if err != nil {
		return nil, errors.Join(err, r.close())
	}
	return r, nil
}

// close closes the packet socket and gives the memory back.
func (r *ackRing) close() (err error) {
	if r.ring != nil {
		err = unix.Munmap(r.ring)
	}
	return errors.Join(err, unix.Close(r.fd))
}

// header returns the kernel's header of the frame that is next. The kernel writes Status last, so a reader must read it
// first.
func (r *ackRing) header() *unix.Tpacket2Hdr {
	return (*unix.Tpacket2Hdr)(unsafe.Pointer(&r.ring[r.next*ackFrameSize]))
}

// nextFrame returns the next packet and when it came, in ns by the wall clock; nil: there is none. releaseFrame gives
// it back.
func (r *ackRing) nextFrame() (packet []byte, stamp int64) {
	h := r.header()
	if atomic.LoadUint32(&h.Status)&unix.TP_STATUS_USER == 0 {
		return nil, 0
	}
	frame := r.ring[r.next*ackFrameSize:][:ackFrameSize]
	from := min(int(h.Net), ackFrameSize)
	to := min(from+int(h.Snaplen), ackFrameSize)
	return frame[from:to], int64(h.Sec)*int64(time.Second) + int64(h.Nsec)
}

// releaseFrame gives the frame that nextFrame returned back to the kernel, which may write into it at once.
func (r *ackRing) releaseFrame() {
	atomic.StoreUint32(&r.header().Status, unix.TP_STATUS_KERNEL)
	r.next = (r.next + 1) % (len(r.ring) / ackFrameSize)
}

// Lengths and places in headers.
const (
	ipv6Header    = 40 // bytes, without extensions
	shortHeader   = 20 // bytes, of IPv4 and TCP without options
	longestHeader = 60 // bytes, of either with the most options
	flagACK       = 0x10
	flagsAt       = 13 // in TCP's header
)

// parseAck returns the ends of the connection that a packet belongs to, and its timestamp (RFC 7323 §3.2). ok: it has
// one. Packets with broken options have none.
func parseAck(b []byte) (ends connectionEnds, value uint32, ok bool) {
	var from, to netip.Addr
	switch {
	case len(b) >= shortHeader && b[0]>>4 == 4 && b[0]&15 >= shortHeader/4:
		from, to = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
		b = b[min(len(b), int(b[0]&15)*4):]
	case len(b) >= ipv6Header && b[0]>>4 == 6:
		from, to = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
		b = b[ipv6Header:]
	default:
		return ends, 0, false
	}
	if len(b) < shortHeader {
		return ends, 0, false
	}
	ends.remote = netip.AddrPortFrom(from, binary.BigEndian.Uint16(b))
	ends.local = netip.AddrPortFrom(to, binary.BigEndian.Uint16(b[2:]))
	options := b[shortHeader:min(len(b), max(shortHeader, int(b[12]>>4)*4))]
	for len(options) > 0 {
		const end, pad, timestamps, timestampsLength = 0, 1, 8, 10
		switch {
		case options[0] == pad: // it has no length
			options = options[1:]
			continue
		case options[0] == end, len(options) < 2, options[1] < 2, int(options[1]) > len(options):
			return ends, 0, false
		case options[0] == timestamps && options[1] == timestampsLength:
			return ends, binary.BigEndian.Uint32(options[2:]), true
		}
		options = options[options[1]:]
	}
	return ends, 0, false
}

// The filters let pass what is for this host: packets of TCP with ACK set (RFC 9293 §3.1) that are no longer than
// headers. That leaves out fragments, and data: a client that uploads acknowledges a download in packets of their own,
// too. Each packet that passes costs a copy of its headers. Extension headers of IPv6 are not followed, so such
// acknowledgements are not read.
var (
	acksOverIPv4 = ackFilter(
		loadByte(9), skipUnless(unix.IPPROTO_TCP, 7),
		loadHalf(6), skipIf(0x1fff, 5), // of the fragment's place
		loadHalf(2), skipAbove(longestHeader+longestHeader, 3),
		unix.SockFilter{Code: unix.BPF_LDX | unix.BPF_B | unix.BPF_MSH},
		unix.SockFilter{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_IND, K: flagsAt},
	)
	acksOverIPv6 = ackFilter(
		loadByte(6), skipUnless(unix.IPPROTO_TCP, 4),
		loadHalf(4), skipAbove(longestHeader, 2),
		loadByte(ipv6Header+flagsAt),
	)
)

// ackFilter completes a filter. Its steps load TCP's flags, or skip to one step behind that, where the packet is
// dropped. What came for another host, as on a bridge, is dropped before.
func ackFilter(steps ...unix.SockFilter) []unix.SockFilter {
	const packetType = 0xfffff004 // SKF_AD_OFF + SKF_AD_PKTTYPE
	return append(append([]unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: packetType},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.PACKET_HOST, Jf: uint8(len(steps) + 1)},
	}, steps...),
		unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, K: flagACK, Jt: 1},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: longestHeader + longestHeader})
}

// loadByte and loadHalf load one byte, or two in network order, from a place behind the start of IP's header.
func loadByte(at uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: at}
}

func loadHalf(at uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: at}
}

// skipUnless, skipIf and skipAbove leave out n steps where the value differs, has one of the bits, or is larger.
func skipUnless(value uint32, n uint8) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: value, Jf: n}
}

func skipIf(mask uint32, n uint8) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, K: mask, Jt: n}
}

func skipAbove(value uint32, n uint8) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K, K: value, Jt: n}
}
