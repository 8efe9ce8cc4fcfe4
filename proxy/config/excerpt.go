package config

import (
	"fmt"
	"reflect"
	"regexp"
	"strings"
	"unicode/utf8"
)

const (
	around  = 3     // lines shown before and after the one with the mistake
	maxLine = 120   // characters shown of a line
	hidden  = "***" // in place of a secret
	cutMark = "…"   // in place of the rest of a line or value
)

// makeExcerpt returns a place in a configuration and the lines around it, without the values of secret keys.
func makeExcerpt(data []byte, line, column int) string {
	text := strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(string(data))
	var out strings.Builder
	n := 0
	for s := range strings.Lines(maskSecrets(text)) {
		n++
		s = strings.TrimSuffix(s, "\n")
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

// lineWindow makes a line printable and cuts it to the part around the character at, from 1; 0: to
// its beginning. It returns the position of that character in the part.
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

// maskedKey matches a key marked as a secret, or one that names a file of a secret, up to its value.
var maskedKey = func() *regexp.Regexp {
	var names []string
	seen := map[reflect.Type]bool{}
	var visit func(reflect.Type)
	visit = func(t reflect.Type) {
		for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
			t = t.Elem()
		}
		if t.Kind() != reflect.Struct || seen[t] {
			return
		}
		seen[t] = true
		for f := range t.Fields() {
			if name := f.Tag.Get("yaml"); f.Tag.Get("secret") != "" {
				names = append(names, name, name+"_file")
			}
			visit(f.Type)
		}
	}
	visit(configType)
	return regexp.MustCompile(`(?i)\b(` + strings.Join(names, "|") + `)\b["']?\s*[:=][ \t]*`)
}()

// maskSecrets replaces the values of secret keys. It searches for the keys, since text may be no valid YAML. The
// number of lines stays.
func maskSecrets(text string) string {
	var out strings.Builder
	shown := 0 // text before this has been written
	for {
		at := maskedKey.FindStringIndex(text[shown:])
		if at == nil {
			return out.String() + text[shown:]
		}
		key, value := shown+at[0], shown+at[1]
		end := valueEnd(text, key, value)
		if out.WriteString(text[shown:value]); strings.TrimSpace(text[value:end]) != "" {
			out.WriteString(hidden)
		}
		out.WriteString(strings.Repeat("\n", strings.Count(text[value:end], "\n")))
		shown = end
	}
}

// valueEnd returns where the value ends that begins at value in text: with its line, or with the last of the lines
// below it that are indented further than its key. A quoted value ends after its closing quotation mark at least.
func valueEnd(text string, key, value int) int {
	lineStart := strings.LastIndexByte(text[:key], '\n') + 1
	column := key - lineStart
	if before := text[lineStart:key]; strings.Trim(before, " \t-?\"'") != "" { // the key does not begin a block
		column = len(before) - len(strings.TrimLeft(before, " \t"))
	}
	end := value
	if m := quotedValue.FindString(text[value:]); m != "" {
		end += len(m)
	}
	if m := restOfLine.FindString(text[end:]); m != "" {
		end += len(m)
	}
	for end < len(text) {
		line, _, _ := strings.Cut(text[end+1:], "\n")
		if indent := len(line) - len(strings.TrimLeft(line, " \t")); indent <= column && indent < len(line) {
			break
		}
		end += 1 + len(line)
	}
	return end
}

// quotedValue matches a value in quotation marks, which may begin in a line below its key and may lack its end.
var (
	quotedValue = regexp.MustCompile(`^\s*("(\\[\s\S]|[^"\\])*("|$)|'(''|[^'])*('|$))`)
	restOfLine  = regexp.MustCompile(`^[^\n]*`)
)
