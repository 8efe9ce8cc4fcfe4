//go:build linux

package netlab

import (
	"bufio"
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Of the file format pcap (draft-ietf-opsawg-pcap): the magic number for times in nanoseconds, and the link type of
// packets that begin with their IP header.
const (
	pcapNanoseconds = 0xa1b23c4d
	pcapRaw         = 101
)

// pcapHead is the head of a file of packets, version 2.4.
func pcapHead() (head []byte) {
	for _, field := range []uint32{pcapNanoseconds, 4<<16 | 2, 0, 0, sniffFrame, pcapRaw} {
		head = binary.NativeEndian.AppendUint32(head, field)
	}
	return head
}

// writePcap writes one packet behind its record header.
func writePcap(out *bufio.Writer, packet []byte, header *unix.Tpacket2Hdr) {
	var head [16]byte
	for i, field := range []uint32{header.Sec, header.Nsec, uint32(len(packet)), header.Len} {
		binary.NativeEndian.PutUint32(head[4*i:], field)
	}
	_, _ = out.Write(head[:]) // the writer keeps its error for Stop
	_, _ = out.Write(packet)
}
