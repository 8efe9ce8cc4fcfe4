package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
)

// maxSaved bounds what is read of a saved configuration: the file itself and
// those that it names, in base64.
const maxSaved = 64 << 20

// saved is a configuration with all that was read for it.
type saved struct {
	Path  string            `json:"path"`  // of the configuration file
	Files map[string][]byte `json:"files"` // by path, that of the configuration among them
}

// Save writes all that was read to a file, secrets and all, that only its owner
// can read. What is there already is replaced at once, unless it is one of the
// files that were read.
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
	if err := closedToOthers(path, info); err != nil {
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
