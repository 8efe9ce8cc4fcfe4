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

	Others   []*Error // further mistakes of the file, without excerpts, at most maxOthers
	Unlisted int      // number of mistakes beyond Others
}

// maxOthers bounds how many mistakes are reported besides the first.
const maxOthers = 19

// Error returns the first mistake alone, in one line.
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

// Rest returns a line for each mistake behind the first one, which err.Error returns. For an error
// of another type there are none.
func Rest(err error) (lines []string) {
	var e *Error
	if !errors.As(err, &e) {
		return nil
	}
	for _, other := range e.Others {
		lines = append(lines, other.Error())
	}
	if e.Unlisted > 0 {
		lines = append(lines, fmt.Sprintf("and %d more", e.Unlisted))
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

// setPlace sets Line and Column to those of a token.
func (e *Error) setPlace(tk *token.Token) {
	if tk != nil && tk.Position != nil {
		e.Line, e.Column = tk.Position.Line, tk.Position.Column
	}
}

// Printable returns s with escapes in place of characters that a terminal would act on. The ends of
// lines and tabs stay.
func Printable(s string) string { return escapeControls(s, true) }

// escapeControls escapes characters that are not printable. lines: ends of lines and tabs stay.
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
