package config

import (
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
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/policy"
)

// The types of the configuration's scalars. Each reads itself, so that the
// message stands where the value does, and describes itself to the schema.
type (
	// Rate is in bits per second; the unit is required.
	Rate cc.Rate
	// Size is in bytes; the unit is required.
	Size cc.Bytes
	// Duration is a time with its unit.
	Duration time.Duration
	// Prefix is a prefix, or an address for the one host.
	Prefix netip.Prefix
	// Address is one host's.
	Address netip.Addr
	// Ports is one port or a range.
	Ports policy.PortRange
	// ServerName is a host name, or *. and a name for all below it.
	ServerName policy.NamePattern
	// Mark is a firewall mark, decimal or 0x….
	Mark uint32
	// Mode is an access.Mode.
	Mode access.Mode
	// Algorithm is a reference as cc.Parse reads it; empty: not set.
	Algorithm string
	// Param is the value of an algorithm's setting: a number or the name of a choice.
	Param string
	// Protocol names a transport; empty: any.
	Protocol string
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
	// Envelope names the kernel's congestion control.
	Envelope string
	// LogLevel is a slog level's name in lower case.
	LogLevel string
	// LogFormat is text, json or auto.
	LogFormat string
)

var (
	classValues     = []string{flow.Bulk.String(), flow.DelaySensitive.String(), flow.Guarantee.String()}
	protocolValues  = []string{string(policy.TCP), string(policy.UDP), string(policy.ICMP)}
	datapathValues  = []string{string(DatapathAuto), string(DatapathKernel), string(DatapathNetstack)}
	undecidedValues = []string{"next", "refuse"}
	sendProxyValues = []string{"off", "v1", "v2"}
	envelopeValues  = []string{"auto", "ebpf", "bbr", "cubic", "reno"}
	levelValues     = []string{"debug", "info", "warn", "error"}
	formatValues    = []string{"auto", "text", "json"}
)

func modeValues() []string {
	var names []string
	for _, m := range access.Modes {
		names = append(names, string(m))
	}
	return names
}

// at is an error at a node's position.
func at(node ast.Node, format string, args ...any) error {
	return &yaml.SyntaxError{Message: fmt.Sprintf(format, args...), Token: node.GetToken()}
}

// text returns a scalar as it was written.
func text(node ast.Node) (string, error) {
	switch n := node.(type) {
	case *ast.StringNode:
		return n.Value, nil
	case *ast.LiteralNode:
		return strings.TrimSpace(n.Value.Value), nil
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		return node.GetToken().Value, nil
	}
	return "", at(node, "expected one value, not %s", describe(node, configType))
}

// isText tells whether a scalar is a text to YAML, as it is in quotes.
func isText(node ast.Node) bool {
	return node.Type() == ast.StringType || node.Type() == ast.LiteralType
}

