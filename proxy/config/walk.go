package config

import (
	"fmt"
	"iter"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
)

var (
	configType      = reflect.TypeFor[Config]()
	unmarshalerType = reflect.TypeFor[yaml.NodeUnmarshaler]()
)

// walk checks the shape of node against t before any value is read, so that a
// mistake is told in the words of the file and not of Go, the first one first.
// It notes where each value stands.
func (p places) walk(key string, node ast.Node, t reflect.Type) error {
	p[key] = node.GetToken()
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch node.Type() {
	case ast.AliasType:
		return at(node, "a value that begins with * is written in quotes; aliases are not supported")
	case ast.AnchorType, ast.MergeKeyType, ast.TagType:
		return at(node, "anchors, aliases and tags are not supported; write the value out")
	case ast.NullType:
		return at(node, "no value; leave the key out for its default")
	}
	if reflect.PointerTo(t).Implements(unmarshalerType) {
		return nil
	}
	switch t.Kind() {
	case reflect.Struct, reflect.Map:
		return p.walkMapping(key, node, t)
	case reflect.Slice:
		seq, ok := node.(*ast.SequenceNode)
		if !ok {
			return at(node, "expected a list, not %s", describe(node, t))
		}
		for i, item := range seq.Values {
			if err := p.walk(fmt.Sprintf("%s[%d]", key, i), item, t.Elem()); err != nil {
				return err
			}
		}
	case reflect.Bool:
		if node.Type() != ast.BoolType {
			return at(node, "expected true or false, not %s", describe(node, t))
		}
	case reflect.Int:
		if node.Type() != ast.IntegerType {
			return at(node, "expected a whole number, not %s", describe(node, t))
		}
	case reflect.String:
		if _, err := text(node); err != nil {
			return at(node, "expected a text, not %s", describe(node, t))
		}
		if !isText(node) { // what it is may be a secret
			return at(node, "expected a text; write it in quotes")
		}
	default:
		panic("config: configuration field of a kind nobody reads: " + t.String())
	}
	return nil
}

func (p places) walkMapping(key string, node ast.Node, t reflect.Type) error {
	m, ok := node.(ast.MapNode)
	if !ok {
		return at(node, "expected keys with values, not %s", describe(node, t))
	}
	var fields map[string]reflect.StructField
	if t.Kind() == reflect.Struct {
		fields = fieldsOf(t)
	}
	for it := m.MapRange(); it.Next(); {
		if it.Key().IsMergeKey() {
			return at(it.Key(), "anchors, aliases and tags are not supported; write the value out")
		}
		name, err := text(it.Key())
		if err != nil {
			return err
		}
		full := strings.TrimPrefix(key+"."+cut(name), ".")
		f := fields[name]
		ft := f.Type
		if fields == nil {
			ft = t.Elem()
		}
		if ft == nil {
			shown := full
			if i := strings.IndexAny(name, " \t="); i >= 0 { // a value may follow, after an equal sign or a space
				shown = strings.TrimPrefix(key+"."+cut(name[:i])+cutMark, ".")
			}
			return &Error{
				Line: it.Key().GetToken().Position.Line, Column: it.Key().GetToken().Position.Column,
				Key: shown, Message: "unknown key; " + suggest(name, fields),
			}
		}
		if err := p.walk(full, it.Value(), ft); err != nil {
			return err
		}
		if n, err := strconv.Atoi(it.Value().GetToken().Value); err == nil && it.Value().Type() == ast.IntegerType {
			if wrong := outside(f, n); wrong != "" {
				return at(it.Value(), "%s", wrong)
			}
		}
	}
	return nil
}

// maxShown is how much of a value or an unknown key a message shows, in bytes.
const maxShown = 64

func cut(s string) string {
	if len(s) > maxShown {
		return s[:maxShown] + "…"
	}
	return s
}

// fieldsOf returns the keys a struct reads, those of inlined structs among them.
func fieldsOf(t reflect.Type) map[string]reflect.StructField {
	fields := map[string]reflect.StructField{}
	for f := range t.Fields() {
		name, opts, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if opts == "inline" {
			maps.Copy(fields, fieldsOf(f.Type))
			continue
		}
		fields[name] = f
	}
	return fields
}

// fieldIn is a field of a configuration, with its value there.
type fieldIn struct {
	reflect.StructField
	value reflect.Value
}

// fieldsIn are the fields of v and of all that it holds, with their keys; key is v's.
func fieldsIn(key string, v reflect.Value) iter.Seq2[string, fieldIn] {
	return func(yield func(string, fieldIn) bool) { eachField(key, v, yield) }
}

func eachField(key string, v reflect.Value, yield func(string, fieldIn) bool) bool {
	switch v.Kind() {
	case reflect.Slice:
		for i := range v.Len() {
			if !eachField(fmt.Sprintf("%s[%d]", key, i), v.Index(i), yield) {
				return false
			}
		}
	case reflect.Struct:
		for i := range v.NumField() {
			f := v.Type().Field(i)
			name, opts, _ := strings.Cut(f.Tag.Get("yaml"), ",")
			at := strings.TrimPrefix(key+"."+name, ".")
			if opts == "inline" {
				at = key
			}
			if !yield(at, fieldIn{f, v.Field(i)}) || !eachField(at, v.Field(i), yield) {
				return false
			}
		}
	}
	return true
}

// suggest helps after a key that does not exist.
func suggest(name string, fields map[string]reflect.StructField) string {
	names := slices.Sorted(maps.Keys(fields))
	best, distance := "", 3
	for _, n := range names {
		if d := edits(name, n); d < distance || d == distance && strings.HasPrefix(n, name) {
			best, distance = n, d
		}
	}
	if best != "" {
		return fmt.Sprintf("did you mean %s?", best)
	}
	return "there are " + strings.Join(names, ", ")
}

// edits is the Levenshtein distance; long strings are simply far apart.
func edits(a, b string) int {
	if len(a) > 64 || len(b) > 64 {
		return 64
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// describe names for people what node is in the place of a t. It shows no value
// that may be a secret.
func describe(node ast.Node, t reflect.Type) string {
	switch node.Type() {
	case ast.MappingType, ast.MappingValueType:
		return "keys with values"
	case ast.SequenceType:
		return "a list"
	case ast.NullType:
		return "nothing"
	}
	tk := node.GetToken()
	switch {
	case tk == nil, len(tk.Value) > maxShown, t == configType, hasSecrets(t, false):
		return "one value"
	case hasSecrets(t, true) && strings.ContainsAny(tk.Value, " =:"): // keys and values that are no YAML
		return "one value"
	}
	return fmt.Sprintf("%q", tk.Value)
}
