package ccp

import (
	"fmt"
	"strconv"
	"strings"
)

// node is an expression of a program's text.
type node struct {
	op   string // of an operation or a command; empty: an atom
	args []node
	atom string // name, or empty for a number
	num  uint32
	kind typ // of an atom that is no name
}

// decl is a variable with its first value.
type decl struct {
	name     string
	volatile bool
	first    node
}

// clause is a flag and what to do where it holds.
type clause struct {
	flag node
	body []node
}

// parser reads a program's text.
type parser struct {
	text  string
	at    int
	depth int // of the expression that is being read
}

// maxDepth bounds how deep expressions are nested; more have no registers.
const maxDepth = 32

func (p *parser) fail(format string, args ...any) error {
	line := 1 + strings.Count(p.text[:p.at], "\n")
	return fmt.Errorf("%w: line %d: %s", ErrProgram, line, fmt.Sprintf(format, args...))
}

func (p *parser) blanks() {
	for p.at < len(p.text) && strings.IndexByte(" \t\r\n", p.text[p.at]) >= 0 {
		p.at++
	}
}

// comment skips blanks and comments.
func (p *parser) comment() {
	for p.blanks(); p.at < len(p.text) && p.text[p.at] == '#'; p.blanks() {
		end := strings.IndexByte(p.text[p.at:], '\n')
		if end < 0 {
			end = len(p.text) - p.at - 1
		}
		p.at += end + 1
	}
}

// take skips s, if it is next.
func (p *parser) take(s string) bool {
	p.blanks()
	if !strings.HasPrefix(p.text[p.at:], s) {
		return false
	}
	p.at += len(s)
	return true
}

func (p *parser) want(s string) error {
	if !p.take(s) {
		return p.fail("expected %q before %q", s, p.near())
	}
	return nil
}

// near is what comes next, for errors.
func (p *parser) near() string { return p.text[p.at:min(len(p.text), p.at+12)] }

func nameByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '_'
}

// word takes what names are made of.
func (p *parser) word() string {
	p.blanks()
	from := p.at
	for p.at < len(p.text) && nameByte(p.text[p.at]) {
		p.at++
	}
	return p.text[from:p.at]
}

// program reads the whole text.
func (p *parser) program() (report, plain []decl, events []clause, err error) {
	p.comment()
	if err := p.want("(def"); err != nil {
		return nil, nil, nil, err
	}
	for !p.take(")") {
		if p.report() {
			for !p.take(")") {
				d, err := p.decl()
				if err != nil {
					return nil, nil, nil, err
				}
				d.name = "Report." + d.name
				report = append(report, d)
			}
			continue
		}
		d, err := p.decl()
		if err != nil {
			return nil, nil, nil, err
		}
		if strings.HasPrefix(d.name, "Report.") {
			report = append(report, d)
		} else {
			plain = append(plain, d)
		}
	}
	for p.comment(); p.at < len(p.text); p.comment() {
		e, err := p.event()
		if err != nil {
			return nil, nil, nil, err
		}
		events = append(events, e)
	}
	if len(events) == 0 {
		return nil, nil, nil, p.fail("there is no (when …)")
	}
	return report, plain, events, nil
}

// report takes the beginning of a list of the report's fields; (Report.name …) is none.
func (p *parser) report() bool {
	p.blanks()
	rest, is := strings.CutPrefix(p.text[p.at:], "(Report")
	if !is || rest != "" && nameByte(rest[0]) {
		return false
	}
	return p.take("(Report")
}

func (p *parser) decl() (d decl, err error) {
	if err := p.want("("); err != nil {
		return d, err
	}
	d.volatile = p.take("volatile")
	if d.name = p.word(); d.name == "" || strings.HasPrefix(d.name, "__") {
		return d, p.fail("%q is no name", d.name)
	}
	if d.first, err = p.atom(); err != nil {
		return d, err
	}
	return d, p.want(")")
}

func (p *parser) event() (c clause, err error) {
	if err := p.want("(when"); err != nil {
		return c, err
	}
	if c.flag, err = p.expr(); err != nil {
		return c, err
	}
	for p.comment(); !p.take(")"); p.comment() {
		n, err := p.expr()
		if err != nil {
			return c, err
		}
		c.body = append(c.body, n)
	}
	if len(c.body) == 0 {
		return c, p.fail("a (when …) has nothing to do")
	}
	return c, nil
}

// operators are those of the text, by the operation that they become.
var operators = map[string]Op{
	"+": OpAdd, "add": OpAdd, "||": OpAdd, "or": OpAdd, "*": OpMul, "mul": OpMul, "&&": OpMul, "and": OpMul,
	":=": OpBind, "bind": OpBind, "if": OpIf, "!if": OpNotIf, "/": OpDiv, "div": OpDiv, "==": OpEquiv, "eq": OpEquiv,
	"ewma": OpEwma, ">": OpGt, "gt": OpGt, "<": OpLt, "lt": OpLt, "wrapped_max": OpMaxWrap, "max": OpMax, "min": OpMin,
	"-": OpSub, "sub": OpSub,
}

func (p *parser) expr() (n node, err error) {
	p.comment()
	if !p.take("(") {
		return p.atom()
	}
	p.blanks()
	from := p.at
	for p.at < len(p.text) && strings.IndexByte(" \t\r\n()", p.text[p.at]) < 0 {
		p.at++
	}
	n.op = p.text[from:p.at]
	if n.op == "fallthrough" || n.op == "report" {
		return n, p.want(")")
	}
	if _, known := operators[n.op]; !known {
		return n, p.fail("there is no operation %q", n.op)
	}
	if p.depth++; p.depth > maxDepth {
		return n, p.fail("an expression is nested more than %d deep", maxDepth)
	}
	defer func() { p.depth-- }()
	for range 2 {
		arg, err := p.expr()
		if err != nil {
			return n, err
		}
		n.args = append(n.args, arg)
	}
	p.comment()
	return n, p.want(")")
}

func (p *parser) atom() (node, error) {
	switch {
	case p.take("true"):
		return node{num: 1, kind: boolType}, nil
	case p.take("false"):
		return node{kind: boolType}, nil
	case p.take("+infinity"):
		return node{num: 1<<32 - 1, kind: numType}, nil
	}
	from := p.at
	w := p.word()
	switch {
	case w == "":
		return node{}, p.fail("expected a name or a number before %q", p.near())
	case w[0] >= '0' && w[0] <= '9':
		digits := w[:len(w)-len(strings.TrimLeft(w, "0123456789"))]
		p.at = from + len(digits)
		v, err := strconv.ParseUint(digits, 10, 31)
		if err != nil {
			return node{}, p.fail("%s is no number below 2147483648", digits)
		}
		return node{num: uint32(v), kind: numType}, nil
	case strings.HasPrefix(w, "__"):
		return node{}, p.fail("%q is no name", w)
	}
	return node{atom: w}, nil
}
