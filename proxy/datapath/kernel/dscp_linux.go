package kernel

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

var _ datapath.Marker = (*Conn)(nil)

// A DSCP is the upper six bits of the TOS byte and of the traffic class. On TCP sockets the kernel keeps the lower
// two, which are ECN's, whatever is set.
const dscpShift = 2

// tosReader has the filter for what dialled IPv4 sockets receive. It is loaded at the start, since the program drops
// its privileges then, and a reload may ask for it.
type tosReader struct {
	filter *bpf.TOSFilter // nil: it cannot be had
	why    error
	warned sync.Once
}

func (r *tosReader) open() { r.filter, r.why = bpf.OpenTOSFilter() }

func (r *tosReader) close() error {
	if r.filter == nil {
		return nil
	}
	return r.filter.Close()
}

// markDialled sets the DSCP of a socket that is to connect, and prepares it for readDialled.
func (d *Datapath) markDialled(fd int, is4 bool, dscp uint8) error {
	if err := setDSCP(fd, is4, dscp); err != nil {
		return err
	}
	if !is4 {
		return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVTCLASS, 1)
	}
	if d.tosReader.filter != nil {
		return d.tosReader.filter.Attach(fd)
	}
	d.tosReader.warned.Do(func() {
		d.log.Warn("the DSCP of servers cannot be read over IPv4, so that clients are answered with their own; start the "+
			"program with CAP_BPF", "err", d.tosReader.why)
	})
	return nil
}

// readDialled returns the DSCP of what a socket has received that markDialled prepared, and undoes that: it costs
// time with each packet.
func (d *Datapath) readDialled(fd int, is4 bool) (uint8, error) {
	if !is4 {
		return readTrafficClass(fd)
	}
	if d.tosReader.filter == nil {
		return 0, nil
	}
	tos, err := d.tosReader.filter.Detach(fd)
	return tos >> dscpShift, err
}

func setDSCP(fd int, is4 bool, dscp uint8) error {
	level, option := unix.IPPROTO_IP, unix.IP_TOS
	if !is4 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_TCLASS
	}
	if err := unix.SetsockoptInt(fd, level, option, int(dscp)<<dscpShift); err != nil {
		return fmt.Errorf("set a DSCP of %d: %w", dscp, err)
	}
	return nil
}

// readTOS returns the DSCP of the packet that completed the handshake of an accepted socket.
func readTOS(fd int) (uint8, error) {
	return readPacketOption(fd, unix.IPPROTO_IP, unix.IP_RECVTOS, unix.IP_PKTOPTIONS, unix.IP_TOS)
}

func readTrafficClass(fd int) (uint8, error) {
	return readPacketOption(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVTCLASS, unix.IPV6_2292PKTOPTIONS, unix.IPV6_TCLASS)
}

// readPacketOption returns the DSCP out of what the kernel keeps of a TCP socket's packets: the option receive has it
// show that in the control messages that the option packet reads, in one of kind.
func readPacketOption(fd, level, receive, packet, kind int) (uint8, error) {
	if err := unix.SetsockoptInt(fd, level, receive, 1); err != nil {
		return 0, fmt.Errorf("ask for the DSCP of what was received: %w", err)
	}
	var buf [256]byte
	size := uint32(len(buf))
	_, _, errno := unix.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(packet),
		uintptr(unsafe.Pointer(&buf)), uintptr(unsafe.Pointer(&size)), 0)
	err := unix.SetsockoptInt(fd, level, receive, 0)
	if errno != 0 {
		err = errors.Join(err, errno)
	}
	if err != nil {
		return 0, fmt.Errorf("read the DSCP of what was received: %w", err)
	}
	controls, err := unix.ParseSocketControlMessage(buf[:size])
	if err != nil {
		return 0, fmt.Errorf("read the DSCP of what was received: %w", err)
	}
	for _, c := range controls {
		if int(c.Header.Level) == level && int(c.Header.Type) == kind && len(c.Data) >= int(unsafe.Sizeof(int32(0))) {
			return uint8(*(*int32)(unsafe.Pointer(&c.Data[0]))) >> dscpShift, nil
		}
	}
	return 0, nil
}

// ReceivedDSCP implements datapath.Marker. Of a leg that was dialled it is known where DialConfig.DSCP kept one.
func (c *Conn) ReceivedDSCP() (dscp uint8) {
	if c.dialled {
		return c.serverDSCP
	}
	err := c.raw.Visit(func(fd int) (err error) {
		if isIPv4(c.remote) {
			dscp, err = readTOS(fd)
		} else {
			dscp, err = readTrafficClass(fd)
		}
		return err
	})
	if err != nil {
		c.dp.log.Debug("a client's DSCP is not known", "err", err)
	}
	return dscp
}

// SetDSCP implements datapath.Marker.
func (c *Conn) SetDSCP(dscp uint8) error {
	return c.raw.Visit(func(fd int) error { return setDSCP(fd, isIPv4(c.remote), dscp) })
}

// isIPv4 is true for IPv4 on a socket of both families, too.
func isIPv4(a *net.TCPAddr) bool { return a.IP.To4() != nil }
