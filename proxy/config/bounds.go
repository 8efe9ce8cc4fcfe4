package config

import (
	"bytes"
	"fmt"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/token"
)

// Bounds of a configuration. The YAML parser takes memory and time that grow with
// the square of these.
const (
	// maxFile bounds the configuration and each file that it names, in bytes.
	maxFile  = 1 << 20
	maxDepth = 32    // of lists and mappings in each other
	maxKeys  = 1024  // of one mapping
	maxItems = 65536 // of one list
)

// level is a list or a mapping that is still open.
type level struct {
	flow   bool // in brackets or braces
	list   bool
	column int // where a block's keys or dashes stand
	count  int // of its keys or items
}

// checkBounds refuses a file that would take the parser long. It reads only tokens.
func checkBounds(data []byte) error {
	if bytes.HasPrefix(data, []byte("%")) || bytes.Contains(data, []byte("\n%")) {
		return &Error{Message: "a line begins with %; YAML directives are not supported"}
	}
	var open []level
	for _, tk := range lexer.Tokenize(string(data)) {
		if open = nestingAfter(open, tk); len(open) == 0 {
			continue
		}
		top := open[len(open)-1]
		most := maxKeys
		if top.list {
			most = maxItems
		}
		switch {
		case len(open) > maxDepth:
			return boundError(tk, "more than %d lists and keys within each other", maxDepth)
		case top.count > most:
			return boundError(tk, "more than %d entries in one place", most)
		}
	}
	return nil
}

// boundError returns the error about a bound that a token exceeds.
func boundError(tk *token.Token, format string, most int) error {
	return &yaml.SyntaxError{Message: fmt.Sprintf(format+"; the configuration has far fewer", most), Token: tk}
}

// nestingAfter returns the levels that are open behind the token tk.
func nestingAfter(open []level, tk *token.Token) []level {
	inFlow := len(open) > 0 && open[len(open)-1].flow
	switch tk.Type {
	case token.SequenceStartType, token.MappingStartType:
		return append(open, level{flow: true, list: tk.Type == token.SequenceStartType})
	case token.SequenceEndType, token.MappingEndType:
		if inFlow {
			return open[:len(open)-1]
		}
	case token.CollectEntryType: // a comma
		if inFlow {
			open[len(open)-1].count++
		}
	case token.DocumentHeaderType, token.DocumentEndType:
		return open[:0]
	case token.SequenceEntryType, token.MappingKeyType:
		if !inFlow {
			return openBlock(open, tk, tk.Type == token.SequenceEntryType)
		}
	case token.MappingValueType: // a colon; its key stands before it
		if !inFlow && tk.Prev != nil {
			return openBlock(open, tk.Prev, false)
		}
	}
	return open
}

// openBlock closes the blocks that end before tk, which is the first token of an entry. It opens a
// block for the entry, unless that belongs to one that is open.
func openBlock(open []level, tk *token.Token, list bool) []level {
	column := tk.Position.Column
	for len(open) > 0 {
		top := &open[len(open)-1]
		if top.flow || top.column < column || top.column == column && list && !top.list {
			break
		}
		if top.column == column && top.list == list {
			top.count++
			return open
		}
		open = open[:len(open)-1]
	}
	return append(open, level{list: list, column: column, count: 1})
}
