package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/config/check"
)

// reading is a configuration that is being read, with the mistakes found so far.
type reading struct {
	Config
	places places
	wrong  []*Error
}

// newReading returns a reading that has only the defaults.
func newReading() *reading { return &reading{Config: defaultConfig(), places: places{}} }

// readShape decodes a configuration, and checks each value alone. It returns false if data cannot be
// parsed.
func (r *reading) readShape(data []byte) (parsed bool) {
	if len(data) > maxFile {
		r.wrong = []*Error{{Message: fmt.Sprintf("more than %d bytes are no configuration", maxFile)}}
		return false
	}
	if err := checkBounds(data); err != nil {
		r.noteError("", err)
		return false
	}
	file, err := parser.ParseBytes(data, 0)
	if err != nil {
		r.noteError("", err)
		ExplainSyntax(r.wrong[0], data)
		return false
	}
	root, err := rootOf(file)
	if err != nil {
		r.noteError("", err)
		return false
	}
	if root != nil {
		r.decodeNode("", root, reflect.ValueOf(&r.Config).Elem())
	}
	return true
}

// decodeNode reads a node into v, and notes where each value stands. It notes a mistake in the words of the file and
// not of Go, and leaves v as it was then.
func (r *reading) decodeNode(key string, node ast.Node, v reflect.Value) {
	r.places[key] = node.GetToken()
	if why := unsupported(node); why != "" {
		r.noteError(key, errorAt(node, "%s", why))
		return
	}
	t := v.Type()
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	read := reflect.New(t)
	u, readsItself := read.Interface().(yaml.NodeUnmarshaler)
	_, isScalar := scalars[t]
	var err error
	switch kind := t.Kind(); {
	case readsItself:
		err = u.UnmarshalYAML(node)
	case isScalar:
		err = readScalar(node, read.Elem())
	case kind == reflect.Struct, kind == reflect.Map:
		r.decodeMapping(key, node, v)
		return
	case kind == reflect.Slice:
		r.decodeList(key, node, v)
		return
	case kind == reflect.Bool:
		err = readBool(node, read.Elem())
	case kind == reflect.Int:
		err = readInt(node, read.Elem())
	case kind == reflect.String:
		err = readText(node, read.Elem())
	default:
		panic("config: field of a kind nobody reads: " + t.String())
	}
	if err != nil {
		r.noteError(key, err)
		return
	}
	setThrough(v, read)
}

// unsupported says why a node is no value here, and the cure; empty: it may be one.
func unsupported(node ast.Node) string {
	switch node.Type() {
	case ast.AliasType:
		return "a value that begins with * is written in quotes; aliases are not supported"
	case ast.AnchorType, ast.MergeKeyType, ast.TagType:
		return "anchors, aliases and tags are not supported; write the value out"
	case ast.NullType:
		return "no value; leave the key out for its default"
	}
	if isMultiline(node) { // the message shows none of it, because the lines below may hold a secret
		return "the value goes on in the next line; a key is missing there, or the line begins too far to the right"
	}
	return ""
}

// readBool reads true or false.
func readBool(node ast.Node, to reflect.Value) error {
	b, ok := node.(*ast.BoolNode)
	if !ok {
		return errorAt(node, "expected true or false, not %s", describeNode(node, to.Type()))
	}
	to.SetBool(b.Value)
	return nil
}

// readInt reads a whole number.
func readInt(node ast.Node, to reflect.Value) error {
	n, ok := node.(*ast.IntegerNode)
	if !ok {
		return errorAt(node, "expected a whole number, not %s", describeNode(node, to.Type()))
	}
	i, ok := n.Value.(int64)
	if u, unsigned := n.Value.(uint64); unsigned {
		i, ok = int64(u), u <= math.MaxInt
	}
	if !ok || to.OverflowInt(i) {
		return errorAt(node, "%s is out of range", cutText(n.Token.Value))
	}
	to.SetInt(i)
	return nil
}

