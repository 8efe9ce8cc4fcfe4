package telemetry

import (
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"strings"
	"sync"
)

// token is a secret that requests carry (RFC 6750). The zero value is none. It is safe
// for concurrent use.
type token struct {
	mu    sync.Mutex
	sum   [sha256.Size]byte // of the token, if there is one
	given bool
}

// set replaces it; empty: there is none.
func (t *token) set(secret string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sum, t.given = sha256.Sum256([]byte(secret)), secret != ""
}

// carried reports whether there is a token, and whether r has it.
func (t *token) carried(r *http.Request) (given, carried bool) {
	t.mu.Lock()
	want, given := t.sum, t.given
	t.mu.Unlock()
	scheme, secret, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	got := sha256.Sum256([]byte(strings.TrimSpace(secret))) // as long as the other, whatever was sent
	same := subtle.ConstantTimeCompare(got[:], want[:]) == 1
	return given, given && same && strings.EqualFold(scheme, "Bearer")
}
