//go:build linux

package netlab

import (
	"bufio"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The ring that the kernel writes packets into: 32,768 of them, looked at every
// 10 ms, keep up with three million a second.
const (
	sniffFrame  = 256     // bytes for each packet: the kernel's header and those of IP and TCP
	sniffBlock  = 1 << 16 // bytes that are allocated at once
	sniffBlocks = 128
	sniffEvery  = 10 * time.Millisecond
)

// Sniffer records the TCP packets that pass a device, both ways. It sees what is
// about to leave after segmentation, unless the device segments by itself: a
// path's devices do not, veth devices do and show packets of up to 64 KiB.
type Sniffer struct {
	device string
	fd     int
	out    *bufio.Writer // takes the packets in the format pcap; nil: they are kept
	ring   []byte
	next   int // frame that the kernel fills next

	began         time.Time
	ahead, before int64         // what the wall clock is ahead of the record's, in ns: now, and when last read
	looked        time.Duration // when it was last read, on the record's clock

	mu      sync.Mutex
	packets []Packet

	quit, done chan struct{}
	once       sync.Once
	capture    Capture
	err        error
}

// Capture is what a sniffer saw.
type Capture struct {
	Device  string
	Packets []Packet // in the order in which they passed
	Missed  int      // packets that came faster than they were read
}

// Sniff begins to record at one of the node's devices. Stop must be called, also
// when the lab has closed.
func (n *Node) Sniff(device string) (*Sniffer, error) { return n.sniff(device, nil) }

// sniff records the packets, or writes them to out.
func (n *Node) sniff(device string, out *bufio.Writer) (*Sniffer, error) {
	s := &Sniffer{device: device, fd: -1, out: out, quit: make(chan struct{}), done: make(chan struct{})}
	var index int
	err := n.withNetlink(func(h *netlink.Handle) error {
		link, err := h.LinkByName(device)
		if err == nil {
			index = link.Attrs().Index
		}
		return err
	})
	if err == nil {
		err = n.Do(func() error { return s.open(index) })
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("netlab: sniff at %s in %s: %w%s", device, n.name, err,
			privilegeHint(err)), s.close())
	}
	go s.run()
	return s, nil
}

// open makes the socket, in the namespace of the calling thread. It hears
// nothing before it is bound.
func (s *Sniffer) open(index int) (err error) {
	if s.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return fmt.Errorf("open a packet socket: %w", err)
	}
	if err := unix.SetsockoptInt(s.fd, unix.SOL_PACKET, unix.PACKET_VERSION, unix.TPACKET_V2); err != nil {
		return fmt.Errorf("choose the ring's version: %w", err)
	}
	req := unix.TpacketReq{
		Block_size: sniffBlock, Block_nr: sniffBlocks,
		Frame_size: sniffFrame, Frame_nr: sniffBlocks * sniffBlock / sniffFrame,
	}
	if err := unix.SetsockoptTpacketReq(s.fd, unix.SOL_PACKET, unix.PACKET_RX_RING, &req); err != nil {
		return fmt.Errorf("make the ring: %w", err)
	}
	if s.ring, err = unix.Mmap(s.fd, 0, sniffBlock*sniffBlocks, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED); err != nil {
		return fmt.Errorf("map the ring: %w", err)
	}
	s.began = time.Now()
	s.ahead = s.wallAhead()
	if err := unix.Bind(s.fd, &unix.SockaddrLinklayer{Protocol: allProtocols, Ifindex: index}); err != nil {
		return fmt.Errorf("bind the packet socket: %w", err)
	}
	return nil
}

// allProtocols is ETH_P_ALL in network order: a socket that asks
// for one protocol does not see what leaves.
const allProtocols = unix.ETH_P_ALL << 8

// Elapsed is the time on the record's clock.
func (s *Sniffer) Elapsed() time.Duration { return time.Since(s.began) }

