package tunnel

import (
	"bufio"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
)

// Token lets a client of a MASQUE listener in.
type Token struct {
	Name  string // of the peer, for groups, logs and metrics
	Value string // what it sends: "Authorization: Bearer <value>"
}

// Bounds of a token: shorter ones can be guessed, longer ones do not fit a header.
const (
	minToken     = 16
	maxToken     = 4096
	maxTokenName = 64
	maxLineLen   = 2 * maxToken
)

// CheckName wants a name that a token's line in a file can begin with.
func (t Token) CheckName() error {
	odd := func(r rune) bool { return r == ' ' || !strconv.IsPrint(r) }
	if t.Name == "" || len(t.Name) > maxTokenName || t.Name[0] == '#' || strings.ContainsFunc(t.Name, odd) {
		return fmt.Errorf("a token's name has 1 to %d printable characters without spaces and does not begin with #", maxTokenName)
	}
	return nil
}

// CheckValue wants what a header can carry and nobody guesses.
func (t Token) CheckValue() error {
	odd := func(r rune) bool { return r <= ' ' || r > '~' }
	if len(t.Value) < minToken || len(t.Value) > maxToken || strings.ContainsFunc(t.Value, odd) {
		return fmt.Errorf("a token has %d to %d visible characters without spaces, such as openssl rand -hex 32 prints; this has %d bytes",
			minToken, maxToken, len(t.Value))
	}
	return nil
}

// ParseTokens reads tokens, one "name token" a line; empty lines and those that
// begin with # do not count. An error names lines and shows nothing of them: a
// name may be a token in the wrong place.
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
			return nil, fmt.Errorf("tunnel: tokens: line %d is not a name and a token", n)
		}
		t := Token{Name: fields[0], Value: fields[1]}
		if err := errors.Join(t.CheckName(), t.CheckValue()); err != nil {
			return nil, fmt.Errorf("tunnel: tokens: line %d: %w", n, err)
		}
		if other, twice := names[t.Name]; twice {
			return nil, fmt.Errorf("tunnel: tokens: lines %d and %d have the same name", other, n)
		}
		if other, twice := values[t.Value]; twice {
			return nil, fmt.Errorf("tunnel: tokens: lines %d and %d have the same token", other, n)
		}
		names[t.Name], values[t.Value] = n, n
		tokens = append(tokens, t)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("tunnel: tokens: %w", err)
	}
	return tokens, nil
}

// digest is a token's hash: comparing hashes takes a time that depends neither
// on lengths nor on where they differ.
type digest [sha256.Size]byte

type hashedToken struct {
	name  string
	value digest
}

func hashTokens(tokens []Token) ([]hashedToken, error) {
	hashed := make([]hashedToken, 0, len(tokens))
	owner := map[digest]string{}
	for _, t := range tokens {
		if err := errors.Join(t.CheckName(), t.CheckValue()); err != nil {
			return nil, fmt.Errorf("tunnel: tokens: %w", err)
		}
		h := digest(sha256.Sum256([]byte(t.Value)))
		if other, taken := owner[h]; taken {
			return nil, fmt.Errorf("tunnel: tokens: %q and %q have the same token", other, t.Name)
		}
		owner[h] = t.Name
		hashed = append(hashed, hashedToken{t.Name, h})
	}
	return hashed, nil
}

// find looks at every token, also after it found one.
func find(tokens []hashedToken, h digest) (name string, ok bool) {
	for i := range tokens {
		if subtle.ConstantTimeCompare(tokens[i].value[:], h[:]) == 1 {
			name, ok = tokens[i].name, true
		}
	}
	return name, ok
}

// identity is who asks.
type identity struct {
	name  string
	token digest // zero: came without one
}

// authenticate tells who r is from: by its token if it brings one, in the header
// for a server or the one for a proxy, else by its certificate, which TLS has
// verified; and by its address where everybody may come.
func (m *MASQUE) authenticate(r *http.Request) (identity, bool) {
	if m.cfg.Open {
		return identity{name: clientAddr(r.RemoteAddr).Addr().String()}, true
	}
	given := r.Header.Get("Authorization")
	if given == "" {
		given = r.Header.Get("Proxy-Authorization")
	}
	if given != "" {
		scheme, value, _ := strings.Cut(given, " ")
		h := digest(sha256.Sum256([]byte(strings.TrimSpace(value))))
		m.mu.RLock()
		name, ok := find(m.tokens, h)
		m.mu.RUnlock()
		return identity{name, h}, ok && strings.EqualFold(scheme, "Bearer")
	}
	name := certificateName(r.TLS)
	return identity{name: name}, name != ""
}

// certificateName is the name in a client's certificate; empty: it has shown none.
func certificateName(s *tls.ConnectionState) string {
	if s == nil || len(s.VerifiedChains) == 0 {
		return ""
	}
	c := s.PeerCertificates[0]
	switch {
	case c.Subject.CommonName != "":
		return c.Subject.CommonName
	case len(c.DNSNames) > 0:
		return c.DNSNames[0]
	case len(c.EmailAddresses) > 0:
		return c.EmailAddresses[0]
	}
	return "serial " + c.SerialNumber.String()
}
