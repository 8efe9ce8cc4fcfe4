package proxy

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// maxConfig bounds what is read as configuration.
const maxConfig = 1 << 20

// ConfigError is a mistake in a configuration. Error is one line; Excerpt
// shows the place.
type ConfigError struct {
	File         string // empty: not from a file
	Line, Column int    // from 1; 0: no single place
	Key          string // path of the key, such as listeners[0].mode; empty: the whole file
	Message      string
	Excerpt      string // the lines around the place, the place marked; may be empty
}

func (e *ConfigError) Error() string {
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
	return b.String() + e.Message
}

// Load reads and checks a configuration file and the files of secrets it names.
// Every mistake is a *ConfigError.
func Load(path string) (Config, error) {
	fail := func(err error) (Config, error) {
		var ce *ConfigError
		if !errors.As(err, &ce) {
			ce = &ConfigError{Message: err.Error()}
		}
		ce.File = path
		return Config{}, ce
	}
	info, err := os.Stat(path)
	if err != nil {
		return Config{}, &ConfigError{Message: fmt.Sprintf("cannot read the configuration: %v", err)}
	}
	if info.Size() > maxConfig {
		return fail(fmt.Errorf("%d bytes are no configuration; at most %d are read", info.Size(), maxConfig))
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return Config{}, &ConfigError{Message: fmt.Sprintf("cannot read the configuration: %v", err)}
	}
	c, places, err := parse(data)
	if err != nil {
		return fail(err)
	}
	if err := c.readSecrets(filepath.Dir(path)); err != nil {
		return fail(places.locate(err))
	}
	return c, nil
}

// Parse reads and checks a configuration. Files of secrets are not read.
func Parse(data []byte) (Config, error) {
	c, _, err := parse(data)
	return c, err
}

func parse(data []byte) (Config, places, error) {
	if len(data) > maxConfig {
		return Config{}, nil, &ConfigError{Message: fmt.Sprintf("more than %d bytes are no configuration", maxConfig)}
	}
	file, err := parser.ParseBytes(data, 0)
	if err != nil {
		return Config{}, nil, positioned(err, nil)
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
	if err := c.check(); err != nil {
		return Config{}, nil, found.locate(err)
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
	var ce *ConfigError
	if errors.As(err, &ce) {
		return err
	}
	var ye yaml.Error
	if !errors.As(err, &ye) {
		return &ConfigError{Message: oneLine(err.Error())}
	}
	out := &ConfigError{Message: oneLine(ye.GetMessage())}
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

func (e *ConfigError) mark(tk *token.Token) {
	if tk == nil || tk.Position == nil {
		return
	}
	e.Line, e.Column = tk.Position.Line, tk.Position.Column
	shown := yaml.FormatErrorWithToken("", tk, false, true)
	if _, excerpt, ok := strings.Cut(shown, "\n"); ok {
		e.Excerpt = excerpt
	}
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
		return &ConfigError{Message: oneLine(err.Error())}
	}
	out := &ConfigError{Key: ke.key, Message: oneLine(ke.message)}
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
