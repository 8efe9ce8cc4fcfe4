package stage

import (
	"bytes"
	"encoding/binary"
)

// pattern is what one connection carries: bytes that depend on the connection
// and on their place in it, so that one that is lost, doubled, moved or of
// another connection shows. They are SplitMix64's (Steele, Lea, Flood, OOPSLA 2014).
type pattern uint64

// patternOf is that of an actor's connection of that number.
func patternOf(actor, stream int) pattern { return pattern(actor)<<32 | pattern(stream) }

// word is eight bytes of it, from at × 8 on.
func (p pattern) word(at uint64) (w [8]byte) {
	z := uint64(p)*0xd1342543de82ef95 + (at+1)*0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	binary.LittleEndian.PutUint64(w[:], z^z>>31)
	return w
}

// fill writes what stands from at on.
func (p pattern) fill(b []byte, at uint64) {
	for len(b) > 0 {
		w := p.word(at / 8)
		n := copy(b, w[at%8:])
		b, at = b[n:], at+uint64(n)
	}
}

// holds reports whether b is what stands from at on.
func (p pattern) holds(b []byte, at uint64) bool {
	for len(b) > 0 {
		w := p.word(at / 8)
		n := min(len(b), int(8-at%8))
		if !bytes.Equal(b[:n], w[at%8:][:n]) {
			return false
		}
		b, at = b[n:], at+uint64(n)
	}
	return true
}
