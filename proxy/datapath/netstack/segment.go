package netstack

import (
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// OptionIndex returns the index in segment of an option's value (RFC 9293 §3.1), behind its kind and its length; -1: the
// segment has no such option of length bytes, or its options are malformed before it. The segment's header is whole.
func OptionIndex(segment header.TCP, kind byte, length int) int {
	options := segment.Options()
	for i := 0; i < len(options); {
		switch options[i] {
		case header.TCPOptionEOL:
			return -1
		case header.TCPOptionNOP:
			i++
			continue
		}
		if i+1 >= len(options) || options[i+1] < 2 || i+int(options[i+1]) > len(options) {
			return -1
		}
		if options[i] == kind && int(options[i+1]) == length {
			return header.TCPMinimumSize + i + 2
		}
		i += int(options[i+1])
	}
	return -1
}

// timestampIndex is OptionIndex of the timestamps (RFC 7323 §3.2): four bytes of the sender's, and four that it echoes.
func timestampIndex(segment header.TCP) int {
	return OptionIndex(segment, header.TCPOptionTS, header.TCPOptionTSLength)
}

// RewriteSegment overwrites a part of a segment from index at on, and corrects the checksum for the change alone (RFC
// 1624 §3): a segment that arrived damaged stays damaged.
func RewriteSegment(segment header.TCP, at int, value []byte) {
	words := segment[at&^1 : min((at+len(value)+1)&^1, len(segment))] // the checksum is of words at even offsets
	others := checksum.Combine(^segment.Checksum(), ^checksum.Checksum(words, 0))
	copy(segment[at:], value)
	segment.SetChecksum(^checksum.Combine(others, checksum.Checksum(words, 0)))
}
