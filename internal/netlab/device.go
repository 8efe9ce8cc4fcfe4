//go:build linux

package netlab

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// MTU is that of every path: what one delivery opportunity carries.
const MTU = 1500

// ringPackets is how many packets a path's device holds until the emulator reads
// them: far more than any window's burst, as a device that overflows would be a
// second drop-tail queue beside the link's.
const ringPackets = 20_000

// firstIndex is above any index that a node of a few devices counts up to.
const firstIndex = 1000

// readyTimeout is far longer than the kernel takes, even on a busy machine.
const readyTimeout = 10 * time.Second

// tunDevice is the kernel's door to TUN devices; a test stands in its own.
var tunDevice = "/dev/net/tun"

// End is one end of a link: a device in a node, with its addresses.
type End struct {
	Node   *Node
	Device string
	Addrs  []netip.Prefix
}

// Veth joins two nodes with a pair of virtual Ethernet devices.
func (l *Lab) Veth(a, b End) error {
	return a.Node.withNetlink(func(ha *netlink.Handle) error {
		return b.Node.withNetlink(func(hb *netlink.Handle) error {
			attrs := netlink.NewLinkAttrs()
			attrs.Name = a.Device
			// Two ends with equal indices, each in its own namespace, look to the
			// kernel like one plain device. It announces the carrier of that up to a
			// second late, and IPv6 is deaf until then.
			attrs.Index = int(firstIndex + l.vethes.Add(1))
			pair := &netlink.Veth{LinkAttrs: attrs, PeerName: b.Device, PeerNamespace: netlink.NsFd(b.Node.ns)}
			if err := ha.LinkAdd(pair); err != nil {
				return fmt.Errorf("netlab: join %s and %s: %w", a.Node.name, b.Node.name, err)
			}
			if err := errors.Join(a.up(ha), b.up(hb)); err != nil {
				return err
			}
			return errors.Join(a.await(ha), b.await(hb))
		})
	})
}

// up gives the device its addresses and starts it.
func (e End) up(h *netlink.Handle) error {
	link, err := h.LinkByName(e.Device)
	if err == nil {
		err = bringUp(h, link, e.Addrs)
	}
	if err != nil {
		return fmt.Errorf("netlab: configure %s in %s: %w", e.Device, e.Node.name, err)
	}
	return nil
}

// bringUp gives a device addresses and starts it. IPv6 addresses are usable at
// once: in a network of our own no other node can hold them.
func bringUp(h *netlink.Handle, link netlink.Link, addrs []netip.Prefix) error {
	for _, a := range addrs {
		addr := &netlink.Addr{IPNet: ipNet(a)}
		if a.Addr().Is6() {
			addr.Flags = unix.IFA_F_NODAD
		}
		if err := h.AddrAdd(link, addr); err != nil {
			return err
		}
	}
	return h.LinkSetUp(link)
}

// await waits until the kernel has taken notice that the device's peer is up, and
// has let go of the last doubt about its addresses: a worker of its own does both,
// and a neighbour asked before then is asked again a second later.
func (e End) await(h *netlink.Handle) error {
	for deadline := time.Now().Add(readyTimeout); ; time.Sleep(time.Millisecond) {
		ready, err := e.ready(h)
		switch {
		case err != nil:
			return fmt.Errorf("netlab: look at %s in %s: %w", e.Device, e.Node.name, err)
		case ready:
			return nil
		case time.Now().After(deadline):
			return fmt.Errorf("netlab: %s in %s is not ready after %s", e.Device, e.Node.name, readyTimeout)
		}
	}
}

func (e End) ready(h *netlink.Handle) (bool, error) {
	link, err := h.LinkByName(e.Device)
	if err != nil {
		return false, err
	}
	alone := link.Attrs().RawFlags&unix.IFF_NOARP != 0 // a TUN device: no carrier, no neighbours
	if !alone && link.Attrs().OperState != netlink.OperUp {
		return false, nil
	}
	addrs, err := h.AddrList(link, netlink.FAMILY_V6)
	linkLocal := alone
	for _, a := range addrs {
		if a.Flags&unix.IFA_F_TENTATIVE != 0 {
			return false, err
		}
		linkLocal = linkLocal || a.IP.IsLinkLocalUnicast()
	}
	return linkLocal, err
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// tun makes the end a TUN device and returns its descriptor: non-blocking, one
// whole IP packet per read and write, no offloads, so that packets look as they
// would on a wire.
func (e End) tun() (fd int, err error) {
	err = e.Node.Do(func() error {
		fd, err = openTUN(e.Device)
		return err
	})
	if err != nil {
		return -1, err
	}
	// Without a link-local address and multicast the device sends nothing of its
	// own accord. Veth devices need both: a router asks for its neighbours so.
	err = e.Node.Sysctl("net.ipv6.conf."+e.Device+".addr_gen_mode", "1")
	if err == nil {
		err = e.Node.withLink(e.Device, func(h *netlink.Handle, link netlink.Link) error {
			if err := errors.Join(h.LinkSetMTU(link, MTU), h.LinkSetTxQLen(link, ringPackets),
				h.LinkSetMulticastOff(link)); err != nil {
				return fmt.Errorf("netlab: configure %s in %s: %w", e.Device, e.Node.name, err)
			}
			if err := e.up(h); err != nil {
				return err
			}
			return e.await(h)
		})
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// ErrNoTUN is the error of a link where this process cannot have a TUN device.
var ErrNoTUN = errors.New("no link without a TUN device")

// openTUN creates the device in the namespace of the calling thread.
func openTUN(name string) (int, error) {
	fd, err := unix.Open(tunDevice, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return -1, fmt.Errorf("netlab: %w: %s is missing: load the module (modprobe tun), or give the container "+
			"the device (--device %s)", ErrNoTUN, tunDevice, tunDevice)
	case errors.Is(err, fs.ErrPermission):
		return -1, fmt.Errorf("netlab: %w: %s may not be opened by this user (%w): run as root, or chmod 0666 %s",
			ErrNoTUN, tunDevice, err, tunDevice)
	case err != nil:
		return -1, fmt.Errorf("netlab: open %s: %w", tunDevice, err)
	}
	req, err := unix.NewIfreq(name)
	if err == nil {
		req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err != nil {
		return -1, errors.Join(fmt.Errorf("netlab: create TUN device %s: %w%s", name, err, privilegeHint(err)),
			unix.Close(fd))
	}
	return fd, nil
}

// missed returns how many packets the end's device has dropped by itself.
func (e End) missed() (n uint64, err error) {
	err = e.Node.withLink(e.Device, func(_ *netlink.Handle, link netlink.Link) error {
		if s := link.Attrs().Statistics; s != nil {
			n = s.TxDropped
		}
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("netlab: read statistics of %s: %w", e.Device, err)
	}
	return n, nil
}

// readPacket and writePacket keep the goroutine's processor, which the usual
// wrappers would put up for grabs: the descriptor never blocks.
func readPacket(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	return int(n), errno
}

func writePacket(fd int, b []byte) unix.Errno {
	_, _, errno := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	return errno
}
