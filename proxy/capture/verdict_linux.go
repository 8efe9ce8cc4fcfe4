package capture

import (
	"bytes"
	"encoding/binary"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// fate is the set of what may become of a packet in a chain, as far as the chain can be evaluated. What is not
// known of the packet, or not understood of a rule, leaves both possible.
type fate uint8

const (
	mayPass fate = 1 << iota
	mayDrop
	mayReturn // to the chain that jumped here, or to the policy
)

// verdict is the end of a rule. The zero value drops, as the kernel has it.
type verdict struct {
	kind  expr.VerdictKind
	chain string // of a jump or goto
}

var goesOn = verdict{kind: expr.VerdictContinue}

// verdictOf returns what an expression decides.
func verdictOf(e expr.Any) verdict {
	switch e := e.(type) {
	case *expr.Verdict:
		return verdict{e.Kind, e.Chain}
	case *expr.Reject:
		return verdict{kind: expr.VerdictDrop}
	case *expr.Queue, *expr.SynProxy:
		return verdict{kind: expr.VerdictQueue}
	case *expr.Target: // of iptables over nftables
		switch e.Name {
		case "DROP", "REJECT":
			return verdict{kind: expr.VerdictDrop}
		case "ACCEPT":
			return verdict{kind: expr.VerdictAccept}
		case "RETURN":
			return verdict{kind: expr.VerdictReturn}
		case "NFQUEUE", "QUEUE", "SYNPROXY":
			return verdict{kind: expr.VerdictQueue}
		}
	}
	return goesOn
}

// mapped returns what an element of a verdict map decides. The library leaves it as it came: an attribute whose
// value is the code, and one whose value is the chain's name.
func mapped(e nftables.SetElement) verdict {
	const header, code = 4, 4
	if len(e.Val) < header+code {
		return goesOn
	}
	v := verdict{kind: expr.VerdictKind(int32(binary.BigEndian.Uint32(e.Val[header:])))}
	if name := e.Val[header+code:]; len(name) > header {
		before, _, _ := bytes.Cut(name[header:], []byte{0})
		v.chain = string(before)
	}
	return v
}

// evaluation is the course of one packet through one base chain.
type evaluation struct {
	*firewall
	packet packet
	met    map[string]fate // what non-base chains do with the packet, as it is by now
	deep   int
	err    error
}

// deepest is how far jumps go, which nftables itself bounds by 16.
const deepest = 16

// fateOf returns what may become of a packet in a base chain.
func (w *firewall) fateOf(p packet, base *nftables.Chain) (fate, error) {
	e := evaluation{firewall: w, packet: p, met: map[string]fate{}}
	f := e.walk(base)
	switch {
	case f&mayReturn != 0 && dropsByPolicy(base):
		f |= mayDrop
	case f&mayReturn != 0:
		f |= mayPass
	}
	return f &^ mayReturn, e.err
}

// walk returns what may become of the packet in a chain.
func (e *evaluation) walk(c *nftables.Chain) (f fate) {
	if e.deep == deepest || e.err != nil {
		return mayPass | mayDrop | mayReturn
	}
	e.deep++
	defer func() { e.deep-- }()
	rules, err := e.rulesOf(c)
	if err != nil {
		e.err = err
		return mayPass | mayDrop | mayReturn
	}
	for _, rule := range rules {
		matches, ends := e.evaluate(c.Table, rule.Exprs)
		if matches == no {
			continue
		}
		decided := matches == yes && len(ends) > 0
		for _, end := range ends {
			switch end.kind {
			case expr.VerdictAccept, expr.VerdictQueue, expr.VerdictStop, expr.VerdictStolen, expr.VerdictRepeat:
				f |= mayPass
			case expr.VerdictDrop:
				f |= mayDrop
			case expr.VerdictReturn:
				f |= mayReturn
			case expr.VerdictGoto:
				f |= e.enter(c.Table, end.chain)
			case expr.VerdictJump:
				there := e.enter(c.Table, end.chain)
				f |= there &^ mayReturn
				decided = decided && there&mayReturn == 0
			default:
				decided = false
			}
		}
		if decided {
			return f
		}
	}
	return f | mayReturn
}

// enter returns what may become of the packet in a chain that a rule sends it to.
func (e *evaluation) enter(table *nftables.Table, name string) fate {
	if f, met := e.met[name]; met {
		return f
	}
	c := e.chain(table, name)
	if c == nil {
		return mayPass | mayDrop | mayReturn
	}
	f := e.walk(c)
	e.met[name] = f
	return f
}

// evaluate returns whether the packet matches a rule, and the verdicts that the rule may have for it.
func (e *evaluation) evaluate(table *nftables.Table, exprs []expr.Any) (matches answer, ends []verdict) {
	matches = yes
	registers := map[uint32]value{}
	for _, x := range exprs {
		is := yes
		switch x := x.(type) {
		case *expr.Meta:
			if x.SourceRegister {
				e.forget(x.Key)
				continue
			}
			registers[x.Register] = e.packet.meta(x.Key)
		case *expr.Payload:
			if x.OperationType == expr.PayloadLoad {
				registers[x.DestRegister] = e.packet.payload(x.Base, x.Offset, x.Len)
			}
		case *expr.Ct:
			if !x.SourceRegister {
				registers[x.Register] = e.packet.ct(x.Key)
			}
		case *expr.Fib:
			registers[x.Register] = e.packet.fib(x)
		case *expr.Immediate:
			registers[x.Register] = value{exactly(x.Data)}
		case *expr.Bitwise:
			registers[x.DestRegister] = registers[x.SourceRegister].bitwise(x)
		case *expr.Exthdr:
			delete(registers, x.DestRegister)
		case *expr.Hash:
			delete(registers, x.DestRegister)
		case *expr.Numgen:
			delete(registers, x.Register)
		case *expr.Cmp:
			is = registers[x.Register].compare(x.Op, x.Data)
			if x.Op != expr.CmpOpGte { // whose other bound comes next
				delete(registers, x.Register)
			}
		case *expr.Range:
			is = registers[x.Register].compare(expr.CmpOpGte, x.FromData).
				and(registers[x.Register].compare(expr.CmpOpLte, x.ToData))
			if x.Op == expr.CmpOpNeq {
				is = is.inverted()
			}
			delete(registers, x.Register)
		case *expr.Lookup:
			key := registers[x.SourceRegister]
			delete(registers, x.SourceRegister)
			decides := x.IsDestRegSet && x.DestRegister == unix.NFT_REG_VERDICT
			if !decides && x.IsDestRegSet {
				delete(registers, x.DestRegister)
			}
			if !decides && !slices.ContainsFunc(key, bits.whole) {
				is = maybe // whatever is in it, which may be a lot
				break
			}
			s, err := e.set(table, x.SetName)
			if err != nil {
				e.err = err
				return maybe, nil
			}
			if decides {
				is, ends = key.mapTo(s)
				break
			}
			if is = key.isIn(s); x.Invert {
				is = is.inverted()
			}
		case *expr.Match:
			is = e.packet.matches(x)
		case *expr.Target:
			if x.Name == "MARK" || x.Name == "CONNMARK" {
				e.forget(expr.MetaKeyMARK)
			}
			ends = append(ends, decision(x)...)
		case *expr.Verdict, *expr.Reject, *expr.Queue, *expr.SynProxy:
			ends = append(ends, decision(x)...)
		case *expr.Counter, *expr.Log, *expr.Notrack, *expr.FlowOffload, *expr.CtHelper, *expr.CtTimeout, *expr.SecMark:
		default: // limits, quotas, sets that are added to, and what there will be
			is = maybe
		}
		if matches = matches.and(is); matches == no {
			return no, nil
		}
	}
	return matches, ends
}

func decision(x expr.Any) []verdict {
	if v := verdictOf(x); v != goesOn {
		return []verdict{v}
	}
	return nil
}

// forget has a mark that a rule sets be unknown from there on.
func (e *evaluation) forget(key expr.MetaKey) {
	if key == expr.MetaKeyMARK {
		e.packet.mark = nil
		clear(e.met)
	}
}
