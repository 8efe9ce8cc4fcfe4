package config

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"

	"github.com/goccy/go-yaml/ast"

	"github.com/penstock-net/penstock/proxy/config/check"
)

// Loaded is a configuration with the files that it was read from.
type Loaded struct {
	Config
	Path string // of the configuration file
	Hash string // SHA-256 of it, in hexadecimal
	// Files are the configuration and the files that it names. After an error they include those that could not be read.
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

// LoadFiles is Load that also returns which files it has read. After an error Files and Seen are set.
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

// loadData reads a configuration and the files that it names, and checks their contents like the
// configuration's own.
func loadData(data []byte, name string, from *files) (Config, *Error) {
	r := newReading()
	mistake := r.runRecovering(data, func() {
		if !r.readShape(data) {
			return
		}
		r.noteErrors(r.checkAll(), true)
		if key := inlineSecret("", reflect.ValueOf(r.Config)); key != "" {
			if err := from.checkPrivate(name); err != nil {
				r.noteErrors(check.Errorf(key, "%v, or put the secret into a file of its own", err), false)
			}
		}
		r.noteErrors(from.readInto(&r.Config), false)
		r.noteErrors(r.checkAll(), true)
	})
	return r.Config, mistake
}

// LoadAlone reads and checks a configuration file without the files that it names. Every mistake is
// an *Error.
func LoadAlone(path string) (Config, error) {
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
	data = withoutBOM(data)
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

// Validate checks a configuration again, after flags have changed it. The error is an *Error.
func (c Config) Validate() error {
	r := reading{Config: c}
	if mistake := r.runRecovering(nil, func() { r.noteErrors(c.checkAll(), true) }); mistake != nil {
		return mistake
	}
	return nil
}

// Decode reads a YAML node of another kind of file into what v points to, by its yaml
// tags and as strictly as a configuration is read; key is the node's own, empty for the
// root. data is the file, for excerpts. nil: nothing is wrong.
func Decode(data []byte, key string, node ast.Node, v any) *Error {
	r := &reading{places: places{}}
	return r.runRecovering(data, func() { r.decodeNode(key, node, reflect.ValueOf(v).Elem()) })
}

// maxSaved bounds a saved configuration, in bytes. It has the configuration file and those that it
// names in base64.
const maxSaved = 64 << 20

// saved is a configuration with all that was read for it.
type saved struct {
	Path  string            `json:"path"`  // of the configuration file
	Files map[string][]byte `json:"files"` // by path, that of the configuration among them
}

// Save writes the contents of all files that were read, secrets among them, to a file that only its
// owner can read. It replaces an earlier file atomically, and refuses to replace one of the files
// that were read.
func (l Loaded) Save(path string) (err error) {
	if there, err := os.Stat(path); err == nil {
		for name := range l.files.read {
			if info, err := os.Stat(name); err == nil && os.SameFile(there, info) {
				return fmt.Errorf("config: save the configuration: %s is what it was read from; name a file of its "+
					"own", path)
			}
		}
	}
	s := saved{Path: l.Path, Files: map[string][]byte{}}
	for name, f := range l.files.read {
		s.Files[name] = f.data
	}
	text, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("config: save the configuration: %w", err)
	}
	f, err := CreateTemporary(path)
	if err != nil {
		return fmt.Errorf("config: save the configuration: %w", err)
	}
	_, err = f.Write(text)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("config: save the configuration: %w", errors.Join(err, os.Remove(f.Name())))
	}
	return nil
}

// LoadSaved is LoadFiles for what Save wrote, of the same configuration file.
func LoadSaved(path, config string) (Loaded, error) {
	f, info, err := OpenRegular(path)
	if err != nil {
		return Loaded{}, err
	}
	defer f.Close() //nolint:errcheck // nothing was written
	if info.Size() > maxSaved {
		return Loaded{}, fmt.Errorf("%s is no saved configuration", path)
	}
	if err := checkClosedToOthers(path, info); err != nil {
		return Loaded{}, err
	}
	var s saved
	if err := json.NewDecoder(io.LimitReader(f, maxSaved)).Decode(&s); err != nil {
		return Loaded{}, fmt.Errorf("%s is no saved configuration: %w", path, err)
	}
	if s.Path != config {
		return Loaded{}, fmt.Errorf("%s is of %q, another file", path, s.Path)
	}
	from := newFiles(config)
	from.saved = true
	for name, data := range s.Files {
		from.read[name] = file{data: data}
	}
	return from.loadFile(config)
}
