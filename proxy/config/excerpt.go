package config

import (
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/penstock-net/penstock/cc"
)

const (
	around    = 3   // lines shown before and after the one with the mistake
	maxLine   = 120 // characters shown of a line
	hidden    = "***"
	cutMark   = "…"
	neverEnds = math.MaxInt
)

// makeExcerpt shows a place in a configuration and the lines around it, with nothing
// that may be a secret, whether or not the text is a configuration at all.
func makeExcerpt(data []byte, line, column int) string {
	text := strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(string(data))
	var out strings.Builder
	hide := newHider()
	n := 0
	for s := range strings.Lines(text) {
		n++
		s = hide.visibleLine(strings.TrimSuffix(s, "\n"))
		if n > line+around {
			break
		}
		if n < line-around {
			continue
		}
		mark, at := ' ', 0
		if n == line {
			mark, at = '>', min(max(1, column), utf8.RuneCountInString(s)+1)
		}
		s, at = lineWindow(s, at)
		fmt.Fprintf(&out, "%c%3d | %s\n", mark, n, s)
		if at > 0 {
			fmt.Fprintf(&out, "%*s^\n", len(">  1 | ")+at-1, "")
		}
	}
	return out.String()
}

// lineWindow makes a line printable and cuts it to what is around the character at,
// from 1; 0: its beginning. It returns where that character is then.
func lineWindow(s string, at int) (string, int) {
	runes := []rune(s)
	from := 0
	if len(runes) > maxLine && at > maxLine/2 {
		from = min(at-maxLine/2, len(runes)-maxLine/2)
	}
	to := min(len(runes), from+maxLine)
	before, after := "", ""
	if from > 0 {
		before = cutMark
	}
	if to < len(runes) {
		after = cutMark
	}
	if at > 0 {
		at = utf8.RuneCountInString(before+escapeControls(string(runes[from:min(at-1, to)]), false)) + 1
	}
	return before + escapeControls(string(runes[from:to]), false) + after, at
}

// secrecy is what is known of the value of a key.
type secrecy int

const (
	secret secrecy = iota // or not known
	holder                // keys below it have secrets, so that what stands there without a key may be one
	open                  // no secret
)

// keySecrecy has the keys of the configuration, wherever they stand; what is not
// in it may be the name of a secret that is spelt wrong.
var keySecrecy = func() map[string]secrecy {
	known := map[string]secrecy{}
	addSecrecy(known, reflect.TypeFor[Config]())
	return known
}()

func addSecrecy(known map[string]secrecy, t reflect.Type) {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if t.Kind() == reflect.Map {
		for _, spec := range cc.Specs() {
			for _, p := range spec.Params {
				addKnown(known, p.Name, open)
			}
		}
	}
	if t.Kind() != reflect.Struct {
		return
	}
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		switch {
		case name == "":
		case f.Tag.Get("secret") != "":
			addKnown(known, name, secret)
		case hasSecrets(f.Type, true):
			addKnown(known, name, holder)
		default:
			addKnown(known, name, open)
		}
		addSecrecy(known, f.Type)
	}
}

// secrecyOf is what a key tells of its value. One that does not exist counts as the
// key that it misses by a letter; its value may be a secret where there is none.
func secrecyOf(key string) secrecy {
	if s, known := keySecrecy[key]; known {
		return s
	}
	least, found := open, false
	if len(key) <= 2 { // a letter from many a key
		return secret
	}
	for other, s := range keySecrecy {
		if len(other) >= len(key)-1 && len(other) <= len(key)+1 && cc.EditDistance(key, other) <= 1 {
			least, found = min(least, s), true
		}
	}
	if !found {
		return secret
	}
	return least
}

// addKnown notes a key; of two with one name the one with secrets counts.
func addKnown(known map[string]secrecy, name string, s secrecy) {
	if before, ok := known[name]; !ok || s < before {
		known[name] = s
	}
}

// hider takes the values that may be secrets out of the lines of a configuration,
// one after the other. It goes by the keys in the text, so that it works where
// the text is no YAML.
type hider struct {
	last   secrecy // of the key before
	valued bool    // that has a value in its line, without quotes: a line below that has no key goes on with it
	column int     // what is indented further belongs to a hidden value
	quote  byte    // the quotation mark that ends a hidden value; 0: it has none
}

func newHider() *hider { return &hider{last: secret, column: neverEnds} }