// wallAhead is what the wall clock, which the kernel stamps packets with, is
// ahead of the record's: the reading that took least time.
func (s *Sniffer) wallAhead() (ahead int64) {
	tightest := time.Duration(math.MaxInt64)
	for range 3 {
		from := time.Since(s.began)
		wall := time.Now().UnixNano()
		to := time.Since(s.began)
		if to-from < tightest {
			tightest, ahead = to-from, wall-int64(from+to)/2
		}
	}
	return ahead
}

// Packets returns what has been recorded so far, but for the last 10 ms.
func (s *Sniffer) Packets() []Packet {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.packets)
}

// Stop ends the record and returns it, to the last packet. Stopping again
// returns the same.
func (s *Sniffer) Stop() (Capture, error) {
	s.once.Do(func() {
		close(s.quit)
		<-s.done
		stats, err := unix.GetsockoptTpacketStats(s.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
		if err != nil {
			s.err = fmt.Errorf("netlab: count what was missed at %s: %w", s.device, err)
		} else {
			s.capture.Missed = int(stats.Drops)
		}
		if s.out != nil {
			s.err = errors.Join(s.err, s.out.Flush())
		}
		s.capture.Device, s.capture.Packets = s.device, s.packets
		s.err = errors.Join(s.err, s.close())
	})
	return s.capture, s.err
}

func (s *Sniffer) close() error {
	var errs []error
	if s.ring != nil {
		errs = append(errs, unix.Munmap(s.ring))
	}
	if s.fd >= 0 {
		errs = append(errs, unix.Close(s.fd))
	}
	return errors.Join(errs...)
}

// run reads the ring by the clock and not by the packet: the stamps are the
// kernel's, and whoever is being measured keeps the processor.
func (s *Sniffer) run() {
	defer close(s.done)
	ticker := time.NewTicker(sniffEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			s.read()
		case <-s.quit:
			s.read()
			return
		}
	}
}

// read takes every packet out of the ring that is there.
func (s *Sniffer) read() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.before, s.ahead = s.ahead, s.wallAhead()
	defer func(now time.Duration) { s.looked = now }(s.Elapsed())
	for {
		frame := s.ring[s.next*sniffFrame:][:sniffFrame]
		header := (*unix.Tpacket2Hdr)(unsafe.Pointer(&frame[0]))
		if atomic.LoadUint32(&header.Status)&unix.TP_STATUS_USER == 0 {
			return
		}
		s.add(frame, header)
		atomic.StoreUint32(&header.Status, unix.TP_STATUS_KERNEL)
		s.next = (s.next + 1) % (len(s.ring) / sniffFrame)
	}
}

func (s *Sniffer) add(frame []byte, header *unix.Tpacket2Hdr) {
	packet := frame[header.Net:][:header.Snaplen]
	if s.out != nil {
		writePcap(s.out, packet, header)
		return
	}
	p, ok := decodePacket(packet, int(header.Len))
	if !ok {
		return
	}
	from := (*unix.RawSockaddrLinklayer)(unsafe.Pointer(&frame[tpacketAddr]))
	p.Out = from.Pkttype == unix.PACKET_OUTGOING
	p.At = s.at(int64(header.Sec)*int64(time.Second) + int64(header.Nsec))
	if n := len(s.packets); n > 0 {
		// Two processors that write at once may stamp out of their turn.
		p.At = max(p.At, s.packets[n-1].At)
	}
	s.packets = append(s.packets, p)
}

// at is when a packet with that stamp passed. The wall clock may have been set
// since the ring was last read: then it is the reading before that puts a packet
// into the time from then on.
func (s *Sniffer) at(stamp int64) time.Duration {
	at := time.Duration(stamp - s.ahead)
	if step := s.ahead - s.before; max(step, -step) > int64(time.Millisecond) {
		earlier := time.Duration(stamp - s.before)
		if at < s.looked-time.Millisecond || at > s.Elapsed() && earlier <= s.Elapsed() {
			return earlier
		}
	}
	return at
}

// tpacketAddr is where a frame has its link-layer address: behind the header,
// aligned to 16 bytes, which it is.
const tpacketAddr = unix.SizeofTpacket2Hdr
