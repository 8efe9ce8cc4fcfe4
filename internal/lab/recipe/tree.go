package recipe

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"

	"github.com/penstock-net/penstock/proxy/config"
)

// section is a mapping of the file, in its order.
type section struct{ *ast.MappingNode }

// sectionOf is the section that a node is; false: it is none.
func sectionOf(n ast.Node) (section, bool) {
	switch n := n.(type) {
	case *ast.MappingNode:
		return section{n}, true
	case *ast.MappingValueNode:
		return section{ast.Mapping(n.GetToken(), false, n)}, true
	}
	return section{}, false
}

// keyOf is a pair's key as written.
func keyOf(p *ast.MappingValueNode) string {
	if s, ok := p.Key.(*ast.StringNode); ok {
		return s.Value
	}
	return p.Key.GetToken().Value
}

func (s section) index(key string) int {
	return slices.IndexFunc(s.Values, func(p *ast.MappingValueNode) bool { return keyOf(p) == key })
}

// value is that of a key; nil: there is none.
func (s section) value(key string) ast.Node {
	if i := s.index(key); i >= 0 {
		return s.Values[i].Value
	}
	return nil
}

// take takes the value of a key out of the section; nil: there is none.
func (s section) take(key string) ast.Node {
	value := s.value(key)
	s.Values = slices.DeleteFunc(s.Values, func(p *ast.MappingValueNode) bool { return keyOf(p) == key })
	return value
}

// merge lays a section over this one: what is a section in both is merged, null takes a
// key away, and anything else stands in the place of what was there.
func (s section) merge(over section) {
	for _, p := range over.Values {
		i := s.index(keyOf(p))
		switch {
		case i < 0 && p.Value.Type() != ast.NullType:
			s.Values = append(s.Values, p)
		case i < 0:
		case p.Value.Type() == ast.NullType:
			s.take(keyOf(p))
		default:
			below, was := sectionOf(s.Values[i].Value)
			above, is := sectionOf(p.Value)
			if !was || !is {
				s.Values[i] = p
				continue
			}
			below.merge(above)
			s.Values[i].Value = below.MappingNode
		}
	}
}

// parse reads a text; its root is a section.
func parse(text []byte) (section, error) {
	file, err := parser.ParseBytes(text, 0)
	if err != nil {
		err = placed(err)
		var mistake *config.Error
		lines := append(strings.Split(string(text), "\n"), "")
		if !errors.As(err, &mistake) || mistake.Line < 1 || mistake.Line > len(lines) {
			return section{}, err
		}
		config.ExplainSyntax(mistake, text)
		if strings.Contains(lines[mistake.Line-1], " #") {
			mistake.Message += comment
		}
		return section{}, err
	}
	if len(file.Docs) == 1 && file.Docs[0].Body != nil {
		if root, ok := sectionOf(file.Docs[0].Body); ok {
			return root, nil
		}
	}
	return section{}, &config.Error{Line: 1, Column: 1, Message: "an experiment is one document of keys with values, " +
		"such as duration: 30s"}
}

const comment = "; a # behind a space begins a comment: write what has one between quotes"

// placed has an error of the YAML library tell its place.
func placed(err error) error {
	var ye yaml.Error
	if !errors.As(err, &ye) || ye.GetToken() == nil {
		return err
	}
	at := ye.GetToken().Position
	return &config.Error{Line: at.Line, Column: at.Column, Message: strings.Join(strings.Fields(ye.GetMessage()), " ")}
}

// mistake is one at a key; placedIn finds its place.
func mistake(key, format string, args ...any) *config.Error {
	return &config.Error{Key: key, Message: fmt.Sprintf(format, args...)}
}

// at is a mistake at a node, of a section without braces at its first key.
func at(n ast.Node, key, format string, args ...any) *config.Error {
	if s, ok := sectionOf(n); ok && !s.IsFlowStyle && len(s.Values) > 0 {
		n = s.Values[0].Key
	}
	e := mistake(key, format, args...)
	if tk := n.GetToken(); tk != nil && tk.Position != nil {
		e.Line, e.Column = tk.Position.Line, tk.Position.Column
	}
	return e
}

// placedIn gives a mistake that names only a key the place of that key: in the run (from 0; -1: there are
// none), or else in what all runs have.
func placedIn(err error, run int, text []byte) error {
	var mistake *config.Error
	if !errors.As(err, &mistake) || mistake.Line > 0 {
		return err
	}
	root, err := parse(text)
	if err != nil {
		return err
	}
	var key ast.Node
	if runs, _ := runsOf(root); run >= 0 && run < len(runs) {
		key = runs[run].find(mistake.Key)
	}
	if key == nil {
		key = root.find(mistake.Key)
	}
	if key == nil {
		return mistake
	}
	return at(key, mistake.Key, "%s", mistake.Message)
}

