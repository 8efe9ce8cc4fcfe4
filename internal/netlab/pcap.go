//go:build linux

package netlab

import (
	"bufio"
	"encoding/binary"
	"io"

	"golang.org/x/sys/unix"
)

// Of the file format pcap (draft-ietf-opsawg-pcap): the magic number for times in nanoseconds, and the link type of
// packets that begin with their IP header.
const (
	pcapNanoseconds = 0xa1b23c4d
	pcapRaw         = 101
)

// Dump begins to write the packets that pass one of the node's devices to w, in the format pcap. Of a packet it
// writes the first 170 bytes or so, which are all headers. Stop must be called, also when the lab has closed; it
// returns an error of w. The capture that Stop returns has no packets.
func (n *Node) Dump(device string, w io.Writer) (*Sniffer, error) {
	head := make([]byte, 0, 24)
	for _, field := range []uint32{pcapNanoseconds, 4<<16 | 2, 0, 0, sniffFrame, pcapRaw} { // version 2.4
		head = binary.NativeEndian.AppendUint32(head, field)
	}
	out := bufio.NewWriterSize(w, 1<<16)
	_, _ = out.Write(head) // the writer keeps its error for Stop
	return n.sniff(device, out)
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
