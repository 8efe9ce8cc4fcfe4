package config

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// Error is a mistake in a configuration. Error is one line; Excerpt
// shows the place.
type Error struct {
	File         string // empty: not from a file
	Line, Column int    // from 1; 0: no single place
	Key          string // path of the key, such as listeners[0].mode; empty: the whole file
	Message      string
	Excerpt      string // the lines around the place, the place marked; may be empty
}

func (e *Error) Error() string {
	var b strings.Builder
	if e.File != "" {
		b.WriteString(e.File + ":")
	}
	if e.Line > 0 {
		fmt.Fprintf(&b, "%d:%d:", e.Line, e.Column)
	}
	if b.Len() > 0 {
		b.WriteString(" ")
	}
	if e.Key != "" {
		b.WriteString(e.Key + ": ")
	}
	return printable(b.String()+e.Message, false)
}

// Loaded is a configuration with what it was read from.
type Loaded struct {
	Config
	Path  string   // of the configuration file
	Hash  string   // SHA-256 of it, in hexadecimal
	Files []string // that were read: the configuration and those it names
	files *files
}

// Load reads and checks a configuration file and the files of secrets it names.
// Every mistake is a *Error.
func Load(path string) (Config, error) {
	l, err := LoadFiles(path)
	return l.Config, err
}

// LoadFiles is Load, and tells what was read.
func LoadFiles(path string) (Loaded, error) { return newFiles(path).load(path) }

// load reads the configuration at path.
func (f *files) load(path string) (Loaded, error) {
	name := filepath.Base(path)
	data, err := f.bytes(name)
	if err != nil {
		return Loaded{}, &Error{File: path, Message: err.Error()}
	}
	c, mistake := load(data, name, f)
	if mistake != nil {
		mistake.File = path
		return Loaded{}, mistake
	}
	sum := sha256.Sum256(f.read[f.path(name)].data)
	return Loaded{Config: c, Path: path, Hash: hex.EncodeToString(sum[:]), Files: f.names(), files: f}, nil
}

// load parses a configuration and reads the files that it names. What they hold
// is checked like what stands in the configuration itself.
func load(data []byte, name string, from *files) (Config, *Error) {
	c, found, err := parse(data)
	if err != nil {
		return c, shown(err, data)
	}
	if key := inlineSecret("", reflect.ValueOf(c)); key != "" {
		if err := from.closed(name); err != nil {
			return c, shown(found.locate(keyErrorf(key, "%v, or put the secret into a file of its own", err)), data)
		}
	}
	err = c.readSecrets(from)
	if err == nil {
		err = c.check()
	}
	if err != nil {
		return c, shown(found.locate(err), data)
	}
	return c, nil
}

// Parse reads and checks a configuration. Files of secrets are not read.
func Parse(data []byte) (Config, error) {
	data = withoutMark(data)
	c, _, err := parse(data)
	if err != nil {
		return Config{}, shown(err, data)
	}
	return c, nil
}

// shown is the mistake with its place in data.
func shown(err error, data []byte) *Error {
	var ce *Error
	if !errors.As(err, &ce) {
		ce = &Error{Message: oneLine(err.Error())}
	}
	if ce.Line > 0 {
		ce.Excerpt = excerpt(data, ce.Line, ce.Column)
	}
	return ce
}

// parse reads a configuration and checks it.
func parse(data []byte) (Config, places, error) {
	c, found, err := shape(data)
	if err != nil {
		return Config{}, nil, err
	}
	if err := c.check(); err != nil {
		return Config{}, nil, found.locate(err)
	}
	return c, found, nil
}

// shape reads a configuration: each value may stand where it does, whatever others say.
func shape(data []byte) (Config, places, error) {
	if len(data) > maxFile {
		return Config{}, nil, &Error{Message: fmt.Sprintf("more than %d bytes are no configuration", maxFile)}
	}
	if err := bounded(data); err != nil {
		return Config{}, nil, positioned(err, nil)
	}
	file, err := parser.ParseBytes(data, 0)
	if err != nil {
		return Config{}, nil, withoutValues(positioned(err, nil))
	}
	c := defaults()
	found := places{}
	root, err := document(file)
	if err != nil {
		return Config{}, nil, positioned(err, nil)
	}
	if root != nil {
		if err := found.walk("", root, configType); err != nil {
			return Config{}, nil, positioned(err, found)
		}
		if err := yaml.NodeToValue(root, &c, yaml.Strict()); err != nil {
			return Config{}, nil, positioned(err, found)
		}
	}
	return c, found, nil
}

// document returns the root of the only document; nil when there is nothing.
func document(file *ast.File) (ast.Node, error) {
	var root ast.Node
	for _, d := range file.Docs {
		if d.Body == nil || d.Body.Type() == ast.NullType || d.Body.Type() == ast.CommentType {
			continue
		}
		if root != nil {
			return nil, at(d.Body, "a second document; the configuration is one")
		}
		root = d.Body
	}
	return root, nil
}

// positioned turns an error of the YAML library into ours.
func positioned(err error, found places) error {
	var ce *Error
	if errors.As(err, &ce) {
		return err
	}
	var ye yaml.Error
	if !errors.As(err, &ye) {
		return &Error{Message: oneLine(err.Error())}
	}
	out := &Error{Message: oneLine(ye.GetMessage())}
	var syntax *yaml.SyntaxError
	var overflow *yaml.OverflowError
	var twice *yaml.DuplicateKeyError
	switch {
	case errors.As(err, &overflow):
		out.Message = fmt.Sprintf("%s is too large", overflow.SrcNum)
	case !errors.As(err, &syntax) && !errors.As(err, &twice): // they speak of Go's types
		out.Message = "this kind of value does not fit here"
	}
	if tk := ye.GetToken(); tk != nil {
		out.mark(tk)
		out.Key = found.at(tk)
	}
	return out
}

func (e *Error) mark(tk *token.Token) {
	if tk != nil && tk.Position != nil {
		e.Line, e.Column = tk.Position.Line, tk.Position.Column
	}
}

// quoted is a value in a message of the YAML library's.
var quoted = regexp.MustCompile(`"(\\.|[^"\\])*"`)

// withoutValues takes what the file says out of a message of the YAML library's,
// which does not know what is a secret.
func withoutValues(err error) error {
	var ce *Error
	if errors.As(err, &ce) && !strings.HasPrefix(ce.Message, "mapping key ") {
		ce.Message = quoted.ReplaceAllString(ce.Message, "this")
	}
	return err
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// keyError is a mistake found after parsing, by the path of its key.
type keyError struct {
	key, message string
}

func (e *keyError) Error() string { return e.key + ": " + e.message }

func keyErrorf(key, format string, args ...any) error {
	return &keyError{key, fmt.Sprintf(format, args...)}
}

// places are the tokens of the values that were given, by path.
type places map[string]*token.Token

// locate finds the place of a keyError: its own, or that of the nearest
// enclosing key where its own was left out.
func (p places) locate(err error) error {
	var ke *keyError
	if !errors.As(err, &ke) {
		return &Error{Message: oneLine(err.Error())}
	}
	out := &Error{Key: ke.key, Message: oneLine(ke.message)}
	for key := ke.key; key != ""; key = parent(key) {
		if tk := p[key]; tk != nil {
			out.mark(tk)
			break
		}
	}
	return out
}

// at returns the path of the value that begins with tk.
func (p places) at(tk *token.Token) string {
	best := ""
	for key, t := range p {
		if t == tk && len(key) > len(best) {
			best = key
		}
	}
	return best
}

func parent(key string) string {
	return key[:max(0, strings.LastIndexAny(key, ".["))]
}
