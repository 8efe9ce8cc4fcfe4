package config

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"

	"github.com/penstock-net/penstock/cc"
)

// The types of the configuration's scalars that are not Go's own or another package's.
type (
	// Mark is a firewall mark, decimal or 0x….
	Mark uint32
	// Algorithm is a reference as cc.Parse reads it; empty: not set.
	Algorithm string
	// Param is the value of an algorithm's setting: a number or the name of a choice.
	Param string
	// Datapath says who ends the tunnels of mode wireguard; empty: netstack.
	Datapath string
	// Undecided says what becomes of a connection without a server name; empty: next.
	Undecided string
	// Class names what a flow is for; empty: not set.
	Class string
	// Fraction is a part of a whole, above 0 up to 1, or 0 for none.
	Fraction float64
	// Refuse is why a rule refuses; empty: it does not.
	Refuse string
	// SendProxy is the version of the PROXY protocol header sent; empty: not set.
	SendProxy string
	// DSCP says what becomes of the mark of a connection's packets; empty: not set.
	DSCP string
	// Envelope names the kernel's congestion control.
	Envelope string
	// LogLevel is a slog level's name in lower case.
	LogLevel string
	// LogFormat is text, json or auto.
	LogFormat string
)

// scalar is how values of a type are written: by JSON Schema, and as parse reads their text.
type scalar struct {
	schema object
	parse  func(string) (any, error)
}

// newTextScalar is a scalar whose texts another function parses.
func newTextScalar[T any](parse func(string) (T, error), schema object) scalar {
	return scalar{schema, func(s string) (any, error) { return parse(s) }}
}

// oneOf is a scalar that is one of some words.
func oneOf[T ~string](values ...T) scalar {
	words := stringsOf(values)
	return scalar{object{"enum": words}, func(s string) (any, error) {
		if !slices.Contains(words, s) {
			hint := ""
			if nearest := cc.Nearest(s, words); nearest != "" {
				hint = "; did you mean " + nearest + "?"
			}
			return nil, fmt.Errorf("%q is not one of %s%s", s, strings.Join(words, ", "), hint)
		}
		return T(s), nil
	}}
}

// stringsOf are words without their type.
func stringsOf[T ~string](values []T) []string {
	all := make([]string, len(values))
	for i, v := range values {
		all[i] = string(v)
	}
	return all
}

// errorAt is an error at a node's position.
func errorAt(node ast.Node, format string, args ...any) error {
	return &yaml.SyntaxError{Message: fmt.Sprintf(format, args...), Token: node.GetToken()}
}

// scalarText returns a scalar as it was written.
func scalarText(node ast.Node) (string, error) {
	switch n := node.(type) {
	case *ast.StringNode:
		return n.Value, nil
	case *ast.LiteralNode:
		return strings.TrimSpace(n.Value.Value), nil
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		return node.GetToken().Value, nil
	}
	return "", errorAt(node, "expected one value, not %s", describeNode(node, configType))
}

// isText tells whether a scalar is a text to YAML, as it is in quotes.
func isText(node ast.Node) bool {
	return node.Type() == ast.StringType || node.Type() == ast.LiteralType
}

// acceptsScalar tells whether a scalar is of one of the kinds that JSON Schema knows.
func acceptsScalar(kinds []string, node ast.Node) bool {
	kind := "string"
	switch node.Type() {
	case ast.IntegerType:
		kind = "integer"
	case ast.FloatType, ast.InfinityType, ast.NanType:
		kind = "number"
	case ast.BoolType:
		kind = "boolean"
	}
	return slices.Contains(kinds, kind) || kind == "integer" && slices.Contains(kinds, "number")
}

// kindNames says in words what kinds are taken.
func kindNames(kinds []string) string {
	words := map[string]string{
		"string": "a text", "integer": "a whole number", "number": "a number", "boolean": "true or false",
	}
	var all []string
	for _, k := range kinds {
		all = append(all, words[k])
	}
	return strings.Join(all, " or ")
}

// readScalar reads a node into one of the scalars, and puts the parser's words where the value stands.
func readScalar(node ast.Node, to reflect.Value) error {
	s, err := scalarText(node)
	if err != nil {
		return err
	}
	t := to.Type()
	v, err := scalars[t].parse(s)
	if err != nil {
		return errorAt(node, "%v", err)
	}
	if kinds := jsonTypes(scalars[t].schema); !acceptsScalar(kinds, node) {
		return errorAt(node, "expected %s; a text is written in quotes, a number without", kindNames(kinds))
	}
	if p := patterns()[t]; p != nil && isText(node) && !p.MatchString(s) {
		return errorAt(node, "%q is not how this is written", s)
	}
	to.Set(reflect.ValueOf(v))
	return nil
}