// readText reads a text.
func readText(node ast.Node, to reflect.Value) error {
	if _, err := scalarText(node); err != nil {
		return errorAt(node, "expected a text, not %s", describeNode(node, to.Type()))
	}
	switch n := node.(type) {
	case *ast.StringNode:
		to.SetString(n.Value)
	case *ast.LiteralNode:
		to.SetString(n.Value.Value)
	default: // the message does not show the value, which may be a secret
		return errorAt(node, "expected a text; write it in quotes")
	}
	return nil
}

// decodeList reads a list.
func (r *reading) decodeList(key string, node ast.Node, v reflect.Value) {
	seq, ok := node.(*ast.SequenceNode)
	if !ok {
		cure := "put brackets around it"
		if _, isMap := node.(ast.MapNode); isMap {
			cure = "begin each entry with a -"
		} else if text, _ := scalarText(node); strings.Contains(text, ":") {
			cure = "put quotes and brackets around it"
		}
		r.noteError(key, errorAt(node, "expected a list, not %s; %s", describeNode(node, v.Type()), cure))
		return
	}
	list := reflect.MakeSlice(v.Type(), len(seq.Values), len(seq.Values))
	for i, item := range seq.Values {
		r.decodeNode(fmt.Sprintf("%s[%d]", key, i), item, list.Index(i))
	}
	v.Set(list)
}

