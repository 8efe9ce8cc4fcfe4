package mobile

import (
	"bytes"
	"io"
)

// ReadGreeting reads what an app asks for.
func ReadGreeting(asks []byte) (destination string, err error) {
	g, err := readGreeting(struct {
		io.Reader
		io.Writer
	}{bytes.NewReader(asks), io.Discard})
	if err != nil {
		return "", err
	}
	return g.destination, nil
}
