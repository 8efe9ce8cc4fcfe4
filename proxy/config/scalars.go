package config

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/goccy/go-yaml/ast"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config/check"
	"github.com/penstock-net/penstock/proxy/policy"
)

// object is a piece of JSON Schema.
type object = map[string]any

// scalar describes a type with values of one text, number or word.
type scalar struct {
	schema object                    // JSON Schema of the values
	parse  func(string) (any, error) // reads the text of a value
	ofBool reflect.Value             // function that makes a value of true and false; zero: these are no values
}

// orBool returns s with true and false as further values, which the function value converts.
func (s scalar) orBool(value any) scalar {
	s.ofBool = reflect.ValueOf(value)
	return s
}

// Patterns of numbers before a unit, and of ports.
const (
	number     = `\+?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?`
	portNumber = `([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])`
)

// scalars are the types that have values of one text, number or word.
var scalars = map[reflect.Type]scalar{
	reflect.TypeFor[cc.Rate](): newTextScalar(parseRate, object{
		"type": "string", "pattern": `^\s*` + number + `\s*([gGmMkK]?[bB][iI][tT])\s*$`,
		"examples": []string{"20mbit", "1.5gbit"},
	}),
	reflect.TypeFor[cc.Bytes](): newTextScalar(cc.ParseBytes, object{
		"type": "string", "pattern": `^\s*` + number + `\s*([gGmMkK][iI]?)?[bB]\s*$`,
		"examples": []string{"256KiB", "1GiB"},
	}),
	reflect.TypeFor[time.Duration](): newTextScalar(parseDuration, object{
		"type": "string", "pattern": `^\+?(([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+$`,
		"examples": []string{"10s", "1h30m"},
	}),
	reflect.TypeFor[netip.Prefix](): newTextScalar(parsePrefix, object{
		"type": "string", "pattern": `^[0-9a-fA-F:.]+(/[0-9]{1,3})?$`,
		"examples": []string{"10.0.0.0/8", "2001:db8::/32", "192.0.2.1"},
	}),
	reflect.TypeFor[netip.Addr](): newTextScalar(parseAddr, object{
		"type": "string", "pattern": `^[0-9a-fA-F:.]+$`, "examples": []string{"192.0.2.1", "2001:db8::1"},
	}),
	reflect.TypeFor[policy.PortRange](): newTextScalar(policy.ParsePorts, object{"anyOf": []any{
		object{"type": "integer", "minimum": 1, "maximum": 65535},
		object{"type": "string", "pattern": `^\s*` + portNumber + `\s*(-\s*` + portNumber + `\s*)?$`},
	}}),
	reflect.TypeFor[policy.NamePattern](): newTextScalar(policy.ParseNamePattern, object{
		"type": "string", "pattern": `^(\*\.)?([A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?$`,
		"examples": []string{"example.com", "*.example.com"},
	}),
	reflect.TypeFor[Mark](): newTextScalar(parseMark, object{
		"type": []string{"integer", "string"}, "minimum": 0, "maximum": uint32(math.MaxUint32),
		"pattern": `^(0[xX][0-9a-fA-F]{1,8}|0|[1-9][0-9]{0,8})$`,
	}),
	reflect.TypeFor[access.Key](): newTextScalar(access.ParseKey, object{
		"type": "string", "pattern": `^[A-Za-z0-9+/]{42}[AEIMQUYcgkosw048]=$`,
	}),
	reflect.TypeFor[policy.Algorithm](): newTextScalar(policy.ParseAlgorithm, object{
		"type": "string", "pattern": algorithmPattern(),
		"examples": []string{cc.Default, cc.Default + ":target_ms=20", "none"},
	}),
	reflect.TypeFor[policy.Param](): newTextScalar(func(s string) (policy.Param, error) { return policy.Param(s), nil }, object{
		"type": []string{"number", "string"},
	}),
	reflect.TypeFor[check.Fraction](): newTextScalar(check.ParseFraction, object{"type": "number", "minimum": 0, "maximum": 1}),
	reflect.TypeFor[policy.Sample](): newTextScalar(policy.ParseSample, object{
		"type": "string", "pattern": `^\s*` + number + `\s*%\s*$`, "examples": []string{"5%", "0.5%"},
	}),
	reflect.TypeFor[policy.Refuse](): newTextScalar(policy.ParseRefuse, object{
		"type": []string{"boolean", "string"}, "minLength": 1,
		"not": object{"type": "string", "pattern": `^([Tt][Rr][Uu][Ee]|[Ff][Aa][Ll][Ss][Ee]|[Yy]([Ee][Ss])?|` +
			`[Nn][Oo]?|[Oo][Nn]|[Oo][Ff][Ff])$`},
	}).orBool(policy.RefuseByRule),
	reflect.TypeFor[access.Mode]():     oneOf(access.Modes...),
	reflect.TypeFor[policy.Protocol](): oneOf(policy.TCP, policy.UDP, policy.ICMP),
	reflect.TypeFor[policy.Class](): oneOf(policy.Class(flow.Bulk.String()), policy.Class(flow.DelaySensitive.String()),
		policy.Class(flow.Guarantee.String())),
	reflect.TypeFor[access.Datapath]():  oneOf(access.DatapathAuto, access.DatapathKernel, access.DatapathNetstack),
	reflect.TypeFor[policy.Undecided](): oneOf[policy.Undecided]("next", "refuse"),
	reflect.TypeFor[policy.SendProxy](): oneOf[policy.SendProxy]("off", "v1", "v2"),
	reflect.TypeFor[policy.DSCP]():      oneOf[policy.DSCP]("off", policy.KeepDSCP),
	reflect.TypeFor[Envelope]():         oneOf[Envelope]("auto", "ebpf", "bbr", "cubic", "reno"),
	reflect.TypeFor[LogLevel]():         oneOf[LogLevel]("debug", "info", "warn", "error"),
	reflect.TypeFor[LogFormat]():        oneOf[LogFormat]("auto", "text", "json"),
}