// find returns the node of the key at a path, or of its longest part that exists; nil: none does. A space
// ends a key too: flows that one key makes have its name, a space and a number.
func (s section) find(path string) ast.Node {
	for _, p := range s.Values {
		rest, ok := strings.CutPrefix(path, keyOf(p))
		if !ok || rest != "" && !strings.ContainsRune(".[ ", rune(rest[0])) {
			continue
		}
		if below, is := sectionOf(p.Value); is && rest != "" {
			if n := below.find(rest[1:]); n != nil {
				return n
			}
		}
		return p.Key
	}
	return nil
}

// Place gives a mistake in the proxy's configuration the place in the experiment's file that it comes from.
func (r Recipe) Place(err error) error {
	var mistake *config.Error
	if !errors.As(err, &mistake) {
		return err
	}
	text, parsed := parse(r.text)
	if parsed != nil {
		return err
	}
	for _, key := range []string{
		strings.TrimSuffix("edge."+mistake.Key, "."), strings.TrimPrefix(mistake.Key, "defaults."),
		text.ofRule(mistake.Key),
	} {
		if n := text.find(key); n != nil {
			placed := at(n, key, "%s", mistake.Message)
			placed.File = r.file
			return placed
		}
	}
	return err
}

// ofRule returns the key in a flow that a key in one of the edge's rules was made of; empty: there is none.
func (s section) ofRule(key string) string {
	rule, term, ok := strings.Cut(key, ".down.")
	number, err := strconv.Atoi(strings.Trim(rule, "rules[]"))
	flows, there := sectionOf(s.value("flows"))
	if !ok || err != nil || !there {
		return ""
	}
	for _, p := range flows.Values {
		f, is := sectionOf(p.Value)
		if !is || !slices.ContainsFunc(termKeys, func(k string) bool { return f.index(k) >= 0 }) {
			continue
		}
		if number--; number < 0 {
			return "flows." + keyOf(p) + "." + term
		}
	}
	return ""
}

// variables are values by name; $(name) in the text stands for one.
type variables map[string]string

var variable = regexp.MustCompile(`\$\(([a-z_]+)\)`)

// in puts the values in their places.
func (v variables) in(text string) string {
	return variable.ReplaceAllStringFunc(text, func(s string) string {
		if value, ok := v[s[2:len(s)-1]]; ok {
			return value
		}
		return s
	})
}

// with returns these variables and more; values of more come first.
func (v variables) with(more variables) variables {
	all := maps.Clone(v)
	maps.Copy(all, more)
	return all
}

// unset is a mistake where a variable in a section has no value; known are those that have.
func (s section) unset(known variables) error {
	for _, n := range ast.Filter(ast.StringType, s.MappingNode) {
		if name := variable.FindString(n.(*ast.StringNode).Value); name != "" {
			return at(n, "", "%s has no value: vary and for give some; there are %s", name,
				strings.Join(slices.Sorted(maps.Keys(known)), ", "))
		}
	}
	return nil
}

// scalar is a value as written; false: it is a list or a section.
func scalar(n ast.Node) (string, bool) {
	switch n := n.(type) {
	case *ast.StringNode:
		return n.Value, true
	case *ast.LiteralNode:
		return strings.TrimSpace(n.Value.Value), true
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.NanNode, *ast.InfinityNode:
		return n.GetToken().Value, true
	}
	return "", false
}

// readRow reads variables that each have a value; key is where they stand.
func readRow(n ast.Node, key string) (variables, error) {
	s, ok := sectionOf(n)
	if !ok {
		return nil, at(n, key, "expected names with values, such as {mb: 10}")
	}
	v := variables{}
	for _, p := range s.Values {
		value, ok := scalar(p.Value)
		if !ok || !variable.MatchString("$("+keyOf(p)+")") {
			return nil, at(p.Key, key, "expected a name of small letters with one value, such as mb: 10")
		}
		v[keyOf(p)] = value
	}
	return v, nil
}

// rows are the values that variables take: of a section with lists every combination, the
// last name's changing first; of a list of sections one after the other.
func rows(n ast.Node, key string) ([]variables, error) {
	if n == nil {
		return []variables{{}}, nil
	}
	if list, ok := n.(*ast.SequenceNode); ok && len(list.Values) > 0 {
		var all []variables
		for _, item := range list.Values {
			v, err := readRow(item, key)
			if err != nil {
				return nil, err
			}
			all = append(all, v)
		}
		return all, nil
	}
	s, ok := sectionOf(n)
	if !ok {
		return nil, at(n, key, "expected names with lists of values, such as {algorithm: [copa, cubic]}")
	}
	all := []variables{{}}
	for _, p := range s.Values {
		list, ok := p.Value.(*ast.SequenceNode)
		if !ok || len(list.Values) == 0 {
			return nil, at(p.Key, key, "expected a list of values, such as %s: [copa, cubic]", keyOf(p))
		}
		var more []variables
		for _, row := range all {
			for _, item := range list.Values {
				value, ok := scalar(item)
				if !ok {
					return nil, at(item, key, "expected one value")
				}
				more = append(more, row.with(variables{keyOf(p): value}))
			}
		}
		if all = more; len(all) > maxRuns {
			return nil, at(p.Key, key, "these are more than %d combinations", maxRuns)
		}
	}
	return all, nil
}
