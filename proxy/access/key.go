package access

import (
	"crypto/ecdh"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"strings"
)

// Key is a WireGuard key: private, public or shared beforehand.
type Key [32]byte

// ParseKey reads a key as wg writes it: 44 characters of base64.
func ParseKey(s string) (Key, error) {
	b, err := base64.StdEncoding.Strict().DecodeString(strings.TrimSpace(s))
	if err != nil || len(b) != len(Key{}) {
		return Key{}, fmt.Errorf("this is no key: wg genkey writes 44 characters that end in =")
	}
	return Key(b), nil
}

// GenerateKey returns a new private key.
func GenerateKey() (Key, error) {
	k, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		return Key{}, fmt.Errorf("access: generate a key: %w", err)
	}
	b := Key(k.Bytes())
	b[0] &= 248 // clamped, as wg genkey's are (RFC 7748 §5)
	b[31] = b[31]&127 | 64
	return b, nil
}

// Public returns the public key of a private one.
func (k Key) Public() (Key, error) {
	private, err := ecdh.X25519().NewPrivateKey(k[:])
	if err != nil {
		return Key{}, fmt.Errorf("access: private key: %w", err)
	}
	return Key(private.PublicKey().Bytes()), nil
}

// String writes the key so that ParseKey reads it.
func (k Key) String() string { return base64.StdEncoding.EncodeToString(k[:]) }

// Short returns the first 8 characters of the key, for people.
func (k Key) Short() string { return k.String()[:8] }

// Hex returns the key in the form of WireGuard's configuration protocol.
func (k Key) Hex() string { return hex.EncodeToString(k[:]) }
