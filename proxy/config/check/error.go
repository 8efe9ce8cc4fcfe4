// Package check has errors that name a key of the configuration, and the checks that several sections share. Sections
// have a method Validate, which returns errors with keys relative to the section. Package config prefixes them with
// the section's own key, and finds the place in the file.
package check

import (
	"errors"
	"fmt"
)

// Error is a mistake in the value of a key.
type Error struct {
	Key     string // path below the value that was validated, such as peers[0].name; empty: the value itself
	Message string // what is wrong and its cure
	Other   string // another key, relative like Key, with which the message ends; empty: none
	Cause   string // key of the whole configuration that may be the cause of this one; empty: none is known
}

// Error implements error.
func (e *Error) Error() string { return e.Key + ": " + e.Text() }

// Text returns the whole message without the key.
func (e *Error) Text() string { return e.Message + e.Other }

// Errorf returns an *Error about a key.
func Errorf(key, format string, args ...any) error {
	return &Error{Key: key, Message: fmt.Sprintf(format, args...)}
}

// Within returns err with the keys of its Errors below key.
func Within(key string, err error) error {
	return mapErrors(err, func(e Error) Error {
		e.Key = below(key, e.Key)
		if e.Other != "" {
			e.Other = below(key, e.Other)
		}
		return e
	})
}

// below returns the path of a key that is relative to another.
func below(key, relative string) string {
	if relative == "" || relative[0] == '[' || key == "" {
		return key + relative
	}
	return key + "." + relative
}

// CausedBy returns err with a key that may be the cause of its Errors. They are not shown if that key has a mistake.
func CausedBy(key string, err error) error {
	return mapErrors(err, func(e Error) Error { e.Cause = key; return e })
}

// mapErrors replaces each *Error in err.
func mapErrors(err error, change func(Error) Error) error {
	var errs []error
	for _, e := range Split(err) {
		var ours *Error
		if errors.As(e, &ours) {
			changed := change(*ours)
			e = &changed
		}
		errs = append(errs, e)
	}
	return errors.Join(errs...)
}

// Split returns the errors that errors.Join has joined, however deep; none where err is nil.
func Split(err error) []error {
	if err == nil {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error }) //nolint:errorlint // not what it wraps: itself
	if !ok {
		return []error{err}
	}
	var all []error
	for _, e := range joined.Unwrap() {
		all = append(all, Split(e)...)
	}
	return all
}

// Files are the files that a configuration names.
type Files interface {
	// Read returns the content of a file; name may be relative to the configuration. A file with secrets is refused
	// where others may read it. Errors name the file and wrap those of package os.
	Read(name string, secret bool) (string, error)
	// Path returns the file's path for messages.
	Path(name string) string
}

// PEMBegin begins a block of PEM.
const PEMBegin = "-----BEGIN "
