package config

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
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

	Others []*Error // further mistakes of the file, without excerpts, at most maxOthers
	Untold int      // how many there are beyond these
}

// maxOthers bounds how many mistakes are told besides the first.
const maxOthers = 19

// Error is the first mistake alone, in one line.
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
	return escapeControls(b.String()+e.Message, false)
}

// Rest are the lines that tell of the mistakes behind the first one, which err tells of;
// none where err is another one.
func Rest(err error) (lines []string) {
	var e *Error
	if !errors.As(err, &e) {
		return nil
	}
	for _, other := range e.Others {
		lines = append(lines, other.Error())
	}
	if e.Untold > 0 {
		lines = append(lines, fmt.Sprintf("and %d more", e.Untold))
	}
	return lines
}

// Loaded is a configuration with what it was read from.
type Loaded struct {
	Config
	Path string // of the configuration file
	Hash string // SHA-256 of it, in hexadecimal
	// Files were read: the configuration and those it names. With an error those are among them that could not be.
	Files []string
	// Seen has each file that was looked for, as it was then; nil: it was not there. Saved files are not looked for.
	Seen  map[string]fs.FileInfo
	files *files
}

// Load reads and checks a configuration file and the files of secrets it names.
// Every mistake is a *Error.
func Load(path string) (Config, error) {
	l, err := LoadFiles(path)
	return l.Config, err
}

// LoadFiles is Load, and tells what was read, or was to be where there is a mistake.
func LoadFiles(path string) (Loaded, error) { return newFiles(path).loadFile(path) }

// loadFile reads the configuration at path.
func (f *files) loadFile(path string) (Loaded, error) {
	name := filepath.Base(path)
	data, err := f.readBytes(name)
	if err != nil {
		return Loaded{Files: f.fileNames(), Seen: f.seen}, &Error{File: path, Message: err.Error()}
	}
	c, mistake := loadData(data, name, f)
	l := Loaded{Files: f.fileNames(), Seen: f.seen}
	if mistake != nil {
		return l, mistake.setFile(path)
	}
	sum := sha256.Sum256(f.read[f.pathOf(name)].data)
	l.Config, l.Path, l.Hash, l.files = c, path, hex.EncodeToString(sum[:]), f
	return l, nil
}

// loadData reads a configuration and the files that it names. What they hold is checked
// like what stands in the configuration itself.
func loadData(data []byte, name string, from *files) (Config, *Error) {
	r := newReading()
	mistake := r.runRecovering(data, func() {
		if !r.readShape(data) {
			return
		}
		r.noteErrors(r.checkAll(), true)
		if key := inlineSecret("", reflect.ValueOf(r.Config)); key != "" {
			if err := from.checkPrivate(name); err != nil {
				r.noteErrors(keyErrorf(key, "%v, or put the secret into a file of its own", err), false)
			}
		}
		r.noteErrors(r.readSecrets(from), false)
		r.noteErrors(r.checkAll(), true)
	})
	return r.Config, mistake
}

// setFile names the file of the mistakes.
func (e *Error) setFile(path string) *Error {
	e.File = path
	for _, other := range e.Others {
		other.File = path
	}
	return e
}

// Written reads and checks a configuration file, but none of the files that it names.
// Every mistake is an *Error.
func Written(path string) (Config, error) {
	data, err := ReadFile(path)
	if err != nil {
		return Config{}, &Error{File: path, Message: err.Error()}
	}
	c, err := Parse(data)
	var mistake *Error
	if errors.As(err, &mistake) {
		return Config{}, mistake.setFile(path)
	}
	return c, err
}

// Parse reads and checks a configuration. Files of secrets are not read.
func Parse(data []byte) (Config, error) {
	data = withoutMark(data)
	r := newReading()
	mistake := r.runRecovering(data, func() {
		if r.readShape(data) {
			r.noteErrors(r.checkAll(), true)
		}
	})
	if mistake != nil {
		return Config{}, mistake
	}
	return r.Config, nil
}

// Validate finds what is wrong with a configuration that did not come whole from a
// file, since flags changed it, or once more with one that did. The error is an *Error.
func (c Config) Validate() error {
	r := reading{Config: c}
	if mistake := r.runRecovering(nil, func() { r.noteErrors(c.checkAll(), true) }); mistake != nil {
		return mistake
	}
	return nil
}

// readShape reads a configuration: each value may stand where it does, whatever others
// say. It is not fine where it cannot be read at all.
func (r *reading) readShape(data []byte) (fine bool) {
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
		withoutValues(r.wrong[0])
		nameTab(r.wrong[0], data)
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

// Decode reads a YAML node of another kind of file into what v points to, by its yaml
// tags and as strictly as a configuration is read; key is the node's own, empty for the
// root. data is the file, for excerpts. nil: nothing is wrong.
func Decode(data []byte, key string, node ast.Node, v any) *Error {
	r := &reading{places: places{}}
	return r.runRecovering(data, func() { r.decodeNode(key, node, reflect.ValueOf(v).Elem()) })
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
	e.markToken(ye.GetToken())
	return e
}

func (e *Error) markToken(tk *token.Token) {
	if tk != nil && tk.Position != nil {
		e.Line, e.Column = tk.Position.Line, tk.Position.Column
	}
}

// quoted is a value in a message of the YAML library's.
var quoted = regexp.MustCompile(`"(\\.|[^"\\])*"`)

// withoutValues takes what the file says out of a message of the YAML library's,
// which does not know what is a secret.
func withoutValues(e *Error) {
	if !strings.HasPrefix(e.Message, "mapping key ") {
		e.Message = quoted.ReplaceAllString(e.Message, "this")
	}
}

// nameTab says so where a tab is in the way: it looks like the spaces that YAML wants.
func nameTab(e *Error, data []byte) {
	lines := bytes.Split(data, []byte("\n"))
	if e.Line < 1 || e.Line > len(lines) {
		return
	}
	line := lines[e.Line-1]
	if indent := line[:len(line)-len(bytes.TrimLeft(line, " \t-"))]; bytes.Contains(indent, []byte("\t")) {
		e.Message = "a tab begins the line; YAML wants spaces"
	}
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