// visibleLine returns the line up to where a value is hidden.
func (h *hider) visibleLine(s string) string {
	indent := len(s) - len(strings.TrimLeft(s, " \t"))
	switch {
	case indent == len(s):
		return s
	case h.quote != 0:
		if endOfQuote(s, h.quote) {
			h.quote = 0
		}
		return s[:indent] + hidden
	case h.last == secret && indent > h.column, h.valued && s[indent] != '#' && nextColon(s, 0) < 0:
		return s[:indent] + hidden
	}
	// What is before the first key belongs to the key of a line before.
	from := 0
	for {
		colon := nextColon(s, from)
		begin, end := from, len(s)
		if colon >= 0 {
			end = keyBegin(s, from, colon)
		}
		if cut := h.visibleEnd(s, begin, end); cut < end {
			return s[:cut] + hidden
		}
		if colon < 0 {
			return s
		}
		key := strings.Trim(strings.TrimSpace(s[end:colon]), `"'`)
		h.last = secrecyOf(key)
		h.column, h.quote = neverEnds, 0
		from = colon + 1
		value := strings.TrimSpace(s[from:])
		if h.last == open && strings.HasSuffix(key, "_file") && (valueContinues(value) || mayBeSecret(firstWord(value))) {
			h.last = secret
		}
		h.valued = value != "" && !strings.ContainsAny(value[:1], "#[{|>\"'")
		if h.last == secret {
			h.column = indent
			if strings.Trim(s[:end], " \t-?") == "" { // the key begins the line: a block's
				h.column = end
			}
			if value != "" && (value[0] == '"' || value[0] == '\'') && !endOfQuote(value[1:], value[0]) {
				h.quote = value[0]
			}
			if value == "" {
				return s
			}
			return s[:from] + " " + hidden
		}
	}
}

// valueContinues reports whether the lines below may have the value, or a tag or an anchor is before it.
func valueContinues(value string) bool { return value == "" || strings.ContainsAny(value[:1], "|>!&#") }

// firstWord is the first of a value, without quotation marks.
func firstWord(value string) string {
	words := strings.FieldsFunc(value, func(r rune) bool { return strings.ContainsRune("\"' ,]}", r) })
	if len(words) == 0 {
		return ""
	}
	return words[0]
}

// visibleEnd returns where in s, from begin to end, what is shown ends.
func (h *hider) visibleEnd(s string, begin, end int) int {
	if i := commentStart(s[begin:end]); i >= 0 {
		end = begin + i
	}
	if h.last == open {
		return begin + strayKey(s[begin:end])
	}
	if i := strings.IndexFunc(s[begin:end], func(r rune) bool {
		return !strings.ContainsRune(" \t-?[]{},|>",
			r)
	}); i >= 0 {
		return begin + i
	}
	return end
}

// strayKey returns where the first word ends that is the key of a secret without a
// colon, as in "password = x"; the length of s: there is none.
func strayKey(s string) int {
	for i := 0; i < len(s); {
		n := strings.IndexAny(s[i:], " \t=,:{}[]\"'")
		if n < 0 {
			n = len(s) - i
		}
		known, ok := keySecrecy[strings.ToLower(s[i:i+n])]
		assigned := strings.HasPrefix(strings.TrimLeft(s[i+n:], " \t"), "=")
		if ok && known == secret || assigned && secrecyOf(s[i:i+n]) != open {
			return i + n
		}
		i += n + 1
	}
	return len(s)
}

// commentStart returns where a comment begins; -1: there is none.
func commentStart(s string) int {
	for i := range len(s) {
		if s[i] == '#' && (i == 0 || s[i-1] == ' ' || s[i-1] == '\t') {
			return i
		}
	}
	return -1
}

// nextColon returns the colon of the next key from there on; -1: there is none.
// Without a space behind it only a colon after a known key counts.
func nextColon(s string, from int) int {
	for i := from; i < len(s); i++ {
		if s[i] != ':' {
			continue
		}
		key := strings.ToLower(strings.Trim(strings.TrimSpace(s[keyBegin(s, from, i):i]), `"'`))
		if known, ok := keySecrecy[key]; endsKey(s, i) || ok && known == secret {
			return i
		}
	}
	return -1
}

// endsKey reports whether what follows the colon shows that it ends a key.
func endsKey(s string, colon int) bool {
	return colon+1 == len(s) || strings.IndexByte(" \t\"'[{|>", s[colon+1]) >= 0
}

// keyBegin returns where the key that ends with the colon begins.
func keyBegin(s string, from, colon int) int {
	begin := from
	for i := from; i < colon; i++ {
		if strings.IndexByte("{[,", s[i]) >= 0 || s[i] == '-' && i+1 < colon && s[i+1] == ' ' &&
			strings.Trim(s[:i], " \t-") == "" {
			begin = i + 1
		}
	}
	return begin + len(s[begin:colon]) - len(strings.TrimLeft(s[begin:colon], " \t"))
}

// endOfQuote reports whether a quoted text ends in s.
func endOfQuote(s string, quote byte) bool {
	for i := 0; i < len(s); i++ {
		switch {
		case s[i] == '\\' && quote == '"':
			i++
		case s[i] == quote && quote == '\'' && i+1 < len(s) && s[i+1] == quote:
			i++
		case s[i] == quote:
			return true
		}
	}
	return false
}

// Printable returns s with everything that a terminal would act on written as an
// escape. The ends of lines and tabs stay.
func Printable(s string) string { return escapeControls(s, true) }

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
