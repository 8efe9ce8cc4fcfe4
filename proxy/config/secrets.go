package config

import (
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"unicode"
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
			if strings.Contains(f.value.String(), pemBegin) {
				return at
			}
		}
	}
	return ""
}

// leastSecret is how many bytes of base64, or of hexadecimal digits, may be a key or a token.
const leastSecret = 16

// mayBeSecret reports whether the name of a file may be a secret instead: it has several lines, or is base64 or
// hexadecimal as only chance writes it, and not a path to a directory that there is.
func mayBeSecret(name string) bool {
	if strings.ContainsAny(name, "\r\n") {
		return true
	}
	if dir := filepath.Dir(name); filepath.IsAbs(name) && dir != "/" {
		if _, err := os.Stat(dir); err == nil {
			return false
		}
	}
	bare := strings.TrimRight(name, "=")
	if data, err := hex.DecodeString(bare); err == nil {
		return len(data) >= leastSecret
	}
	data, err := base64.RawURLEncoding.DecodeString(strings.NewReplacer("+", "-", "/", "_").Replace(bare))
	mixed := strings.ContainsAny(bare, "0123456789") && strings.ContainsFunc(bare, unicode.IsUpper) &&
		strings.ContainsFunc(bare, unicode.IsLower)
	return err == nil && len(data) >= leastSecret && (mixed || bare != name)
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

// checkGiven wants a token in one place at most: at key itself, or in a file.
func checkGiven(key, token, file string) error {
	switch {
	case token != "" && file != "":
		name := key[strings.LastIndexByte(key, '.')+1:]
		return keyErrorf(key+"_file", "give %s or %s_file, not both", name, name)
	case token != "":
		return checkToken(key, token)
	}
	return nil
}

// checkToken wants what a header can carry and nobody guesses.
func checkToken(key, token string) error {
	if len(token) < 16 || len(token) > 255 || strings.ContainsFunc(token, func(r rune) bool {
		return r <= ' ' ||
			r > '~'
	}) {
		return keyErrorf(key, "a token is 16 to 255 visible characters without spaces, such as openssl rand -hex 16 "+
			"prints; this has %d bytes", len(token))
	}
	return nil
}

// readSecrets puts secrets where the names of their files were.
func (c *Config) readSecrets(from *files) error {
	t := &c.Telemetry
	errs := []error{
		from.readToken("telemetry.hints.token_file", &t.Hints.TokenFile, &t.Hints.Token),
		from.readToken("telemetry.change_token_file", &t.ChangeTokenFile, &t.ChangeToken),
	}
	for i := range c.Agents {
		errs = append(errs, c.Agents[i].readFiles(fmt.Sprintf("agents[%d]", i), from))
	}
	for i := range c.Listeners {
		l := &c.Listeners[i]
		key := fmt.Sprintf("listeners[%d]", i)
		errs = append(errs, l.readTunnelFiles(key, from))
		for j := range l.Users {
			errs = append(errs, l.Users[j].readPassword(fmt.Sprintf("%s.users[%d].password_file", key, j), from))
		}
	}
	return errors.Join(errs...)
}

// readToken puts what is in the file that a key names into token, and empties the key.
func (f *files) readToken(key string, file, token *string) error {
	if *file == "" {
		return nil
	}
	text, err := f.firstLine(key, *file)
	if err == nil {
		err = checkToken(key, text)
	}
	if err != nil {
		return err
	}
	*token, *file = text, ""
	return nil
}

func (u *User) readPassword(key string, from *files) error {
	if u.PasswordFile == "" {
		return nil
	}
	password, err := from.firstLine(key, u.PasswordFile)
	if err != nil {
		return err
	}
	if len(password) < 1 || len(password) > 255 {
		return keyErrorf(key, "the first line has %d bytes; a password has 1 to 255", len(password))
	}
	u.Password, u.PasswordFile = password, ""
	return nil
}
