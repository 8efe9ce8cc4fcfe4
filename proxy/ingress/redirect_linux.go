package ingress

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath"
)

// soOriginalDst is SO_ORIGINAL_DST and IP6T_SO_ORIGINAL_DST, the same number at two levels
// (linux/netfilter_ipv4.h, linux/netfilter_ipv6/ip6_tables.h).
const soOriginalDst = 80

// originalDestination asks conntrack where a redirected connection was going. A connection that
// came straight to us has its own local address, or none.
func originalDestination(conn datapath.Conn) (netip.AddrPort, error) {
	socket, ok := conn.(syscall.Conn)
	if !ok {
		return netip.AddrPort{}, errors.New("redirect: not a socket")
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("redirect: %w", err)
	}
	var dst netip.AddrPort
	v4 := datapath.LocalOf(conn).Addr().Is4()
	ctrlErr := raw.Control(func(fd uintptr) {
		if v4 {
			// x/sys reads no sockaddr by getsockopt. This function, and the one below, read
			// another structure that is large enough for one.
			var m *unix.IPv6Mreq
			if m, err = unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, soOriginalDst); err == nil {
				dst = netip.AddrPortFrom(netip.AddrFrom4([4]byte(m.Multiaddr[4:8])),
					binary.BigEndian.Uint16(m.Multiaddr[2:4]))
			}
			return
		}
		var m *unix.IPv6MTUInfo
		if m, err = unix.GetsockoptIPv6MTUInfo(int(fd), unix.SOL_IPV6, soOriginalDst); err == nil {
			port := binary.NativeEndian.AppendUint16(nil, m.Addr.Port) // network order in a native field
			dst = netip.AddrPortFrom(netip.AddrFrom16(m.Addr.Addr), binary.BigEndian.Uint16(port))
		}
	})
	if ctrlErr != nil {
		err = ctrlErr
	}
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("redirect: %w", os.NewSyscallError("getsockopt SO_ORIGINAL_DST", err))
	}
	return datapath.PlainAddr(dst), nil
}
