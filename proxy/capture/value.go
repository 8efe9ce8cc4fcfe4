package capture

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// truth is a three-valued answer (Kleene logic). maybe depends on something unknown.
type truth int8

const (
	no truth = iota
	maybe
	yes
)

// truthOf returns yes or no.
func truthOf(b bool) truth {
	if b {
		return yes
	}
	return no
}

// and is the lesser of both.
func (a truth) and(b truth) truth { return min(a, b) }

// or is the greater of both.
func (a truth) or(b truth) truth { return max(a, b) }

// not swaps yes and no; maybe stays.
func (a truth) not() truth { return a.notIf(true) }

// notIf is not where invert is set.
func (a truth) notIf(invert bool) truth {
	if invert {
		return yes - a
	}
	return a
}

// value is a number with known and unknown bits. Without data nothing is known of it.
type value struct{ data, known []byte }

// knownValue returns a value with all bits known.
func knownValue(data []byte) value {
	return value{data, bytes.Repeat([]byte{0xff}, len(data))}
}

// nativeNumber returns a known number in the byte order of meta and ct.
func nativeNumber(v uint32) value { return knownValue(nativeBytes(v)) }

// isKnown reports whether all bits are known.
func (v value) isKnown() bool {
	return len(v.data) > 0 && !slices.ContainsFunc(v.known, func(k byte) bool { return k != 0xff })
}

// bitwise evaluates "and mask xor". It returns an unknown value for shifts.
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

// swapBytes converts between this machine's byte order and the network's.
func (v value) swapBytes(size uint32) value {
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

// compare evaluates a comparison with data. Shorter data is a wildcard, as in names of interfaces.
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

// isBetween evaluates a range of ports.
func (v value) isBetween(first, last uint16) truth {
	if first == 0 && last == 1<<16-1 {
		return yes
	}
	return v.compare(expr.CmpOpGte, binary.BigEndian.AppendUint16(nil, first)).
		and(v.compare(expr.CmpOpLte, binary.BigEndian.AppendUint16(nil, last)))
}

// findElement returns the element that holds v.
func (s filterSet) findElement(v value) (found nftables.SetElement, is truth) {
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

// isWithin evaluates a range of a concatenation. It compares each word by itself, because a field
// fills one word, or is a name or a prefix.
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

// mapTo returns the verdicts that a look-up in a verdict map may have.
func (v value) mapTo(s filterSet) (is truth, ends []verdict) {
	e, is := s.findElement(v)
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

// registers are those of nftables. Expressions address them by 16 bytes or by 4, and read a
// concatenation across several.
type registers struct{ data, known [80]byte }

// registerSize is the size of a register that keeps one value of any kind, in bytes.
const registerSize = 16

// offset returns where a register begins.
func (r *registers) offset(register uint32) int {
	at := int(register) * registerSize
	if register >= unix.NFT_REG32_00 {
		at = registerSize + 4*int(register-unix.NFT_REG32_00)
	}
	return min(at, len(r.data))
}

// read returns n bytes from a register on.
func (r *registers) read(register uint32, n int) value {
	at := r.offset(register)
	if n < 0 || at+n > len(r.data) {
		return value{}
	}
	return value{r.data[at : at+n], r.known[at : at+n]}
}

// write stores a value, padded to whole words.
func (r *registers) write(register uint32, v value) {
	n := len(v.data)
	if n == 0 {
		r.forgetBytes(register, registerSize)
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

// forgetBytes makes n bytes unknown.
func (r *registers) forgetBytes(register uint32, n int) {
	at := r.offset(register)
	clear(r.known[at:min(at+n, len(r.known))])
}
