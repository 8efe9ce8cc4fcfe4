package config

import (
	"embed"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/agent"
	"github.com/penstock-net/penstock/proxy/fleet"
	"github.com/penstock-net/penstock/proxy/linkstat"
	"github.com/penstock-net/penstock/proxy/policy"
)

// schemaID is the dialect the schema is written in.
const schemaID = "https://json-schema.org/draft/2020-12/schema"

// Schema returns the JSON Schema (draft 2020-12) of the configuration file,
// made from the types that read it.
func Schema() map[string]any {
	s := schemaOf(reflect.TypeFor[Config]())
	s["$schema"] = schemaID
	s["title"] = "Penstock configuration"
	return s
}

// schemaOf returns the schema of a type of the configuration. A type that it does not know panics, in every test.
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
			properties[name] = fieldSchema(f, keyComment(t, name))
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

// fieldSchema returns the schema of a field with its purpose and the meaning of its tags: min and max
// bound a number, and reload says whether a running proxy accepts another value.
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

//go:embed config.go process.go
var sources embed.FS

// yamlTag finds the key in the tag of a field.
var yamlTag = regexp.MustCompile("`yaml:\"([a-z_]+)")

// keyComments returns the comments above fields in their sources, by package, type and key.
var keyComments = sync.OnceValue(func() map[string]string {
	texts := map[string]string{}
	for t, files := range map[reflect.Type]embed.FS{
		configType:                         sources,
		reflect.TypeFor[access.Listener](): access.Sources, reflect.TypeFor[policy.Match](): policy.Sources,
		reflect.TypeFor[agent.Settings](): agent.Sources, reflect.TypeFor[linkstat.Settings](): linkstat.Sources,
		reflect.TypeFor[fleet.Settings](): fleet.Sources,
	} {
		entries, _ := files.ReadDir(".")
		for _, entry := range entries {
			source, _ := files.ReadFile(entry.Name())
			name, comment := "", []string(nil)
			for line := range strings.Lines(string(source)) {
				line = strings.TrimSpace(line)
				text, isComment := strings.CutPrefix(line, "// ")
				key := yamlTag.FindStringSubmatch(line)
				switch words := strings.Fields(line); {
				case isComment:
					comment = append(comment, text)
					continue
				case len(words) > 1 && words[0] == "type":
					name = words[1]
				case key != nil && comment != nil:
					texts[t.PkgPath()+"."+name+"."+key[1]] = strings.Join(comment, " ")
				}
				comment = nil
			}
		}
	}
	return texts
})

// keyComment returns the comment above a key of a struct, or of one that is inlined there; empty:
// there is none.
func keyComment(t reflect.Type, key string) string {
	if text := keyComments()[t.PkgPath()+"."+t.Name()+"."+key]; text != "" {
		return text
	}
	for f := range t.Fields() {
		if _, opts, _ := strings.Cut(f.Tag.Get("yaml"), ","); opts == "inline" {
			if text := keyComment(f.Type, key); text != "" {
				return text
			}
		}
	}
	return ""
}