// takes tells whether a scalar is of one of the kinds that JSON Schema knows.
func takes(kinds []string, node ast.Node) bool {
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

// read parses a scalar and puts the parser's words where the value stands.
func read[T any](node ast.Node, dst *T, parse func(string) (T, error)) error {
	s, err := text(node)
	if err != nil {
		return err
	}
	v, err := parse(s)
	if err != nil {
		return at(node, "%v", err)
	}
	t := reflect.TypeFor[T]()
	if kinds := types(scalars[t]); !takes(kinds, node) {
		return at(node, "expected %s; a text is written in quotes, a number without", kindNames(kinds))
	}
	if p := patterns()[t]; p != nil && isText(node) && !p.MatchString(s) {
		return at(node, "%q is not how this is written", s)
	}
	*dst = v
	return nil
}

// oneOf accepts the listed words.
func oneOf[T ~string](values []string) func(string) (T, error) {
	return func(s string) (T, error) {
		if !slices.Contains(values, s) {
			return "", fmt.Errorf("%q is not one of %s", s, strings.Join(values, ", "))
		}
		return T(s), nil
	}
}

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (r *Rate) UnmarshalYAML(node ast.Node) error {
	return read(node, r, func(s string) (Rate, error) {
		v, err := cc.ParseRate(s)
		if unit := strings.TrimLeft(s, "0123456789. "); err != nil && unit != "" &&
			!strings.Contains(strings.ToLower(unit), "bit") {
			err = fmt.Errorf("%w; %q is none", err, unit)
		}
		if err == nil && v == 0 {
			err = fmt.Errorf("%q would let nothing pass; leave the key out for no bound", s)
		}
		return Rate(v), err
	})
}

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (b *Size) UnmarshalYAML(node ast.Node) error {
	return read(node, b, func(s string) (Size, error) {
		v, err := cc.ParseBytes(s)
		return Size(v), err
	})
}

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (d *Duration) UnmarshalYAML(node ast.Node) error {
	return read(node, d, func(s string) (Duration, error) {
		v, err := time.ParseDuration(s)
		if err != nil || v < 0 {
			return 0, fmt.Errorf("%q is not a time with a unit, such as 10s, 5m or 1h30m", s)
		}
		if s == "0" {
			return 0, fmt.Errorf("%q needs a unit, such as 0s", s)
		}
		return Duration(v), nil
	})
}

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (p *Prefix) UnmarshalYAML(node ast.Node) error {
	return read(node, p, func(s string) (Prefix, error) {
		if addr, err := netip.ParseAddr(s); err == nil && addr.Zone() == "" {
			addr = addr.Unmap()
			return Prefix(netip.PrefixFrom(addr, addr.BitLen())), nil
		}
		v, err := netip.ParsePrefix(s)
		if err != nil || v.Addr().Is4In6() {
			return Prefix{}, fmt.Errorf("%q is neither an address nor a prefix such as 10.0.0.0/8 or 2001:db8::/32", s)
		}
		if v != v.Masked() {
			return Prefix{}, fmt.Errorf("%q has bits behind its length; write %v, or the address alone for one host", s,
				v.Masked())
		}
		return Prefix(v), nil
	})
}

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (a *Address) UnmarshalYAML(node ast.Node) error {
	return read(node, a, func(s string) (Address, error) {
		v, err := netip.ParseAddr(s)
		if err != nil || v.Zone() != "" || v.IsUnspecified() {
			return Address{}, fmt.Errorf("%q is no host's address, such as 192.0.2.1 or 2001:db8::1", s)
		}
		return Address(v.Unmap()), nil
	})
}

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (p *Ports) UnmarshalYAML(node ast.Node) error {
	return read(node, p, func(s string) (Ports, error) {
		v, err := policy.ParsePorts(s)
		return Ports(v), err
	})
}

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (n *ServerName) UnmarshalYAML(node ast.Node) error {
	return read(node, n, func(s string) (ServerName, error) {
		v, err := policy.ParseNamePattern(s)
		return ServerName(v), err
	})
}

// String writes the name as the file has it.
func (n ServerName) String() string { return policy.NamePattern(n).String() }

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (m *Mark) UnmarshalYAML(node ast.Node) error {
	return read(node, m, func(s string) (Mark, error) {
		v, err := strconv.ParseUint(s, 0, 32)
		if err != nil {
			return 0, fmt.Errorf("%q is no firewall mark; write a number such as 0x2000000", s)
		}
		return Mark(v), nil
	})
}

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (m *Mode) UnmarshalYAML(node ast.Node) error { return read(node, m, oneOf[Mode](modeValues())) }

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (a *Algorithm) UnmarshalYAML(node ast.Node) error {
	return read(node, a, parseAlgorithm)
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

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (p *Param) UnmarshalYAML(node ast.Node) error {
	return read(node, p, func(s string) (Param, error) { return Param(s), nil })
}

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (p *Protocol) UnmarshalYAML(node ast.Node) error {
	return read(node, p, oneOf[Protocol](protocolValues))
}

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (d *Datapath) UnmarshalYAML(node ast.Node) error {
	return read(node, d, oneOf[Datapath](datapathValues))
}

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (u *Undecided) UnmarshalYAML(node ast.Node) error {
	return read(node, u, oneOf[Undecided](undecidedValues))
}

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (c *Class) UnmarshalYAML(node ast.Node) error { return read(node, c, oneOf[Class](classValues)) }

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (f *Fraction) UnmarshalYAML(node ast.Node) error {
	return read(node, f, func(s string) (Fraction, error) {
		v, err := strconv.ParseFloat(s, 64)
		if err != nil || !(v >= 0 && v <= 1) { // NaN is neither
			return 0, fmt.Errorf("%q is no part of a whole; write a number above 0, up to 1, such as 0.95, or 0 "+
				"for none", s)
		}
		return Fraction(v), nil
	})
}

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (r *Refuse) UnmarshalYAML(node ast.Node) error {
	if b, ok := node.(*ast.BoolNode); ok {
		*r = ""
		if b.Value {
			*r = "refused by rule"
		}
		return nil
	}
	return read(node, r, func(s string) (Refuse, error) {
		if s == "" {
			return "", fmt.Errorf("expected true, false or the reason in words")
		}
		return Refuse(s), nil
	})
}

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (p *SendProxy) UnmarshalYAML(node ast.Node) error {
	return read(node, p, oneOf[SendProxy](sendProxyValues))
}

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (e *Envelope) UnmarshalYAML(node ast.Node) error {
	return read(node, e, oneOf[Envelope](envelopeValues))
}

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (l *LogLevel) UnmarshalYAML(node ast.Node) error {
	return read(node, l, oneOf[LogLevel](levelValues))
}

// UnmarshalYAML implements yaml.NodeUnmarshaler.
func (f *LogFormat) UnmarshalYAML(node ast.Node) error {
	return read(node, f, oneOf[LogFormat](formatValues))
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

// version is 0 for no header.
func (p SendProxy) version() int {
	switch p {
	case "v1":
		return 1
	case "v2":
		return 2
	}
	return 0
}
