package config

import (
	"fmt"
	"iter"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/token"

	"github.com/penstock-net/penstock/cc"
)

var configType = reflect.TypeFor[Config]()

// decodeNode reads a node into v, and notes where each value stands. What is wrong is
// noted in the words of the file and not of Go, and left as it was in v.
func (r *reading) decodeNode(key string, node ast.Node, v reflect.Value) {
	r.places[key] = node.GetToken()
	t := v.Type()
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	wrong := func(format string, args ...any) { r.noteError(key, errorAt(node, format, args...)) }
	switch node.Type() {
	case ast.AliasType:
		wrong("a value that begins with * is written in quotes; aliases are not supported")
		return
	case ast.AnchorType, ast.MergeKeyType, ast.TagType:
		wrong("anchors, aliases and tags are not supported; write the value out")
		return
	case ast.NullType:
		wrong("no value; leave the key out for its default")
		return
	}
	if goesOn(node) { // what it took from the lines below may be a secret
		wrong("the value goes on in the next line; a key is missing there, or the line begins too far to the right")
		return
	}
	read := reflect.New(t)
	set := func(err error) {
		if err != nil {
			r.noteError(key, err)
			return
		}
		setThrough(v, read)
	}
	if u, ok := read.Interface().(yaml.NodeUnmarshaler); ok {
		set(u.UnmarshalYAML(node))
		return
	}
	if _, ok := scalars[t]; ok {
		set(readScalar(node, read.Elem()))
		return
	}
	switch t.Kind() {
	case reflect.Struct, reflect.Map:
		r.decodeMapping(key, node, v)
	case reflect.Slice:
		seq, ok := node.(*ast.SequenceNode)
		if !ok {
			wrong("expected a list, not %s", describeNode(node, t))
			return
		}
		list := reflect.MakeSlice(t, len(seq.Values), len(seq.Values))
		for i, item := range seq.Values {
			r.decodeNode(fmt.Sprintf("%s[%d]", key, i), item, list.Index(i))
		}
		v.Set(list)
	case reflect.Bool:
		b, ok := node.(*ast.BoolNode)
		if !ok {
			wrong("expected true or false, not %s", describeNode(node, t))
			return
		}
		read.Elem().SetBool(b.Value)
		setThrough(v, read)
	case reflect.Int:
		n, ok := node.(*ast.IntegerNode)
		if !ok {
			wrong("expected a whole number, not %s", describeNode(node, t))
			return
		}
		i, ok := n.Value.(int64)
		if u, unsigned := n.Value.(uint64); unsigned {
			i, ok = int64(u), u <= math.MaxInt
		}
		if !ok || read.Elem().OverflowInt(i) {
			wrong("%s is out of range", cutText(n.Token.Value))
			return
		}
		read.Elem().SetInt(i)
		setThrough(v, read)
	case reflect.String:
		if _, err := scalarText(node); err != nil {
			wrong("expected a text, not %s", describeNode(node, t))
			return
		}
		switch n := node.(type) {
		case *ast.StringNode:
			v.SetString(n.Value)
		case *ast.LiteralNode:
			v.SetString(n.Value.Value)
		default: // what it is may be a secret
			wrong("expected a text; write it in quotes")
		}
	default:
		panic("config: field of a kind nobody reads: " + t.String())
	}
}

// goesOn reports whether a value without quotes has more than one line. YAML joins a line that
// stands further to the right, and has no key, to the value before.
func goesOn(node ast.Node) bool {
	s, ok := node.(*ast.StringNode)
	return ok && s.Token.Type == token.StringType && strings.Contains(strings.TrimSpace(s.Token.Origin), "\n")
}

// setThrough sets v, or what it points to, to what read points to.
func setThrough(v, read reflect.Value) {
	if v.Kind() == reflect.Pointer {
		v.Set(read)
		return
	}
	v.Set(read.Elem())
}

func (r *reading) decodeMapping(key string, node ast.Node, v reflect.Value) {
	m, ok := node.(ast.MapNode)
	if !ok {
		r.noteError(key, errorAt(node, "expected keys with values, not %s", describeNode(node, v.Type())))
		return
	}
	var fields map[string]reflect.StructField
	if v.Kind() == reflect.Struct {
		fields = fieldsOf(v.Type())
	} else {
		v.Set(reflect.MakeMap(v.Type()))
	}
	for it := m.MapRange(); it.Next(); {
		if it.Key().IsMergeKey() {
			r.noteError(key, errorAt(it.Key(), "anchors, aliases and tags are not supported; write the value out"))
			continue
		}
		name, err := scalarText(it.Key())
		if err != nil {
			r.noteError(key, err)
			continue
		}
		full := strings.TrimPrefix(key+"."+cutText(name), ".")
		if fields == nil {
			value := reflect.New(v.Type().Elem()).Elem()
			r.decodeNode(full, it.Value(), value)
			v.SetMapIndex(reflect.ValueOf(name), value)
			continue
		}
		f, known := fields[name]
		if !known {
			shown := full
			if i := strings.IndexAny(name, " \t="); i >= 0 { // a value may follow, after an equal sign or a space
				shown = strings.TrimPrefix(key+"."+cutText(name[:i])+cutMark, ".")
			}
			r.noteError(shown, errorAt(it.Key(), "unknown key; %s", suggestKey(name, fields)))
			continue
		}
		field := v.FieldByName(f.Name)
		r.decodeNode(full, it.Value(), field)
		if n := reflect.Indirect(field); n.Kind() == reflect.Int {
			if wrong := outsideBounds(f, int(n.Int())); wrong != "" && it.Value().Type() == ast.IntegerType {
				r.noteError(full, errorAt(it.Value(), "%s", wrong))
			}
		}
	}
}

// maxShown is how much of a value or an unknown key a message shows, in bytes.
const maxShown = 64

func cutText(s string) string {
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

// suggestKey helps after a key that does not exist.
func suggestKey(name string, fields map[string]reflect.StructField) string {
	names := slices.Sorted(maps.Keys(fields))
	if nearest := cc.Nearest(name, names); nearest != "" {
		return fmt.Sprintf("did you mean %s?", nearest)
	}
	if i := slices.IndexFunc(names, func(n string) bool { return len(name) > 2 && strings.HasPrefix(n, name) }); i >= 0 {
		return fmt.Sprintf("did you mean %s?", names[i])
	}
	return "there are " + strings.Join(names, ", ")
}

// describeNode names for people what node is in the place of a t. It shows no value
// that may be a secret.
func describeNode(node ast.Node, t reflect.Type) string {
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
