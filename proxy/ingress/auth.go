package ingress

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"net/netip"
)

// users are the accounts of a listener, hashed so that the time to compare them depends neither on
// their lengths nor on where they differ.
type users []credential

type credential struct{ name, password [sha256.Size]byte }

func newUsers(list []User) users {
	us := make(users, 0, len(list))
	for _, u := range list {
		us = append(us, credential{sha256.Sum256([]byte(u.Name)), sha256.Sum256([]byte(u.Password))})
	}
	return us
}

// allowUser tells whether there is such an account. It looks at all of them, so that its time is the same.
func (us users) allowUser(name, password []byte) bool {
	n, p := sha256.Sum256(name), sha256.Sum256(password)
	found := 0
	for i := range us {
		found |= subtle.ConstantTimeCompare(us[i].name[:], n[:]) &
			subtle.ConstantTimeCompare(us[i].password[:], p[:])
	}
	return found == 1
}

// checkPassword says why the client at from may not use the listener. Where its password is wrong that may take
// as long as most of a handshake.
func (l *greeter) checkPassword(ctx context.Context, from netip.Addr, name, password []byte) error {
	if !l.guesses.May(from) {
		return errGuessing
	}
	if !l.users.allowUser(name, password) {
		l.guesses.Wrong(ctx, from, l.cfg.HandshakeTimeout*9/10) // so that the answer is in time
		return errWrongPassword
	}
	return nil
}
