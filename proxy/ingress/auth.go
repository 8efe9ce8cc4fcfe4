package ingress

import (
	"crypto/sha256"
	"crypto/subtle"
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

// allow tells whether there is such an account. It looks at all of them, so that its time is the same.
func (us users) allow(name, password []byte) bool {
	n, p := sha256.Sum256(name), sha256.Sum256(password)
	found := 0
	for i := range us {
		found |= subtle.ConstantTimeCompare(us[i].name[:], n[:]) &
			subtle.ConstantTimeCompare(us[i].password[:], p[:])
	}
	return found == 1
}
