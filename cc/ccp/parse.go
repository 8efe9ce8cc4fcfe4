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
	kind typ // of a constant
}

// decl is a variable with its first value.
type decl struct {
	name     string
	volatile bool
	first    node
}

// clause is a flag with the expressions that run if it is true.
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

// maxDepth bounds the nesting of expressions. Deeper ones would have too few registers anyway.
const maxDepth = 32

// failf returns an error with the current line.
func (p *parser) failf(format string, args ...any) error {
	line := 1 + strings.Count(p.text[:p.at], "\n")
	return fmt.Errorf("%w: line %d: %s", ErrProgram, line, fmt.Sprintf(format, args...))
}

// skipBlanks skips spaces, tabs and ends of lines.
func (p *parser) skipBlanks() {
	for p.at < len(p.text) && strings.IndexByte(" \t\r\n", p.text[p.at]) >= 0 {
		p.at++
	}
}

// skipComments skips blanks and comments.
func (p *parser) skipComments() {
	for p.skipBlanks(); p.at < len(p.text) && p.text[p.at] == '#'; p.skipBlanks() {
		end := strings.IndexByte(p.text[p.at:], '\n')
		if end < 0 {
			end = len(p.text) - p.at - 1
		}
		p.at += end + 1
	}
}

// skipText skips s if it is next, and reports whether it was.
func (p *parser) skipText(s string) bool {
	p.skipBlanks()
	if !strings.HasPrefix(p.text[p.at:], s) {
		return false
	}
	p.at += len(s)
	return true
}

// wantText skips s, and fails where something else is next.
func (p *parser) wantText(s string) error {
	if !p.skipText(s) {
		return p.failf("expected %q before %q", s, p.nextText())
	}
	return nil
}

// nextText returns the beginning of the text that comes next, for errors.
func (p *parser) nextText() string { return p.text[p.at:min(len(p.text), p.at+12)] }

// isNameByte reports whether names of variables may have the byte.
func isNameByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '_'
}

// parseWord reads the bytes of a name or a number.
func (p *parser) parseWord() string {
	p.skipBlanks()
	from := p.at
	for p.at < len(p.text) && isNameByte(p.text[p.at]) {
		p.at++
	}
	return p.text[from:p.at]
}

// parseProgram reads the whole text.
func (p *parser) parseProgram() (report, plain []decl, events []clause, err error) {
	p.skipComments()
	if err := p.wantText("(def"); err != nil {
		return nil, nil, nil, err
	}
	for !p.skipText(")") {
		if p.skipReportHead() {
			for !p.skipText(")") {
				d, err := p.parseDecl()
				if err != nil {
					return nil, nil, nil, err
				}
				d.name = "Report." + d.name
				report = append(report, d)
			}
			continue
		}
		d, err := p.parseDecl()
		if err != nil {
			return nil, nil, nil, err
		}
		if strings.HasPrefix(d.name, "Report.") {
			report = append(report, d)
		} else {
			plain = append(plain, d)
		}
	}
	for p.skipComments(); p.at < len(p.text); p.skipComments() {
		e, err := p.parseEvent()
		if err != nil {
			return nil, nil, nil, err
		}
		events = append(events, e)
	}
	if len(events) == 0 {
		return nil, nil, nil, p.failf("there is no (when …)")
	}
	return report, plain, events, nil
}

// skipReportHead skips the beginning of a list of the report's fields, and reports whether it was next. (Report.name
// …) is none.
func (p *parser) skipReportHead() bool {
	p.skipBlanks()
	rest, is := strings.CutPrefix(p.text[p.at:], "(Report")
	if !is || rest != "" && isNameByte(rest[0]) {
		return false
	}
	return p.skipText("(Report")
}

// parseDecl reads a declaration: (name value) or (volatile name value). Names that begin with __ are the compiler's
// own.
func (p *parser) parseDecl() (d decl, err error) {
	if err := p.wantText("("); err != nil {
		return d, err
	}
	d.volatile = p.skipText("volatile")
	if d.name = p.parseWord(); d.name == "" || strings.HasPrefix(d.name, "__") {
		return d, p.failf("%q is no name", d.name)
	}
	if d.first, err = p.parseAtom(); err != nil {
		return d, err
	}
	return d, p.wantText(")")
}

// parseEvent reads (when flag expression …), with one expression at least.
func (p *parser) parseEvent() (c clause, err error) {
	if err := p.wantText("(when"); err != nil {
		return c, err
	}
	if c.flag, err = p.parseExpr(); err != nil {
		return c, err
	}
	for p.skipComments(); !p.skipText(")"); p.skipComments() {
		n, err := p.parseExpr()
		if err != nil {
			return c, err
		}
		c.body = append(c.body, n)
	}
	if len(c.body) == 0 {
		return c, p.failf("a (when …) has nothing to do")
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

// parseExpr reads an atom, (operation left right), or one of the words without operands. It bounds the depth, because
// it calls itself and the text comes from another process.
func (p *parser) parseExpr() (n node, err error) {
	p.skipComments()
	if !p.skipText("(") {
		return p.parseAtom()
	}
	p.skipBlanks()
	from := p.at
	for p.at < len(p.text) && strings.IndexByte(" \t\r\n()", p.text[p.at]) < 0 {
		p.at++
	}
	n.op = p.text[from:p.at]
	if n.op == "fallthrough" || n.op == "report" {
		return n, p.wantText(")")
	}
	if _, known := operators[n.op]; !known {
		return n, p.failf("there is no operation %q", n.op)
	}
	if p.depth++; p.depth > maxDepth {
		return n, p.failf("an expression is nested more than %d deep", maxDepth)
	}
	defer func() { p.depth-- }()
	for range 2 {
		arg, err := p.parseExpr()
		if err != nil {
			return n, err
		}
		n.args = append(n.args, arg)
	}
	p.skipComments()
	return n, p.wantText(")")
}

// parseAtom reads a constant, a number or the name of a variable.
func (p *parser) parseAtom() (node, error) {
	switch {
	case p.skipText("true"):
		return node{num: 1, kind: boolType}, nil
	case p.skipText("false"):
		return node{kind: boolType}, nil
	case p.skipText("+infinity"):
		return node{num: 1<<32 - 1, kind: numType}, nil
	}
	from := p.at
	w := p.parseWord()
	switch {
	case w == "":
		return node{}, p.failf("expected a name or a number before %q", p.nextText())
	case w[0] >= '0' && w[0] <= '9':
		digits := w[:len(w)-len(strings.TrimLeft(w, "0123456789"))]
		p.at = from + len(digits)
		v, err := strconv.ParseUint(digits, 10, 31)
		if err != nil {
			return node{}, p.failf("%s is no number below 2147483648", digits)
		}
		return node{num: uint32(v), kind: numType}, nil
	case strings.HasPrefix(w, "__"):
		return node{}, p.failf("%q is no name", w)
	}
	return node{atom: w}, nil
}
