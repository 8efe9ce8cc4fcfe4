package capture

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"github.com/google/nftables"
)

// element is one entry of a set: as people write it and as the kernel keeps
// it, from first to just before end (nil: to the very last).
type element struct {
	text       string
	first, end []byte
}

// addressElements turns the prefixes of one family into disjoint ranges: the
// kernel refuses elements of a set that overlap.
func addressElements(prefixes []netip.Prefix, v4 bool) []element {
	type span struct{ first, last netip.Addr }
	var spans []span
	for _, p := range prefixes {
		if p = p.Masked(); p.Addr().Is4() == v4 {
			spans = append(spans, span{p.Addr(), lastOf(p)})
		}
	}
	slices.SortFunc(spans, func(a, b span) int { return a.first.Compare(b.first) })
	merged := spans[:0]
	for _, s := range spans {
		if n := len(merged) - 1; n >= 0 {
			next := merged[n].last.Next() // invalid: the last of all addresses
			if !next.IsValid() || s.first.Compare(next) <= 0 {
				if s.last.Compare(merged[n].last) > 0 {
					merged[n].last = s.last
				}
				continue
			}
		}
		merged = append(merged, s)
	}
	var elements []element
	for _, s := range merged {
		e := element{text: spanText(s.first, s.last), first: s.first.AsSlice()}
		if next := s.last.Next(); next.IsValid() {
			e.end = next.AsSlice()
		}
		elements = append(elements, e)
	}
	return elements
}

// lastOf is the last address in p.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for bit := p.Bits(); bit < 8*len(b); bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	last, _ := netip.AddrFromSlice(b)
	return last
}

func spanText(first, last netip.Addr) string {
	for bits := range first.BitLen() + 1 {
		if p := netip.PrefixFrom(first, bits); p.Masked() == p && lastOf(p) == last {
			return p.String()
		}
	}
	return fmt.Sprintf("%v-%v", first, last)
}

// portElements does the same for ports.
func portElements(ports []PortRange) []element {
	ports = slices.Clone(ports)
	slices.SortFunc(ports, func(a, b PortRange) int { return cmp.Compare(a.First, b.First) })
	merged := ports[:0]
	for _, p := range ports {
		if n := len(merged) - 1; n >= 0 && int(p.First) <= int(merged[n].Last)+1 {
			merged[n].Last = max(merged[n].Last, p.Last)
			continue
		}
		merged = append(merged, p)
	}
	var elements []element
	for _, p := range merged {
		e := element{text: p.String(), first: binary.BigEndian.AppendUint16(nil, p.First)}
		if p.Last < 1<<16-1 {
			e.end = binary.BigEndian.AppendUint16(nil, p.Last+1)
		}
		elements = append(elements, e)
	}
	return elements
}

func interfaceElements(names []string) []element {
	names = slices.Compact(slices.Sorted(slices.Values(names)))
	var elements []element
	for _, name := range names {
		key := make([]byte, 16) // IFNAMSIZ
		copy(key, name)
		elements = append(elements, element{text: strconv.Quote(name), first: key})
	}
	return elements
}

// setElements are the elements as nftables wants them.
func (s set) setElements() []nftables.SetElement {
	var keys []nftables.SetElement
	for _, e := range s.elements {
		keys = append(keys, nftables.SetElement{Key: e.first})
		if s.interval && e.end != nil {
			keys = append(keys, nftables.SetElement{Key: e.end, IntervalEnd: true})
		}
	}
	return keys
}
