//go:build linux

package netlab

import (
	"hash/fnv"
	"net/netip"
)

// addresses returns an IP packet's source and destination; both are invalid when its header is cut short.
func addresses(b []byte) (src, dst netip.Addr) {
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		return netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
	case len(b) >= 40 && b[0]>>4 == 6:
		return netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
	}
	return src, dst
}

// flowOf is a number that the packets of one flow share: a hash of addresses, protocol and
// ports (FNV-1a).
func flowOf(b []byte) uint32 {
	var parts [][]byte
	switch {
	case len(b) >= 24 && b[0]>>4 == 4:
		head := int(b[0]&0xf) * 4
		parts = [][]byte{b[9:10], b[12:20], b[min(head, len(b)-4):][:4]}
	case len(b) >= 44 && b[0]>>4 == 6:
		parts = [][]byte{b[6:7], b[8:44]}
	}
	hash := fnv.New32a()
	for _, part := range parts {
		_, _ = hash.Write(part) // never fails
	}
	return hash.Sum32()
}
