package doctor

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// SocketOwner returns the process with the socket that occupies an address; empty: it cannot be
// found, or this user may not see its descriptors.
func SocketOwner(network, address string) string {
	host, text, _ := net.SplitHostPort(address)
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return ""
	}
	wanted := netip.IPv6Unspecified()
	if addr, err := netip.ParseAddr(host); err == nil {
		wanted = addr.Unmap()
	}
	for _, s := range openSockets(network) {
		have, ok := netip.AddrFromSlice(s.ID.Source)
		have = have.Unmap()
		if ok && s.ID.SourcePort == uint16(port) && (have == wanted || have.IsUnspecified() || wanted.IsUnspecified()) {
			if owner := processOf(s.INode); owner != "" {
				return owner
			}
		}
	}
	return ""
}

// openSockets returns the sockets of both families that take connections or datagrams.
func openSockets(network string) (open []*netlink.Socket) {
	list := netlink.SocketDiagTCP
	if network == "udp" {
		list = netlink.SocketDiagUDP
	}
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		all, err := list(family)
		if err != nil {
			continue // the owner stays unknown
		}
		for _, s := range all {
			if network == "udp" || s.State == netlink.TCP_LISTEN {
				open = append(open, s)
			}
		}
	}
	return open
}

// processOf returns the process with the socket of an inode number.
func processOf(inode uint32) string {
	links, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		return ""
	}
	for _, link := range links {
		if to, err := os.Readlink(link); err != nil || to != fmt.Sprintf("socket:[%d]", inode) {
			continue
		}
		process := filepath.Dir(filepath.Dir(link))
		name, err := os.ReadFile(filepath.Join(process, "comm"))
		if err != nil {
			return ""
		}
		return fmt.Sprintf("%s (process %s)", strings.TrimSpace(string(name)), filepath.Base(process))
	}
	return ""
}