// decodeMapping reads keys with values into the fields of a struct, or into a map. Unknown keys are mistakes, and the
// nearest known one is suggested.
func (r *reading) decodeMapping(key string, node ast.Node, v reflect.Value) {
	m, ok := node.(ast.MapNode)
	if !ok {
		t, cure := v.Type(), ""
		if t.Kind() == reflect.Struct {
			cure = "; there are " + strings.Join(slices.Sorted(maps.Keys(fieldsOf(t))), ", ")
		}
		if t == configType {
			t = nil
		}
		r.noteError(key, errorAt(node, "expected keys with values, not %s%s", describeNode(node, t), cure))
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
			r.noteError(shown, errorAt(it.Key(), "unknown key; %s", suggestKey(shown, name, fields)))
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

// runRecovering calls read, which notes mistakes in r, and returns the first of them; nil: there is none. It also
// ends a panic of read, so that no configuration can end a process that runs with another one.
func (r *reading) runRecovering(data []byte, read func()) (mistake *Error) {
	defer func() {
		if e := mistakeOf(recover()); e != nil {
			mistake = e
		}
	}()
	read()
	return r.firstMistake(data)
}

// noteError notes an error of a node, for the key.
func (r *reading) noteError(key string, err error) {
	e := fromYAMLError(err)
	e.Key = key
	r.wrong = append(r.wrong, e)
}

// noteErrors notes the mistakes that are joined in err. It leaves out those that may only follow
// from a mistake of an earlier pass: one at the same key, or, for checks, in the same section.
func (r *reading) noteErrors(err error, checks bool) {
	earlier := r.wrong
	for _, err := range check.Split(err) {
		var ke *check.Error
		if errors.As(err, &ke) && slices.ContainsFunc(earlier,
			func(e *Error) bool { return mayFollowFrom(ke, e.Key, checks) }) {
			continue
		}
		e := r.places.locateError(err)
		same := func(other *Error) bool { return e.Key == other.Key && e.Message == other.Message }
		if !slices.ContainsFunc(r.wrong, same) {
			r.wrong = append(r.wrong, e)
		}
	}
}

// firstMistake returns the first mistake in the file, with its excerpt and the others; nil: there is
// none.
func (r *reading) firstMistake(data []byte) *Error {
	if len(r.wrong) == 0 {
		return nil
	}
	slices.SortStableFunc(r.wrong, func(a, b *Error) int {
		if a.Line == 0 || b.Line == 0 { // those without a place last
			return cmp.Compare(b.Line, a.Line)
		}
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
	first := r.wrong[0]
	if first.Line > 0 && data != nil {
		first.Excerpt = makeExcerpt(data, first.Line, first.Column)
	}
	others := r.wrong[1:]
	first.Unlisted = max(0, len(others)-maxOthers)
	first.Others = others[:len(others)-first.Unlisted]
	return first
}

// mistakeOf returns the mistake that refuses a configuration after its reading has panicked; nil: it has not.
// The value of the panic is shown only if Go's runtime made it, since any other may hold a secret of the file.
// A deferred function calls it with recover(), so that the stack is still that of the panic.
func mistakeOf(panicked any) *Error {
	if panicked == nil {
		return nil
	}
	why := "panic"
	if err, ok := panicked.(runtime.Error); ok {
		why = err.Error()
	}
	return &Error{Message: fmt.Sprintf("Penstock failed to read this (%s at %s), which is a defect of Penstock's; "+
		"please report it with the file, without the secrets in it", oneLine(why), panickedAt())}
}

// panickedAt names the line that panicked: the first below the runtime's own functions.
func panickedAt() string {
	pcs := make([]uintptr, 64)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(0, pcs)])
	inPanic := false
	for {
		f, more := frames.Next()
		switch {
		case f.Function == "runtime.gopanic":
			inPanic = true
		case inPanic && !strings.HasPrefix(f.Function, "runtime."):
			return fmt.Sprintf("%s:%d", filepath.Base(f.File), f.Line)
		}
		if !more {
			return "an unknown line"
		}
	}
}

// mayFollowFrom reports whether e may be a consequence of a mistake at that key.
func mayFollowFrom(e *check.Error, key string, sections bool) bool {
	return isWithin(key, e.Key) || isWithin(e.Key, key) || e.Cause != "" && isWithin(key, e.Cause) ||
		sections && sectionOf(e.Key) == sectionOf(key)
}

// isWithin reports whether a key is another, or below it.
func isWithin(key, above string) bool {
	rest, ok := strings.CutPrefix(key, above)
	return ok && (above == "" || rest == "" || rest[0] == '.' || rest[0] == '[')
}

// sectionOf returns the part of a key that has values which depend on each other: one element of a list, or
// two names. A name may be empty, since an unknown key may hold any bytes.
func sectionOf(key string) string {
	first, rest, more := strings.Cut(key, ".")
	if !more || strings.HasSuffix(first, "]") || first == "defaults" {
		return first
	}
	second, _, _ := strings.Cut(rest, ".")
	return first + "." + second
}

// places are the tokens of the values in the file, by path.
type places map[string]*token.Token

// locateError finds the place of a check.Error: its own, or that of the nearest
// enclosing key where its own was left out.
func (p places) locateError(err error) *Error {
	var ke *check.Error
	if !errors.As(err, &ke) {
		return &Error{Message: oneLine(err.Error())}
	}
	out := &Error{Key: ke.Key, Message: oneLine(ke.Text())}
	for key := ke.Key; key != ""; key = parentKey(key) {
		if tk := p[key]; tk != nil {
			out.setPlace(tk)
			break
		}
	}
	return out
}

// parentKey returns the key that holds another; empty: the whole file.
func parentKey(key string) string {
	return key[:max(0, strings.LastIndexAny(key, ".["))]
}

// setThrough sets v to the value that read points to, or to read itself where v is a pointer.
func setThrough(v, read reflect.Value) {
	if v.Kind() == reflect.Pointer {
		v.Set(read)
		return
	}
	v.Set(read.Elem())
}

// suggestKey says what to write instead of a key that does not exist.
func suggestKey(key, name string, fields map[string]reflect.StructField) string {
	if strings.HasSuffix(key, ".tunnel.udp_share") || strings.HasSuffix(key, ".udp.share") {
		return "it is gone: UDP weighs as its busy flows do; remove it, and have a rule with protocol: udp set a weight"
	}
	names := slices.Sorted(maps.Keys(fields))
	if nearest := cc.Nearest(name, names); nearest != "" {
		return fmt.Sprintf("did you mean %s?", nearest)
	}
	if i := slices.IndexFunc(names, func(n string) bool { return len(name) > 2 && strings.HasPrefix(n, name) }); i >= 0 {
		return fmt.Sprintf("did you mean %s?", names[i])
	}
	for _, in := range []map[string]reflect.StructField{fields, fieldsOf(configType)} {
		if above := sectionsWith(name, in); len(above) > 0 {
			return "it stands below " + strings.Join(above, " or ")
		}
	}
	return "there are " + strings.Join(names, ", ")
}

// sectionsWith returns the names of the fields that have the key directly below them.
func sectionsWith(key string, fields map[string]reflect.StructField) (sections []string) {
	for name, f := range fields {
		t := f.Type
		for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
			t = t.Elem()
		}
		if t.Kind() != reflect.Struct {
			continue
		}
		if _, has := fieldsOf(t)[key]; has {
			sections = append(sections, name)
		}
	}
	slices.Sort(sections)
	return sections
}

// rootOf returns the root of the only document; nil when there is nothing.
func rootOf(file *ast.File) (ast.Node, error) {
	var root ast.Node
	for _, d := range file.Docs {
		if d.Body == nil || d.Body.Type() == ast.NullType || d.Body.Type() == ast.CommentType {
			continue
		}
		if root != nil {
			return nil, errorAt(d.Body, "a second document; the configuration is one")
		}
		root = d.Body
	}
	return root, nil
}

// quoted matches a value in a message of the YAML library.
var quoted = regexp.MustCompile(`"(\\.|[^"\\])*"`)

// inQuotes is the cure for a value that YAML takes for a list or a key.
const inQuotes = `a value that begins with a bracket or a colon is written in quotes, such as "[::]:7000"`

// syntaxWords are our messages in place of messages that begin with the YAML library's words.
var syntaxWords = []struct{ library, ours string }{
	{"mapping value is not allowed", "no key can stand here: its line begins too far to the right, a - lacks the space " +
		"behind it, or a value with a colon is not in quotes"},
	{"value is not allowed", "this cannot stand here: its line begins in another column than those beside it, or one " +
		"bracket too many is closed"},
	{"non-map value is specified", "a colon and a space are missing between key and value, as in mode: mixed"},
	{"found an invalid key", inQuotes},
	{"could not find flow mapping end", "no } closes this {"},
	{"sequence end token", "no ] closes this ["},
	{"',' or '}' must be specified", "a comma or the } is missing"},
	{"',' or ']' must be specified", "a comma or the ] is missing"},
	{"could not find end character of", "no quote closes this one"},
}

// ExplainSyntax replaces the message of a syntax error at a place in data by our own. It shows no value, which may be
// a secret. It names a tab in the indentation, because a tab looks like the spaces that YAML wants.
func ExplainSyntax(e *Error, data []byte) {
	if strings.HasPrefix(e.Message, "mapping key ") {
		e.Message += "; keep one of them"
	} else {
		e.Message = quoted.ReplaceAllString(e.Message, "this")
	}
	for _, w := range syntaxWords {
		if strings.HasPrefix(e.Message, w.library) {
			e.Message = w.ours
			break
		}
	}
	if strings.HasSuffix(e.Message, "is a reserved character") {
		e.Message += "; write the value in quotes"
	}
	lines := bytes.Split(data, []byte("\n"))
	if e.Line < 1 || e.Line > len(lines) {
		return
	}
	line := lines[e.Line-1]
	if e.Column > 1 && e.Column <= len(line) && string(line[e.Column-2:e.Column]) == "]:" {
		e.Message = inQuotes
	}
	if indent := line[:len(line)-len(bytes.TrimLeft(line, " \t-"))]; bytes.Contains(indent, []byte("\t")) {
		e.Message = "a tab begins the line; YAML wants spaces"
	}
}
