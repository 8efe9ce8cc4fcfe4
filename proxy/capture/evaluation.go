package capture

import (
	"bytes"
	"encoding/binary"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// fate is the set of possible fates of a packet in a chain. Unknown parts of the packet, or of a
// rule, leave several possible.
type fate uint8

const (
	// mayPass means that the chain accepts it, or hands it to a program.
	mayPass fate = 1 << iota
	// mayDrop means that the chain drops or rejects it.
	mayDrop
	// mayReturn is to the chain that jumped here, or to the policy.
	mayReturn
)

// verdict is the end of a rule. The zero value drops, as in the kernel.
type verdict struct {
	kind expr.VerdictKind
	// chain is the target of a jump or goto.
	chain string
}

// continues goes on to the next rule.
var continues = verdict{kind: expr.VerdictContinue}

// verdictOf returns the verdict of an expression.
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
	return continues
}

// elementVerdict returns the verdict of an element in a verdict map. The library does not decode
// it: there is an attribute with the code, and one with the chain's name.
func elementVerdict(e nftables.SetElement) verdict {
	const header, code = 4, 4
	if len(e.Val) < header+code {
		return continues
	}
	v := verdict{kind: expr.VerdictKind(int32(binary.BigEndian.Uint32(e.Val[header:])))}
	if name := e.Val[header+code:]; len(name) > header {
		before, _, _ := bytes.Cut(name[header:], []byte{0})
		v.chain = string(before)
	}
	return v
}

// evaluation runs one packet through one base chain.
type evaluation struct {
	*firewall
	packet packet
	// read are the fields of the packet that its rules depend on.
	read fields
	// visited are results by chain and mark, so that no chain is evaluated twice.
	visited map[visit]outcome
	// depth is the number of jumps that lead here.
	depth int
	err   error
}

// visit is a chain, and the packet's mark as it comes there.
type visit struct {
	chain       *nftables.Chain
	mark, known uint32
}

// outcome is the fate in a chain, and the packet's mark behind it.
type outcome struct {
	fate        fate
	mark, known uint32
}

// cachedFate is the fate in a base chain of all packets that equal packet in the fields read.
type cachedFate struct {
	packet packet
	read   fields
	fate   fate
}

// maxJumps bounds the depth of jumps. nftables has the same bound.
const maxJumps = 16

// fateOf returns the fate of a packet in a base chain.
func (w *firewall) fateOf(p packet, base *nftables.Chain) (fate, error) {
	for _, c := range w.fates[base] {
		if p.withOnly(c.read) == c.packet {
			return c.fate, nil
		}
	}
	e := evaluation{firewall: w, packet: p, visited: map[visit]outcome{}}
	f := e.evaluateChain(base)
	switch {
	case f&mayReturn != 0 && dropsByPolicy(base):
		f |= mayDrop
	case f&mayReturn != 0:
		f |= mayPass
	}
	f &^= mayReturn
	if e.err == nil {
		w.fates[base] = append(w.fates[base], cachedFate{p.withOnly(e.read), e.read, f})
	}
	return f, e.err
}

// evaluateChain returns the fate of the packet in a chain.
func (e *evaluation) evaluateChain(c *nftables.Chain) (f fate) {
	if e.depth == maxJumps || e.err != nil {
		return mayPass | mayDrop | mayReturn
	}
	e.depth++
	defer func() { e.depth-- }()
	rules, err := e.rulesOf(c)
	if err != nil {
		e.err = err
		return mayPass | mayDrop | mayReturn
	}
	begun := e.packet
	for _, rule := range rules {
		before := e.packet
		matches, ends := e.evaluateRule(c.Table, rule.Exprs)
		if matches == no {
			e.packet = before
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
				f |= e.evaluateJump(c.Table, end.chain)
			case expr.VerdictJump:
				there := e.evaluateJump(c.Table, end.chain)
				f |= there &^ mayReturn
				decided = decided && there&mayReturn == 0
			default:
				decided = false
			}
		}
		if decided {
			return f
		}
		if matches == maybe && e.packet != before {
			e.packet.known = 0
		}
	}
	if f&mayReturn != 0 && e.packet != begun { // it may have returned with the other mark
		e.packet.known = 0
	}
	return f | mayReturn
}

// evaluateJump returns the fate of the packet in the chain of a jump.
func (e *evaluation) evaluateJump(table *nftables.Table, name string) fate {
	c := e.findChain(table, name)
	if c == nil {
		return mayPass | mayDrop | mayReturn
	}
	at := visit{c, e.packet.mark, e.packet.known}
	o, met := e.visited[at]
	if !met {
		o.fate = e.evaluateChain(c)
		o.mark, o.known = e.packet.mark, e.packet.known
		e.visited[at] = o
	}
	e.packet.mark, e.packet.known = o.mark, o.known
	return o.fate
}

