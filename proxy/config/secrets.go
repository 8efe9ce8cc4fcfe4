package config

import (
	"fmt"
	"reflect"
	"strings"
)

// A field with the tag secret:"true" holds what nobody else may see: its value
// is kept out of messages. A field with secret:"pem" holds that or the name of a file.

// inlineSecret returns the key of a secret that stands in the configuration
// itself; empty: there is none.
func inlineSecret(key string, v reflect.Value) string {
	for at, f := range fieldsIn(key, v) {
		switch f.Tag.Get("secret") {
		case "true":
			if !f.value.IsZero() {
				return at
			}
		case "pem":
			if strings.HasPrefix(f.value.String(), pemBegin) {
				return at
			}
		}
	}
	return ""
}

// hasSecrets reports whether values of the type are, or directly hold, secrets;
// deep: or hold them anywhere. What is written in the place of one may be one.
func hasSecrets(t reflect.Type, deep bool) bool {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return false
	}
	for f := range t.Fields() {
		if f.Tag.Get("secret") != "" || deep && hasSecrets(f.Type, deep) {
			return true
		}
	}
	return false
}

// checkToken wants what a header can carry and nobody guesses.
func checkToken(key, token string) error {
	if len(token) < 16 || len(token) > 255 || strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return keyErrorf(key, "a token is 16 to 255 visible characters without spaces, such as openssl rand -hex 16 prints; this has %d bytes", len(token))
	}
	return nil
}

// readSecrets puts secrets where the names of their files were.
func (c *Config) readSecrets(from *files) error {
	if h := &c.Telemetry.Hints; h.TokenFile != "" {
		const key = "telemetry.hints.token_file"
		token, err := from.firstLine(key, h.TokenFile)
		if err == nil {
			err = checkToken(key, token)
		}
		if err != nil {
			return err
		}
		h.Token, h.TokenFile = token, ""
	}
	for i := range c.Agents {
		if err := c.Agents[i].readFiles(fmt.Sprintf("agents[%d]", i), from); err != nil {
			return err
		}
	}
	for i, l := range c.Listeners {
		if err := c.Listeners[i].readTunnelFiles(fmt.Sprintf("listeners[%d]", i), from); err != nil {
			return err
		}
		for j := range l.Users {
			u := &c.Listeners[i].Users[j]
			if u.PasswordFile == "" {
				continue
			}
			key := fmt.Sprintf("listeners[%d].users[%d].password_file", i, j)
			var err error
			if u.Password, err = from.firstLine(key, u.PasswordFile); err != nil {
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
