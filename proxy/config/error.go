package config

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

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

// maxOthers bounds how many mistakes are reported besides the first.
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

// setFile names the file of the mistakes.
func (e *Error) setFile(path string) *Error {
	e.File = path
	for _, other := range e.Others {
		other.File = path
	}
	return e
}

// markToken takes over the place of a token.
func (e *Error) markToken(tk *token.Token) {
	if tk != nil && tk.Position != nil {
		e.Line, e.Column = tk.Position.Line, tk.Position.Column
	}
}

// Printable returns s with everything that a terminal would act on written as an
// escape. The ends of lines and tabs stay.
func Printable(s string) string { return escapeControls(s, true) }

// escapeControls escapes what is not printable. With lines, ends of lines and tabs stay.
func escapeControls(s string, lines bool) string {
	fine := func(r rune) bool {
		return unicode.IsPrint(r) && r != utf8.RuneError || lines && (r == '\n' || r == '\t')
	}
	if !strings.ContainsFunc(s, func(r rune) bool { return !fine(r) }) {
		return s
	}
	var out strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		if fine(r) {
			out.WriteString(s[:n])
		} else {
			quoted := strconv.QuoteToASCII(s[:n])
			out.WriteString(quoted[1 : len(quoted)-1])
		}
		s = s[n:]
	}
	return out.String()
}

// oneLine joins the lines of a message, so that each mistake has one.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