// Set reads a text into the scalar that v points to, as a file that has it in quotes is read.
func Set(v any, s string) error {
	if err := readScalar(&ast.StringNode{Value: s}, reflect.ValueOf(v).Elem()); err != nil {
		return errors.New(fromYAMLError(err).Message)
	}
	return nil
}

func parseRate(s string) (cc.Rate, error) {
	v, err := cc.ParseRate(s)
	if unit := strings.TrimLeft(s, "0123456789. "); err != nil && unit != "" &&
		!strings.Contains(strings.ToLower(unit), "bit") {
		err = fmt.Errorf("%w; %q is none", err, unit)
	}
	if err == nil && v == 0 {
		err = fmt.Errorf("%q would let nothing pass; leave the key out for no bound", s)
	}
	return v, err
}

func parseDuration(s string) (time.Duration, error) {
	v, err := time.ParseDuration(s)
	if err != nil || v < 0 {
		return 0, fmt.Errorf("%q is not a time with a unit, such as 10s, 5m or 1h30m", s)
	}
	if s == "0" {
		return 0, fmt.Errorf("%q needs a unit, such as 0s", s)
	}
	return v, nil
}

// parsePrefix reads a prefix, or an address for the one host.
func parsePrefix(s string) (netip.Prefix, error) {
	if addr, err := netip.ParseAddr(s); err == nil && addr.Zone() == "" {
		addr = addr.Unmap()
		return netip.PrefixFrom(addr, addr.BitLen()), nil
	}
	v, err := netip.ParsePrefix(s)
	if err != nil || v.Addr().Is4In6() {
		return v, fmt.Errorf("%q is neither an address nor a prefix such as 10.0.0.0/8 or 2001:db8::/32", s)
	}
	if v != v.Masked() {
		return v, fmt.Errorf("%q has bits behind its length; write %v, or the address alone for one host", s,
			v.Masked())
	}
	return v, nil
}

func parseAddr(s string) (netip.Addr, error) {
	v, err := netip.ParseAddr(s)
	if err != nil || v.Zone() != "" || v.IsUnspecified() {
		return v, fmt.Errorf("%q is no host's address, such as 192.0.2.1 or 2001:db8::1", s)
	}
	return v.Unmap(), nil
}

func parseMark(s string) (Mark, error) {
	v, err := strconv.ParseUint(s, 0, 32)
	if err != nil {
		return 0, fmt.Errorf("%q is no firewall mark; write a number such as 0x2000000", s)
	}
	return Mark(v), nil
}

func parseAlgorithm(s string) (Algorithm, error) {
	name, params, err := cc.Parse(s)
	if err != nil {
		return "", err
	}
	spec, err := cc.Lookup(name)
	if err != nil {
		return "", err
	}
	_, err = spec.Resolve(params)
	return Algorithm(s), err
}

func parseFraction(s string) (Fraction, error) {
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || !(v >= 0 && v <= 1) { // NaN is neither
		return 0, fmt.Errorf("%q is no part of a whole; write a number above 0, up to 1, such as 0.95, or 0 "+
			"for none", s)
	}
	return Fraction(v), nil
}

func parseRefuse(s string) (Refuse, error) {
	switch strings.ToLower(s) {
	case "", "true", "false", "yes", "no", "on", "off", "y", "n": // the opposite of what some of them say
		return "", errors.New("expected true, false or the reason in words")
	}
	return Refuse(s), nil
}

// UnmarshalYAML implements yaml.NodeUnmarshaler: true and false are no texts.
func (r *Refuse) UnmarshalYAML(node ast.Node) error {
	if b, ok := node.(*ast.BoolNode); ok {
		*r = ""
		if b.Value {
			*r = "refused by rule"
		}
		return nil
	}
	return readScalar(node, reflect.ValueOf(r).Elem())
}

// Level is the level for slog.
func (l LogLevel) Level() slog.Level {
	var v slog.Level
	_ = v.UnmarshalText([]byte(l)) // info, slog's zero, where it is not set
	return v
}

// Kernel is the name for the kernel; empty: let the datapath choose.
func (e Envelope) Kernel() string {
	if e == "auto" {
		return ""
	}
	return string(e)
}

// KeepDSCP has packets carry the mark that the other side's had.
const KeepDSCP DSCP = "keep"

// headerVersion is 0 for no header.
func (p SendProxy) headerVersion() int {
	switch p {
	case "v1":
		return 1
	case "v2":
		return 2
	}
	return 0
}
