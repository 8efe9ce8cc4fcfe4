package config

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
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

func newReading() *reading { return &reading{Config: defaultConfig(), places: places{}} }

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

// mistakeOf returns the mistake that refuses a configuration whose reading has panicked; nil: it has not.
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

// noteError notes an error of a node, for the key.
func (r *reading) noteError(key string, err error) {
	e := fromYAMLError(err)
	e.Key = key
	r.wrong = append(r.wrong, e)
}

// noteErrors notes the mistakes that are joined in err, but for those that may only follow
// from one that an earlier pass has found: one at the same key, or, for checks, in the
// same section.
func (r *reading) noteErrors(err error, checks bool) {
	earlier := r.wrong
	for _, err := range splitErrors(err) {
		var ke *keyError
		if errors.As(err, &ke) && slices.ContainsFunc(earlier,
			func(e *Error) bool { return ke.mayFollowFrom(e.Key, checks) }) {
			continue
		}
		e := r.places.locateError(err)
		same := func(other *Error) bool { return e.Key == other.Key && e.Message == other.Message }
		if !slices.ContainsFunc(r.wrong, same) {
			r.wrong = append(r.wrong, e)
		}
	}
}

// splitErrors takes joined errors apart.
func splitErrors(err error) []error {
	if err == nil {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error }) //nolint:errorlint // not what it wraps: itself
	if !ok {
		return []error{err}
	}
	var all []error
	for _, e := range joined.Unwrap() {
		all = append(all, splitErrors(e)...)
	}
	return all
}

// mayFollowFrom reports whether the mistake may come of another at that key.
func (e *keyError) mayFollowFrom(key string, sections bool) bool {
	return isWithin(key, e.key) || isWithin(e.key, key) || e.on != "" && isWithin(key, e.on) ||
		sections && sectionOf(e.key) == sectionOf(key)
}

// isWithin reports whether a key is another, or below it.
func isWithin(key, above string) bool {
	rest, ok := strings.CutPrefix(key, above)
	return ok && (above == "" || rest == "" || rest[0] == '.' || rest[0] == '[')
}

// sectionOf returns the part of a key whose values depend on each other: one element of a list, or
// two names. A name may be empty, since an unknown key may hold any bytes.
func sectionOf(key string) string {
	first, rest, more := strings.Cut(key, ".")
	if !more || strings.HasSuffix(first, "]") || first == "defaults" {
		return first
	}
	second, _, _ := strings.Cut(rest, ".")
	return first + "." + second
}

// firstMistake is the first one in the file, with its place there, and the others; nil:
// there is none.
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

// withCause says which key's mistakes may be the cause of err.
func withCause(key string, err error) error {
	var errs []error
	for _, e := range splitErrors(err) {
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

// locateError finds the place of a keyError: its own, or that of the nearest
// enclosing key where its own was left out.
func (p places) locateError(err error) *Error {
	var ke *keyError
	if !errors.As(err, &ke) {
		return &Error{Message: oneLine(err.Error())}
	}
	out := &Error{Key: ke.key, Message: oneLine(ke.message)}
	for key := ke.key; key != ""; key = parentKey(key) {
		if tk := p[key]; tk != nil {
			out.markToken(tk)
			break
		}
	}
	return out
}

func parentKey(key string) string {
	return key[:max(0, strings.LastIndexAny(key, ".["))]
}
