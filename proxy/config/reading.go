package config

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/token"
)

// reading is a configuration that is being read, with what is wrong with it.
type reading struct {
	Config
	places places
	wrong  []*Error
}

// blame notes an error of a node, for the key.
func (r *reading) blame(key string, err error) {
	e := positioned(err)
	e.Key = key
	r.wrong = append(r.wrong, e)
}

// pass notes the mistakes that are joined in err, but for those that may only follow
// from one that an earlier pass has found: one at the same key, or, for checks, in the
// same section.
func (r *reading) pass(err error, checks bool) {
	earlier := r.wrong
	for _, err := range separate(err) {
		var ke *keyError
		if errors.As(err, &ke) && slices.ContainsFunc(earlier,
			func(e *Error) bool { return ke.follows(e.Key, checks) }) {
			continue
		}
		e := r.places.locate(err)
		same := func(other *Error) bool { return e.Key == other.Key && e.Message == other.Message }
		if !slices.ContainsFunc(r.wrong, same) {
			r.wrong = append(r.wrong, e)
		}
	}
}

// separate takes joined errors apart.
func separate(err error) []error {
	if err == nil {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error }) //nolint:errorlint // not what it wraps: itself
	if !ok {
		return []error{err}
	}
	var all []error
	for _, e := range joined.Unwrap() {
		all = append(all, separate(e)...)
	}
	return all
}

// follows reports whether the mistake may come of another at that key.
func (e *keyError) follows(key string, sections bool) bool {
	return within(key, e.key) || within(e.key, key) || e.on != "" && within(key, e.on) ||
		sections && section(e.key) == section(key)
}

// within reports whether a key is another, or below it.
func within(key, above string) bool {
	rest, ok := strings.CutPrefix(key, above)
	return ok && (above == "" || rest == "" || rest[0] == '.' || rest[0] == '[')
}

// section is the part of a key whose values depend on each other: one element of a list, or
// two names.
func section(key string) string {
	end := strings.IndexByte(key, '.')
	if end < 0 {
		return key
	}
	if key[end-1] == ']' || key[:end] == "defaults" {
		return key[:end]
	}
	if next := strings.IndexByte(key[end+1:], '.'); next >= 0 {
		return key[:end+1+next]
	}
	return key
}

// mistake is the first one in the file, with its place there, and the others; nil:
// there is none.
func (r *reading) mistake(data []byte) *Error {
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
		first.Excerpt = excerpt(data, first.Line, first.Column)
	}
	others := r.wrong[1:]
	first.Untold = max(0, len(others)-maxOthers)
	first.Others = others[:len(others)-first.Untold]
	return first
}

// keyError is a mistake found after parsing, by the path of its key.
type keyError struct {
	key, message string
	on           string // a key whose mistakes may be the cause; empty: none is known
}

func (e *keyError) Error() string { return e.key + ": " + e.message }

func keyErrorf(key, format string, args ...any) error {
	return &keyError{key: key, message: fmt.Sprintf(format, args...)}
}

// because says which key's mistakes may be the cause of err.
func because(key string, err error) error {
	var errs []error
	for _, e := range separate(err) {
		var ke *keyError
		if errors.As(e, &ke) {
			e = &keyError{ke.key, ke.message, key}
		}
		errs = append(errs, e)
	}
	return errors.Join(errs...)
}

// places are the tokens of the values that were given, by path.
type places map[string]*token.Token

// locate finds the place of a keyError: its own, or that of the nearest
// enclosing key where its own was left out.
func (p places) locate(err error) *Error {
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

func parent(key string) string {
	return key[:max(0, strings.LastIndexAny(key, ".["))]
}