// algorithmPattern returns a pattern of algorithms' names with any settings.
func algorithmPattern() string {
	var names []string
	for _, s := range cc.Specs() {
		names = append(names, regexp.QuoteMeta(s.Name))
	}
	return `^((` + strings.Join(names, "|") + `)(:.*)?|` + ccp.Family + `:.+)$`
}

// newTextScalar returns a scalar with texts that parse reads.
func newTextScalar[T any](parse func(string) (T, error), schema object) scalar {
	return scalar{schema: schema, parse: func(s string) (any, error) { return parse(s) }}
}

// oneOf returns a scalar with some words as values.
func oneOf[T ~string](values ...T) scalar {
	words := check.Strings(values)
	return scalar{schema: object{"enum": words}, parse: func(s string) (any, error) {
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

// acceptsScalar reports whether a scalar is of one of the kinds that JSON Schema knows.
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

// kindNames names kinds for people.
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

// readScalar reads a node into one of the scalars. An error has the place of the node.
func readScalar(node ast.Node, to reflect.Value) error {
	s, err := scalarText(node)
	if err != nil {
		return err
	}
	t := to.Type()
	if b, isBool := node.(*ast.BoolNode); isBool && scalars[t].ofBool.IsValid() {
		to.Set(scalars[t].ofBool.Call([]reflect.Value{reflect.ValueOf(b.Value)})[0])
		return nil
	}
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

// Choices returns the words that the value of *v may have, such as those of an Envelope; nil: it is not one of some.
func Choices(v any) []string {
	words, _ := scalars[reflect.TypeOf(v).Elem()].schema["enum"].([]string)
	return words
}

// parseRate reads a rate in bits per second with its unit. Zero is refused, because it would stop a connection.
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

// parseDuration reads a time as Go writes it, not negative. A bare 0 is refused: its unit would be a guess.
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

// parseAddr reads the address of one host, without a zone.
func parseAddr(s string) (netip.Addr, error) {
	v, err := netip.ParseAddr(s)
	if err != nil || v.Zone() != "" || v.IsUnspecified() {
		return v, fmt.Errorf("%q is no host's address, such as 192.0.2.1 or 2001:db8::1", s)
	}
	return v.Unmap(), nil
}

// parseMark reads 32 bits, decimal or 0x…; 0: no mark.
func parseMark(s string) (Mark, error) {
	v, err := strconv.ParseUint(s, 0, 32)
	if err != nil {
		return 0, fmt.Errorf("%q is no firewall mark; write a number such as 0x2000000", s)
	}
	return Mark(v), nil
}

// jsonTypes returns the kinds of JSON values that a schema allows.
func jsonTypes(schema object) (all []string) {
	switch t := schema["type"].(type) {
	case string:
		all = []string{t}
	case []string:
		all = t
	}
	if schema["enum"] != nil {
		all = append(all, "string")
	}
	if either, ok := schema["anyOf"].([]any); ok {
		for _, s := range either {
			all = append(all, jsonTypes(s.(object))...)
		}
	}
	return all
}

// patterns returns the patterns that texts of types must match. Types without a pattern are absent.
var patterns = sync.OnceValue(func() map[reflect.Type]*regexp.Regexp {
	all := map[reflect.Type]*regexp.Regexp{}
	for t, scalar := range scalars {
		s := scalar.schema
		if either, ok := s["anyOf"].([]any); ok {
			s = either[len(either)-1].(object)
		}
		if p, ok := s["pattern"].(string); ok {
			all[t] = regexp.MustCompile(p)
		}
	}
	return all
})
