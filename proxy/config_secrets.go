package proxy

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

// checkToken wants what a header can carry and nobody guesses.
func checkToken(key, token string) error {
	if len(token) < 16 || len(token) > 255 || strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return keyErrorf(key, "a token is 16 to 255 visible characters without spaces, such as openssl rand -hex 16 prints; this has %d bytes", len(token))
	}
	return nil
}

// firstLine returns the first line of a file, relative to dir.
func firstLine(key, dir, path string) (string, error) {
	data, err := os.ReadFile(inDir(dir, path))
	if err != nil {
		return "", keyErrorf(key, "%v", errors.Unwrap(err))
	}
	first, _, _ := strings.Cut(string(data), "\n")
	return strings.TrimSuffix(first, "\r"), nil
}

// readSecrets puts secrets where the names of their files, relative to dir, were.
func (c *Config) readSecrets(dir string) error {
	if h := &c.Telemetry.Hints; h.TokenFile != "" {
		const key = "telemetry.hints.token_file"
		token, err := firstLine(key, dir, h.TokenFile)
		if err == nil {
			err = checkToken(key, token)
		}
		if err != nil {
			return err
		}
		h.Token, h.TokenFile = token, ""
	}
	for i, l := range c.Listeners {
		if err := c.Listeners[i].readTunnelFiles(fmt.Sprintf("listeners[%d]", i), dir); err != nil {
			return err
		}
		for j := range l.Users {
			u := &c.Listeners[i].Users[j]
			if u.PasswordFile == "" {
				continue
			}
			key := fmt.Sprintf("listeners[%d].users[%d].password_file", i, j)
			var err error
			if u.Password, err = firstLine(key, dir, u.PasswordFile); err != nil {
				return err
			}
			u.PasswordFile = ""
			if len(u.Password) < 1 || len(u.Password) > 255 {
				return keyErrorf(key, "the first line has %d bytes; a password has 1 to 255", len(u.Password))
			}
		}
	}
	return nil
}
