package config

import (
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/token"
)

// fromYAMLError turns an error of the YAML library into ours.
func fromYAMLError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	var ye yaml.Error
	if !errors.As(err, &ye) {
		return &Error{Message: oneLine(err.Error())}
	}
	e = &Error{Message: oneLine(ye.GetMessage())}
	e.setPlace(ye.GetToken())
	return e
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
	cure := ""
	if _, isMap := node.(ast.MapNode); isMap { // YAML takes 2001:db8::/32 in a list for a key
		cure = "; one with a colon is written in quotes"
	}
	return "", errorAt(node, "expected one value, not %s%s", describeNode(node, nil), cure)
}

// isText reports whether a scalar is a text in YAML, as every value in quotes is.
func isText(node ast.Node) bool {
	return node.Type() == ast.StringType || node.Type() == ast.LiteralType
}

// isMultiline reports whether a value without quotes has more than one line. YAML joins a line that
// is indented further and has no key to the value above it.
func isMultiline(node ast.Node) bool {
	s, ok := node.(*ast.StringNode)
	return ok && s.Token.Type == token.StringType && strings.Contains(strings.TrimSpace(s.Token.Origin), "\n")
}

// describeNode describes for people a node that stands where a value of type t belongs; nil: any
// type. It shows no value that may be a secret.
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
	case tk == nil, len(tk.Value) > maxShown, t == nil, hasSecrets(t, false):
		return "one value"
	case hasSecrets(t, true) && strings.ContainsAny(tk.Value, " =:"): // keys and values that are no YAML
		return "one value"
	}
	return fmt.Sprintf("%q", tk.Value)
}

// maxShown is how much of a value or an unknown key a message shows, in bytes.
const maxShown = 64

// cutText bounds how much of a value or key a message shows.
func cutText(s string) string {
	if len(s) > maxShown {
		return s[:maxShown] + "…"
	}
	return s
}
