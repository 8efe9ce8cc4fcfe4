package access

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// Token lets a client of a MASQUE listener in.
type Token struct {
	// For groups and logs: 1 to 64 printable characters, no spaces.
	Name string `yaml:"name" required:"yes"`
	// 16 to 4096 visible characters without spaces.
	Value string `yaml:"token" required:"yes" secret:"true"`
}

// Bounds of a token: shorter ones can be guessed, longer ones do not fit a header.
const (
	minToken     = 16
	maxToken     = 4096
	maxTokenName = 64
	maxLineLen   = 2 * maxToken
)

// CheckName checks that the name can begin a token's line in a file.
func (t Token) CheckName() error {
	odd := func(r rune) bool { return r == ' ' || !strconv.IsPrint(r) }
	if t.Name == "" || len(t.Name) > maxTokenName || t.Name[0] == '#' || strings.ContainsFunc(t.Name, odd) {
		return fmt.Errorf("a token's name has 1 to %d printable characters without spaces and does not begin with #",
			maxTokenName)
	}
	return nil
}

// CheckValue checks that a header can carry the token, and that it is too long to be guessed.
func (t Token) CheckValue() error {
	odd := func(r rune) bool { return r <= ' ' || r > '~' }
	if len(t.Value) < minToken || len(t.Value) > maxToken || strings.ContainsFunc(t.Value, odd) {
		return fmt.Errorf("a token has %d to %d visible characters without spaces, such as openssl rand -hex 32 "+
			"prints; this has %d bytes", minToken, maxToken, len(t.Value))
	}
	return nil
}

// ParseTokens reads tokens, one "name token" a line. It skips empty lines and those that begin with #. An error has
// the numbers of lines and none of their text, because a name may be a token in the wrong place.
func ParseTokens(r io.Reader) ([]Token, error) {
	var tokens []Token
	names, values := map[string]int{}, map[string]int{}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxLineLen)
	for n := 1; lines.Scan(); n++ {
		fields := strings.Fields(lines.Text())
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") {
			continue
		}
		if len(fields) != 2 {
			return nil, fmt.Errorf("tokens: line %d is not a name and a token, with a space between them", n)
		}
		t := Token{Name: fields[0], Value: fields[1]}
		if err := errors.Join(t.CheckName(), t.CheckValue()); err != nil {
			return nil, fmt.Errorf("tokens: line %d: %w", n, err)
		}
		if other, twice := names[t.Name]; twice {
			return nil, fmt.Errorf("tokens: lines %d and %d have the same name", other, n)
		}
		if other, twice := values[t.Value]; twice {
			return nil, fmt.Errorf("tokens: lines %d and %d have the same token", other, n)
		}
		names[t.Name], values[t.Value] = n, n
		tokens = append(tokens, t)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("tokens: %w", err)
	}
	return tokens, nil
}
