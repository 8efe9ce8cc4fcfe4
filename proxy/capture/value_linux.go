package capture

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
)

// answer says whether something holds.
type answer int8

const (
	no answer = iota
	maybe
	yes
)

func answerOf(b bool) answer {
	if b {
		return yes
	}
	return no
}

func (a answer) and(b answer) answer { return min(a, b) }
func (a answer) or(b answer) answer  { return max(a, b) }
func (a answer) inverted() answer    { return yes - a }

// value is all that a register may hold; nil: nobody knows.
type value []bits

// bits is a number of which some bits are known.
type bits struct {
	data, known []byte
	native      bool  // it is in the byte order of this machine, so only equality is looked at
	never       value // what it is known not to be, whole
}

func exactly(data []byte) bits {
	return bits{data: data, known: bytes.Repeat([]byte{0xff}, len(data))}
}

// nativeNumber is a number as meta and ct have it.
func nativeNumber(v uint32) bits {
	b := exactly(nativeBytes(v))
	b.native = true
	return b
}

// all combines what holds for each alternative.
func (v value) all(holds func(bits) answer) answer {
	if len(v) == 0 {
		return maybe
	}
	is := holds(v[0])
	for _, b := range v[1:] {
		if holds(b) != is {
			return maybe
		}
	}
	return is
}

func (v value) bitwise(x *expr.Bitwise) value {
	var out value
	for _, b := range v {
		n := len(b.data)
		if len(x.Mask) != n || len(x.Xor) != n { // a shift, or another width than expected
			return nil
		}
		is := bits{data: make([]byte, n), known: make([]byte, n), native: b.native}
		for i := range n {
			is.data[i] = b.data[i]&x.Mask[i] ^ x.Xor[i]
			is.known[i] = b.known[i] | ^x.Mask[i]
		}
		out = append(out, is)
	}
	return out
}

// compare evaluates a comparison with data, which may be shorter: names of interfaces have wildcards so.
func (v value) compare(op expr.CmpOp, data []byte) answer {
	return v.all(func(b bits) answer {
		if len(data) > len(b.data) {
			return maybe
		}
		is := yes
		for i := range data {
			if (b.data[i]^data[i])&b.known[i] != 0 {
				is = no
			} else if b.known[i] != 0xff {
				is = is.and(maybe)
			}
		}
		if is == maybe && slices.ContainsFunc(b.never, func(n bits) bool { return bytes.Equal(n.data, data) }) {
			is = no
		}
		switch {
		case op == expr.CmpOpEq:
			return is
		case op == expr.CmpOpNeq:
			return is.inverted()
		case b.native || !b.whole():
			return maybe
		}
		order := bytes.Compare(b.data[:len(data)], data)
		switch op {
		case expr.CmpOpLt:
			return answerOf(order < 0)
		case expr.CmpOpLte:
			return answerOf(order <= 0)
		case expr.CmpOpGt:
			return answerOf(order > 0)
		case expr.CmpOpGte:
			return answerOf(order >= 0)
		}
		return maybe
	})
}

func (b bits) whole() bool {
	return !slices.ContainsFunc(b.known, func(k byte) bool { return k != 0xff })
}

// between evaluates a range of ports.
func (v value) between(first, last uint16) answer {
	if first == 0 && last == 1<<16-1 {
		return yes
	}
	return v.compare(expr.CmpOpGte, binary.BigEndian.AppendUint16(nil, first)).
		and(v.compare(expr.CmpOpLte, binary.BigEndian.AppendUint16(nil, last)))
}

// isIn evaluates a look-up in a set.
func (v value) isIn(s filterSet) answer {
	return v.all(func(b bits) answer {
		_, is := s.find(b)
		return is
	})
}

// mapTo evaluates a look-up in a verdict map: the verdicts that it may come to.
func (v value) mapTo(s filterSet) (is answer, ends []verdict) {
	is = v.all(func(b bits) answer {
		e, found := s.find(b)
		if found == yes {
			ends = append(ends, mapped(e))
		}
		return found
	})
	if is == maybe { // any of them, or none
		ends = nil
		for _, e := range s.elements {
			if !e.IntervalEnd {
				ends = append(ends, mapped(e))
			}
		}
	}
	return is, ends
}

// find returns the element that holds b.
func (s filterSet) find(b bits) (nftables.SetElement, answer) {
	if len(s.elements) == 0 {
		return nftables.SetElement{}, no
	}
	if s.Concatenation || !b.whole() || s.Interval && b.native {
		return nftables.SetElement{}, maybe
	}
	var last nftables.SetElement
	for _, e := range s.elements {
		if len(e.Key) != len(b.data) || len(e.KeyEnd) > 0 {
			return nftables.SetElement{}, maybe
		}
		switch order := bytes.Compare(e.Key, b.data); {
		case !s.Interval && order == 0:
			return e, yes
		case s.Interval && order <= 0:
			// The last that begins or ends before b; where one ends as another begins, the other.
			if is := bytes.Compare(e.Key, last.Key); is > 0 || is == 0 && last.IntervalEnd || last.Key == nil {
				last = e
			}
		}
	}
	return last, answerOf(last.Key != nil && !last.IntervalEnd)
}
