package proxy

import (
	"reflect"
	"slices"
	"strings"

	"github.com/penstock-net/penstock/cc"
)

// schemaID is the dialect the schema is written in.
const schemaID = "https://json-schema.org/draft/2020-12/schema"

// object is a piece of JSON Schema.
type object = map[string]any

// scalars are the schemas of the types that read themselves.
var scalars = map[reflect.Type]object{
	reflect.TypeFor[Rate]():       {"type": "string", "pattern": `^\s*[0-9.eE+]+\s*([gGmMkK]?[bB][iI][tT])\s*$`, "examples": []string{"20mbit", "1.5gbit"}},
	reflect.TypeFor[Size]():       {"type": "string", "pattern": `^\s*[0-9.eE+]+\s*([gGmMkK][iI]?)?[bB]\s*$`, "examples": []string{"256KiB", "1GiB"}},
	reflect.TypeFor[Duration]():   {"type": "string", "pattern": `^\+?([0-9.]+(ns|us|µs|μs|ms|s|m|h))+$`, "examples": []string{"10s", "1h30m"}},
	reflect.TypeFor[Prefix]():     {"type": "string", "examples": []string{"10.0.0.0/8", "2001:db8::/32", "192.0.2.1"}},
	reflect.TypeFor[Ports]():      {"anyOf": []any{object{"type": "integer", "minimum": 1, "maximum": 65535}, object{"type": "string", "pattern": `^\s*[0-9]+\s*(-\s*[0-9]+\s*)?$`}}},
	reflect.TypeFor[ServerName](): {"type": "string", "pattern": `^(\*\.)?([A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?$`, "examples": []string{"example.com", "*.example.com"}},
	reflect.TypeFor[Mark]():       {"type": []string{"integer", "string"}},
	reflect.TypeFor[Key]():        {"type": "string", "pattern": `^[A-Za-z0-9+/]{43}=$`},
	reflect.TypeFor[Mode]():       {"enum": modeValues()},
	reflect.TypeFor[Algorithm]():  {"type": "string", "examples": []string{cc.Default, "copa:delta=0.1", "none"}},
	reflect.TypeFor[Param]():      {"type": []string{"number", "string"}},
	reflect.TypeFor[Class]():      {"enum": classValues},
	reflect.TypeFor[Fraction]():   {"type": "number", "minimum": 0, "maximum": 1},
	reflect.TypeFor[Refuse]():     {"type": []string{"boolean", "string"}},
	reflect.TypeFor[SendProxy]():  {"enum": sendProxyValues},
	reflect.TypeFor[Envelope]():   {"enum": envelopeValues},
	reflect.TypeFor[LogLevel]():   {"enum": levelValues},
	reflect.TypeFor[LogFormat]():  {"enum": formatValues},
}

// required are the keys without which an object means nothing.
var required = map[reflect.Type][]string{
	reflect.TypeFor[Config]():         {"listeners"},
	reflect.TypeFor[ListenerConfig](): {"mode", "name"},
	reflect.TypeFor[RuleConfig]():     {"name"},
	reflect.TypeFor[SourceConfig]():   {"interface"},
	reflect.TypeFor[UserConfig]():     {"name"},
	reflect.TypeFor[TokenConfig]():    {"name", "token"},
	reflect.TypeFor[PeerConfig]():     {"allowed_ips", "name", "public_key"},
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
		copied := object{}
		for k, v := range s {
			copied[k] = v
		}
		return copied
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
		addProperties(properties, t)
		s := object{"type": "object", "properties": properties, "additionalProperties": false}
		if r := slices.Clone(required[t]); len(r) > 0 {
			s["required"] = r
		}
		return s
	case reflect.String:
		return object{"type": "string"}
	case reflect.Bool:
		return object{"type": "boolean"}
	case reflect.Int:
		return object{"type": "integer"}
	default:
		panic("proxy: no schema for " + t.String())
	}
}

func addProperties(properties object, t reflect.Type) {
	for f := range t.Fields() {
		name, opts, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if opts == "inline" {
			addProperties(properties, f.Type)
			continue
		}
		s := schemaOf(f.Type)
		if about := f.Tag.Get("about"); about != "" {
			s["description"] = about
		}
		properties[name] = s
	}
}
