package config

import (
	"fmt"
	"maps"
	"math"
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/policy"
)

// schemaID is the dialect the schema is written in.
const schemaID = "https://json-schema.org/draft/2020-12/schema"

// object is a piece of JSON Schema.
type object = map[string]any

// How numbers before a unit, and ports, are written.
const (
	number     = `\+?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?`
	portNumber = `([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])`
)

// scalars are the types whose values are one text, number or word each.
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
	reflect.TypeFor[Algorithm](): newTextScalar(parseAlgorithm, object{
		"type": "string", "pattern": algorithmPattern(),
		"examples": []string{cc.Default, cc.Default + ":target_ms=20", "none"},
	}),
	reflect.TypeFor[Param](): newTextScalar(func(s string) (Param, error) { return Param(s), nil }, object{
		"type": []string{"number", "string"},
	}),
	reflect.TypeFor[Fraction](): newTextScalar(parseFraction, object{"type": "number", "minimum": 0, "maximum": 1}),
	reflect.TypeFor[Refuse](): newTextScalar(parseRefuse, object{
		"type": []string{"boolean", "string"}, "minLength": 1,
		"not": object{"type": "string", "pattern": `^([Tt][Rr][Uu][Ee]|[Ff][Aa][Ll][Ss][Ee]|[Yy]([Ee][Ss])?|` +
			`[Nn][Oo]?|[Oo][Nn]|[Oo][Ff][Ff])$`},
	}),
	reflect.TypeFor[access.Mode]():     oneOf(access.Modes...),
	reflect.TypeFor[policy.Protocol](): oneOf(policy.TCP, policy.UDP, policy.ICMP),
	reflect.TypeFor[Class](): oneOf(Class(flow.Bulk.String()), Class(flow.DelaySensitive.String()),
		Class(flow.Guarantee.String())),
	reflect.TypeFor[Datapath]():  oneOf(DatapathAuto, DatapathKernel, DatapathNetstack),
	reflect.TypeFor[Undecided](): oneOf[Undecided]("next", "refuse"),
	reflect.TypeFor[SendProxy](): oneOf[SendProxy]("off", "v1", "v2"),
	reflect.TypeFor[DSCP]():      oneOf[DSCP]("off", KeepDSCP),
	reflect.TypeFor[Envelope]():  oneOf[Envelope]("auto", "ebpf", "bbr", "cubic", "reno"),
	reflect.TypeFor[LogLevel]():  oneOf[LogLevel]("debug", "info", "warn", "error"),
	reflect.TypeFor[LogFormat](): oneOf[LogFormat]("auto", "text", "json"),
}

// algorithmPattern knows the names of algorithms, and none of their settings.
func algorithmPattern() string {
	var names []string
	for _, s := range cc.Specs() {
		names = append(names, regexp.QuoteMeta(s.Name))
	}
	return `^((` + strings.Join(names, "|") + `)(:.*)?|` + ccp.Family + `:.+)$`
}

// Schema returns the JSON Schema (draft 2020-12) of the configuration file,
// made from the types that read it.
func Schema() map[string]any {
	s := schemaOf(reflect.TypeFor[Config]())
	s["$schema"] = schemaID
	s["title"] = "Penstock configuration"
	return s
}

func schemaOf(t reflect.Type) object {
	if s, ok := scalars[t]; ok {
		return maps.Clone(s.schema)
	}
	switch t.Kind() {
	case reflect.Pointer:
		return schemaOf(t.Elem())
	case reflect.Slice:
		return object{"type": "array", "items": schemaOf(t.Elem())}
	case reflect.Map:
		return object{"type": "object", "additionalProperties": schemaOf(t.Elem())}
	case reflect.Struct:
		properties := object{}
		s := object{"type": "object", "properties": properties, "additionalProperties": false}
		var required []string
		for name, f := range fieldsOf(t) {
			properties[name] = fieldSchema(f, aboutKey(t, name))
			if f.Tag.Get("required") != "" {
				required = append(required, name)
			}
		}
		if slices.Sort(required); required != nil {
			s["required"] = required
		}
		return s
	case reflect.String:
		return object{"type": "string"}
	case reflect.Bool:
		return object{"type": "boolean"}
	case reflect.Int:
		return object{"type": "integer"}
	default:
		panic("config: no schema for " + t.String())
	}
}

// fieldSchema is the schema of a field, with what it is for and what its tags say: min and
// max bound a number, and reload is whether a running proxy takes another value.
func fieldSchema(f reflect.StructField, purpose string) object {
	s := schemaOf(f.Type)
	s["description"] = purpose
	switch f.Tag.Get("reload") {
	case "yes":
		s["description"] = purpose + " A reload changes it."
	case "sockets":
		s["description"] = purpose + " A reload changes it, but not of a tunnel that runs."
	}
	least, most := numberBounds(f)
	if least != nil {
		s["minimum"] = *least
	}
	if most != nil {
		s["maximum"] = *most
	}
	return s
}

// numberBounds are those of a number; nil: none.
func numberBounds(f reflect.StructField) (least, most *int) {
	read := func(tag string) *int {
		if v, err := strconv.Atoi(f.Tag.Get(tag)); err == nil {
			return &v
		}
		return nil
	}
	return read("min"), read("max")
}

// outsideBounds says what is wrong with a number in the field; empty: nothing.
func outsideBounds(f reflect.StructField, v int) string {
	least, most := numberBounds(f)
	switch {
	case least != nil && v < *least && most == nil:
		return fmt.Sprintf("%d is less than %d", v, *least)
	case least != nil && v < *least, most != nil && v > *most:
		return fmt.Sprintf("%d is outside %d to %d", v, *least, *most)
	}
	return ""
}

// jsonTypes are the kinds of JSON values that a schema takes.
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

// patterns are how texts of a type may be written; nil: in any way.
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
