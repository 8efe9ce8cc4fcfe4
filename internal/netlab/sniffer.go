//go:build linux

package netlab

import (
	"bufio"
	"errors"
	"fmt"
	"io"
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

// Sniffer writes the packets that pass a device, both ways, to a file. It sees what is about to leave after
// segmentation, unless the device segments by itself: a path's devices do not, veth devices do and show packets of up
// to 64 KiB.
type Sniffer struct {
	device string
	fd     int
	out    *bufio.Writer // keeps an error for Stop
	ring   []byte
	next   int // frame that the kernel fills next

	quit, done chan struct{}
	once       sync.Once
	missed     int
	err        error
}

// Dump begins to write the packets that pass one of the node's devices to w, in the format pcap. Of a packet it
// writes the first 170 bytes or so, which are all headers. Stop must be called, also when the lab has closed; it
// returns an error of w.
func (n *Node) Dump(device string, w io.Writer) (*Sniffer, error) {
	s := &Sniffer{
		device: device, fd: -1, out: bufio.NewWriterSize(w, 1<<16), quit: make(chan struct{}), done: make(chan struct{}),
	}
	_, _ = s.out.Write(pcapHead())
	var index int
	err := n.withLink(device, func(_ *netlink.Handle, link netlink.Link) error {
		index = link.Attrs().Index
		return nil
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
	if err := unix.Bind(s.fd, &unix.SockaddrLinklayer{Protocol: allProtocols, Ifindex: index}); err != nil {
		return fmt.Errorf("bind the packet socket: %w", err)
	}
	return nil
}

// allProtocols is ETH_P_ALL in network order: a socket that asks
// for one protocol does not see what leaves.
const allProtocols = unix.ETH_P_ALL << 8

// Stop ends the file, with the last packet, and returns how many packets came faster than they were read. Stopping
// again returns the same.
func (s *Sniffer) Stop() (missed int, err error) {
	s.once.Do(func() {
		close(s.quit)
		<-s.done
		stats, err := unix.GetsockoptTpacketStats(s.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
		if err != nil {
			s.err = fmt.Errorf("netlab: count what was missed at %s: %w", s.device, err)
		} else {
			s.missed = int(stats.Drops)
		}
		s.err = errors.Join(s.err, s.out.Flush(), s.close())
	})
	return s.missed, s.err
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
	for {
		frame := s.ring[s.next*sniffFrame:][:sniffFrame]
		header := (*unix.Tpacket2Hdr)(unsafe.Pointer(&frame[0]))
		if atomic.LoadUint32(&header.Status)&unix.TP_STATUS_USER == 0 {
			return
		}
		writePcap(s.out, frame[header.Net:][:header.Snaplen], header)
		atomic.StoreUint32(&header.Status, unix.TP_STATUS_KERNEL)
		s.next = (s.next + 1) % (len(s.ring) / sniffFrame)
	}
}