// evaluateRule returns whether the packet matches a rule, and the verdicts that the rule may have.
// It knows the expressions that firewalls use; all others may match or not.
func (e *evaluation) evaluateRule(table *nftables.Table, exprs []expr.Any) (matches truth, ends []verdict) {
	matches = yes
	var r registers
	write := func(register uint32, v value, read fields) {
		r.write(register, v)
		e.read |= read
	}
	for _, x := range exprs {
		is := yes
		switch x := x.(type) {
		case *expr.Meta:
			if x.SourceRegister {
				e.setMark(x.Key, r.read(x.Register, 4))
				continue
			}
			v, read := e.packet.metaValue(x.Key)
			write(x.Register, v, read)
		case *expr.Payload:
			if x.OperationType == expr.PayloadLoad {
				v, read := e.packet.payloadValue(x.Base, x.Offset, x.Len)
				write(x.DestRegister, v, read)
			}
		case *expr.Ct:
			if !x.SourceRegister {
				r.write(x.Register, e.packet.ctValue(x.Key))
			}
		case *expr.Fib:
			r.write(x.Register, e.packet.fibValue(x))
		case *expr.Immediate:
			r.write(x.Register, knownValue(x.Data))
		case *expr.Bitwise:
			r.write(x.DestRegister, r.read(x.SourceRegister, int(x.Len)).bitwise(x))
		case *expr.Byteorder:
			r.write(x.DestRegister, r.read(x.SourceRegister, int(x.Len)).swapBytes(x.Size))
		case *expr.Exthdr:
			r.forgetBytes(x.DestRegister, registerSize)
		case *expr.Hash:
			r.forgetBytes(x.DestRegister, registerSize)
		case *expr.Numgen:
			r.forgetBytes(x.Register, registerSize)
		case *expr.Cmp:
			is = r.read(x.Register, len(x.Data)).compare(x.Op, x.Data)
			if x.Op != expr.CmpOpGte { // the other bound of a range comes next
				r.forgetBytes(x.Register, len(x.Data))
			}
		case *expr.Range:
			v := r.read(x.Register, len(x.FromData))
			is = v.compare(expr.CmpOpGte, x.FromData).and(v.compare(expr.CmpOpLte, x.ToData)).notIf(x.Op == expr.CmpOpNeq)
			r.forgetBytes(x.Register, len(x.FromData))
		case *expr.Lookup:
			s, err := e.readFilterSet(table, x.SetName)
			if err != nil {
				e.err = err
				return maybe, nil
			}
			var mapped []verdict
			is, mapped = r.lookUp(x, s)
			ends = append(ends, mapped...)
		case *expr.Match:
			is = e.packet.matchesIptables(x)
			e.read |= portFields
		case *expr.Target:
			if x.Name == "MARK" || x.Name == "CONNMARK" {
				e.setMark(expr.MetaKeyMARK, value{})
			}
			ends = append(ends, verdictsOf(x)...)
		case *expr.Verdict, *expr.Reject, *expr.Queue, *expr.SynProxy:
			ends = append(ends, verdictsOf(x)...)
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

// lookUp evaluates a look-up of a register in a set, or in a verdict map, which has the verdicts that it may give.
func (r *registers) lookUp(x *expr.Lookup, s filterSet) (is truth, ends []verdict) {
	n := registerSize
	if len(s.elements) > 0 {
		n = len(s.elements[0].Key)
	}
	key := r.read(x.SourceRegister, n)
	if x.IsDestRegSet && x.DestRegister == unix.NFT_REG_VERDICT {
		is, ends = key.mapTo(s)
	} else {
		_, is = s.findElement(key)
		is = is.notIf(x.Invert)
	}
	r.forgetBytes(x.SourceRegister, n)
	if x.IsDestRegSet {
		r.forgetBytes(x.DestRegister, registerSize)
	}
	return is, ends
}

// verdictsOf returns the verdict of an expression; none: it has none.
func verdictsOf(x expr.Any) []verdict {
	if v := verdictOf(x); v != continues {
		return []verdict{v}
	}
	return nil
}

// setMark changes the packet's mark.
func (e *evaluation) setMark(key expr.MetaKey, v value) {
	if key != expr.MetaKeyMARK {
		return
	}
	e.packet.mark, e.packet.known = 0, 0
	if len(v.data) == 4 {
		e.packet.mark, e.packet.known = binary.NativeEndian.Uint32(v.data), binary.NativeEndian.Uint32(v.known)
	}
}
