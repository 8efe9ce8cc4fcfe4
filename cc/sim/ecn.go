package sim

import "github.com/penstock-net/penstock/cc"

// Codepoint is the ECN field of an IP header, by its value there (RFC 3168 §5).
type Codepoint uint8

// The codepoints.
const (
	NotECT Codepoint = iota
	ECT1             // its sender answers marks in proportion (RFC 9331 §4)
	ECT0
	CE
)

// ECN is what a flow's packets say of ECN. Its receiver reports each mark (RFC 9768).
type ECN uint8

// What they may say.
const (
	ECNDefault ECN = iota // ECNL4S where the algorithm is made for it, ECNClassic otherwise
	ECNClassic            // ECT(0)
	ECNL4S                // ECT(1): L4S
	ECNOff                // Not-ECT
)

// ecnNames are as files and a command line have them.
var ecnNames = []string{ECNDefault: "default", ECNClassic: "classic", ECNL4S: "l4s", ECNOff: "off"}

func (e ECN) String() string { return nameOf(ecnNames, e, "ECN") }

// ParseECN reads what packets say.
func ParseECN(s string) (ECN, error) {
	return valueOf[ECN](ecnNames, s, "no ECN %q; use classic, l4s or off")
}

// codepoint is what the packets of a flow of that algorithm say.
func (e ECN) codepoint(algorithm string) Codepoint {
	switch e {
	case ECNOff:
		return NotECT
	case ECNL4S:
		return ECT1
	case ECNClassic:
		return ECT0
	}
	if spec, err := cc.Lookup(algorithm); err == nil && spec.L4S {
		return ECT1
	}
	return ECT0
}
