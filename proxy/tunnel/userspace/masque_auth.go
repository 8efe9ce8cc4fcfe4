package userspace

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"strings"

	quicgo "github.com/quic-go/quic-go"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// digest is a token's hash: the time to compare hashes depends neither on the tokens'
// lengths nor on where they differ.
type digest [sha256.Size]byte

type hashedToken struct {
	name  string
	value digest
}

func hashTokens(tokens []access.Token) ([]hashedToken, error) {
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

func namesOf(tokens []access.Token) (names []string) {
	for _, t := range tokens {
		names = append(names, t.Name)
	}
	return names
}

// findToken looks up a token. It compares with all of them, so that its time is the same.
func findToken(tokens []hashedToken, h digest) (name string, ok bool) {
	for i := range tokens {
		if subtle.ConstantTimeCompare(tokens[i].value[:], h[:]) == 1 {
			name, ok = tokens[i].name, true
		}
	}
	return name, ok
}

// identity is the client of a request.
type identity struct {
	name  string
	token digest // zero: came without one
}

var (
	errUnknown      = errors.New("a token or a certificate is needed")
	errGuessing     = fmt.Errorf("%w: too many wrong ones of this host wait for their answers", errUnknown)
	errTooManyConns = fmt.Errorf("a client may have %d connections at a time", maxConns)
)

// identify returns who a request's client is, or why it is not served. The answer to a wrong token may wait.
func (m *MASQUE) identify(r *http.Request) (who identity, err error) {
	from := clientAddr(r.RemoteAddr).Addr()
	if !m.isKnown(r) && !m.guesses.May(from) {
		m.unauthorized.Add(1)
		return identity{}, errGuessing
	}
	who, ok := m.authenticate(r)
	if ok {
		return who, m.recordClient(r, who)
	}
	if who.token != (digest{}) {
		m.unauthorized.Add(1)
		m.guesses.Wrong(r.Context(), from, authenticateWithin*9/10) // before the connection is closed
	}
	return identity{}, errUnknown
}

// isKnown reports whether the client of a request's connection has told who it is.
func (m *MASQUE) isKnown(r *http.Request) bool {
	c, _ := r.Context().Value(connKey{}).(*quicgo.Conn)
	m.mu.RLock()
	defer m.mu.RUnlock()
	state := m.conns[c]
	return state != nil && state.name != ""
}

// recordClient remembers the client of a request's connection, and the token that it has used.
func (m *MASQUE) recordClient(r *http.Request, who identity) error {
	c, _ := r.Context().Value(connKey{}).(*quicgo.Conn)
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := findToken(m.tokens, who.token); !ok && who.token != (digest{}) {
		return errUnknown // the token has just gone
	}
	state := m.conns[c]
	if state == nil {
		return nil // it has just ended
	}
	if state.rejected {
		return errUnknown
	}
	if state.name == "" {
		if m.connsPerClient[who.name] >= maxConns {
			return errTooManyConns
		}
		m.connsPerClient[who.name]++
		state.name = who.name
	}
	if who.token != (digest{}) {
		state.tokens[who.token] = true
	}
	return nil
}

// authenticate tells who r is from: by its token if it has one, in the field Authorization
// or Proxy-Authorization, else by its certificate, which TLS has verified; or by its
// address if the listener is open to everybody.
func (m *MASQUE) authenticate(r *http.Request) (identity, bool) {
	if m.cfg.Open {
		return identity{name: datapath.Host(clientAddr(r.RemoteAddr).Addr()).String()}, true
	}
	given := r.Header.Get("Authorization")
	if given == "" {
		given = r.Header.Get("Proxy-Authorization")
	}
	if given != "" {
		scheme, value, _ := strings.Cut(given, " ")
		h := digest(sha256.Sum256([]byte(strings.TrimSpace(value))))
		m.mu.RLock()
		name, ok := findToken(m.tokens, h)
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
