package capture

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// truth says whether something holds.
type truth int8

const (
	no truth = iota
	maybe
	yes
)

func truthOf(b bool) truth {
	if b {
		return yes
	}
	return no
}

func (a truth) and(b truth) truth { return min(a, b) }
func (a truth) or(b truth) truth  { return max(a, b) }
func (a truth) not() truth        { return yes - a }

// value is a number of which some bits are known; without data, nothing is known of it.
type value struct{ data, known []byte }

func knownValue(data []byte) value {
	return value{data, bytes.Repeat([]byte{0xff}, len(data))}
}

// nativeNumber is a number as meta and ct have it.
func nativeNumber(v uint32) value { return knownValue(nativeBytes(v)) }

func (v value) isKnown() bool {
	return len(v.data) > 0 && !slices.ContainsFunc(v.known, func(k byte) bool { return k != 0xff })
}

func (v value) bitwise(x *expr.Bitwise) value {
	n := len(v.data)
	if n == 0 || len(x.Mask) != n || len(x.Xor) != n { // a shift, or another width than expected
		return value{}
	}
	is := value{make([]byte, n), make([]byte, n)}
	for i := range n {
		is.data[i] = v.data[i]&x.Mask[i] ^ x.Xor[i]
		is.known[i] = v.known[i] | ^x.Mask[i]
	}
	return is
}

// swap converts between this machine's byte order and the network's.
func (v value) swap(size uint32) value {
	is := value{slices.Clone(v.data), slices.Clone(v.known)}
	if size == 0 || binary.NativeEndian.Uint16([]byte{0, 1}) == 1 {
		return is
	}
	for _, b := range [][]byte{is.data, is.known} {
		for unit := range slices.Chunk(b, int(size)) {
			slices.Reverse(unit)
		}
	}
	return is
}

// compare evaluates a comparison with data, which may be shorter: names of interfaces have wildcards so.
func (v value) compare(op expr.CmpOp, data []byte) truth {
	if len(data) > len(v.data) {
		return maybe
	}
	is := yes
	for i := range data {
		if (v.data[i]^data[i])&v.known[i] != 0 {
			is = no
			break
		} else if v.known[i] != 0xff {
			is = maybe
		}
	}
	switch {
	case op == expr.CmpOpEq:
		return is
	case op == expr.CmpOpNeq:
		return is.not()
	case !v.isKnown():
		return maybe
	}
	order := bytes.Compare(v.data[:len(data)], data)
	switch op {
	case expr.CmpOpLt:
		return truthOf(order < 0)
	case expr.CmpOpLte:
		return truthOf(order <= 0)
	case expr.CmpOpGt:
		return truthOf(order > 0)
	case expr.CmpOpGte:
		return truthOf(order >= 0)
	}
	return maybe
}

// between evaluates a range of ports.
func (v value) between(first, last uint16) truth {
	if first == 0 && last == 1<<16-1 {
		return yes
	}
	return v.compare(expr.CmpOpGte, binary.BigEndian.AppendUint16(nil, first)).
		and(v.compare(expr.CmpOpLte, binary.BigEndian.AppendUint16(nil, last)))
}

// find returns the element that holds v.
func (s filterSet) find(v value) (found nftables.SetElement, is truth) {
	if s.Interval && !v.isKnown() && len(s.elements) > 0 {
		return found, maybe
	}
	for _, e := range s.elements {
		switch {
		case len(e.Key) != len(v.data):
			return nftables.SetElement{}, maybe
		case len(e.KeyEnd) == len(e.Key):
			if v.isWithin(e.Key, e.KeyEnd) {
				return e, yes
			}
		case !s.Interval:
			switch v.compare(expr.CmpOpEq, e.Key) {
			case yes:
				return e, yes
			case maybe:
				is = maybe
			}
		case bytes.Compare(e.Key, v.data) <= 0:
			// The last that begins or ends before v; where one ends as another begins, the other.
			if is := bytes.Compare(e.Key, found.Key); found.Key == nil || is > 0 || is == 0 && found.IntervalEnd {
				found = e
			}
		}
	}
	if found.Key != nil && !found.IntervalEnd {
		return found, yes
	}
	return nftables.SetElement{}, is
}

// isWithin evaluates ranges of a concatenation. Each word of a key is compared by itself: a field fills one word,
// or is a name or a prefix.
func (v value) isWithin(first, last []byte) bool {
	const word = 4
	for i := 0; i < len(v.data); i += word {
		end := min(i+word, len(v.data))
		if is := v.data[i:end]; bytes.Compare(is, first[i:end]) < 0 || bytes.Compare(is, last[i:end]) > 0 {
			return false
		}
	}
	return true
}

// mapTo evaluates a look-up in a verdict map: the verdicts that it may come to.
func (v value) mapTo(s filterSet) (is truth, ends []verdict) {
	e, is := s.find(v)
	switch is {
	case yes:
		ends = []verdict{elementVerdict(e)}
	case maybe: // any of them, or none
		for _, e := range s.elements {
			if !e.IntervalEnd {
				ends = append(ends, elementVerdict(e))
			}
		}
	}
	return is, ends
}

// registers are those of nftables: expressions address them by 16 bytes or by 4, and a concatenation is read across
// several.
type registers struct{ data, known [80]byte }

// wide is the size of the registers that keep one value of any kind.
const registerSize = 16

// offset returns where a register begins.
func (r *registers) offset(register uint32) int {
	at := int(register) * registerSize
	if register >= unix.NFT_REG32_00 {
		at = registerSize + 4*int(register-unix.NFT_REG32_00)
	}
	return min(at, len(r.data))
}

func (r *registers) read(register uint32, n int) value {
	at := r.offset(register)
	if n < 0 || at+n > len(r.data) {
		return value{}
	}
	return value{r.data[at : at+n], r.known[at : at+n]}
}

// write keeps a value, padded to whole words.
func (r *registers) write(register uint32, v value) {
	n := len(v.data)
	if n == 0 {
		r.forget(register, registerSize)
		return
	}
	to := r.read(register, (n+3)&^3)
	if len(to.data) == 0 {
		return
	}
	copy(to.data, v.data)
	copy(to.known, v.known)
	for i := n; i < len(to.data); i++ {
		to.data[i], to.known[i] = 0, 0xff
	}
}

func (r *registers) forget(register uint32, n int) {
	at := r.offset(register)
	clear(r.known[at:min(at+n, len(r.known))])
}
