package telemetry

import (
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"strings"
	"sync/atomic"
)

// token is a secret that requests carry (RFC 6750). The zero value accepts no request. It is safe for concurrent use.
type token struct {
	sum atomic.Pointer[[sha256.Size]byte]
}

// setSecret replaces the token; empty: there is none. Only its hash is kept: hashes have one length, so that
// comparing takes the same time for every guess.
func (t *token) setSecret(secret string) {
	var sum *[sha256.Size]byte
	if secret != "" {
		sum = new(sha256.Sum256([]byte(secret)))
	}
	t.sum.Store(sum)
}

// isSet reports whether there is a token.
func (t *token) isSet() bool { return t.sum.Load() != nil }

// carriedBy reports whether there is a token, and whether r has it.
func (t *token) carriedBy(r *http.Request) (given, carried bool) {
	want := t.sum.Load()
	if want == nil {
		return false, false
	}
	scheme, secret, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	got := sha256.Sum256([]byte(strings.TrimSpace(secret)))
	return true, subtle.ConstantTimeCompare(got[:], want[:]) == 1 && strings.EqualFold(scheme, "Bearer")
}
