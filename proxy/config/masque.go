package config

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/penstock-net/penstock/proxy/access"
)

// TLS is who a listener is, and whose clients' certificates it trusts.
// Each key holds PEM, or the name of a file that does.
type TLS struct {
	Certificate string `yaml:"certificate"`
	Key         string `yaml:"key" secret:"pem"`
	ClientCA    string `yaml:"client_ca"`
}

// MASQUE is a MASQUE endpoint: IP packets and TCP streams over HTTP/3.
type MASQUE struct {
	Pool       []netip.Prefix `yaml:"pool"`
	Tokens     []Token        `yaml:"tokens" reload:"yes"`
	TokensFile string         `yaml:"tokens_file" reload:"yes"`
	Open       bool           `yaml:"open"`
}

// Token lets a client in.
type Token struct {
	Name  string `yaml:"name" required:"yes"`
	Token string `yaml:"token" required:"yes" secret:"true"`
}

// checkMASQUE is about the keys of mode masque.
func (l *Listener) checkMASQUE(key string) error {
	errs := []error{checkAddress(key+".address", l.Address)}
	m := l.MASQUE
	errs = append(errs, checkPool(key+".masque.pool", m.Pool))
	names, values := map[string]string{}, map[string]string{}
	for i, t := range m.Tokens {
		at := fmt.Sprintf("%s.masque.tokens[%d]", key, i)
		if err := t.accessToken().CheckName(); err != nil {
			errs = append(errs, keyErrorf(at+".name", "%v", err))
		} else {
			errs = append(errs, checkUnique(names, at+".name", t.Name))
		}
		if err := t.accessToken().CheckValue(); err != nil {
			errs = append(errs, keyErrorf(at+".token", "%v", err))
		} else {
			errs = append(errs, uniqueSecret(values, at+".token", t.Token))
		}
	}
	if l.TLS.Certificate == "" {
		errs = append(errs, keyErrorf(key+".tls.certificate",
			"missing; mode masque needs a certificate that its clients trust, and its key"))
	}
	if l.TLS.Key == "" {
		errs = append(errs, keyErrorf(key+".tls.key", "missing; it is the certificate's private key"))
	}
	switch asks := len(m.Tokens) > 0 || m.TokensFile != "" || l.TLS.ClientCA != ""; {
	case !asks && !m.Open:
		errs = append(errs, keyErrorf(key+".masque.tokens_file",
			"missing; name a file of tokens, or tls.client_ca, or write open: true for everybody"))
	case asks && m.Open:
		errs = append(errs, keyErrorf(key+".masque.open",
			"not together with tokens or tls.client_ca; remove the one or the other"))
	}
	return errors.Join(errs...)
}

// readMASQUEFiles puts what is in l's files where their names were.
func (l *Listener) readMASQUEFiles(key string, from *files) error {
	err := from.readPEM(
		pemKey{key + ".tls.certificate", &l.TLS.Certificate, false},
		pemKey{key + ".tls.key", &l.TLS.Key, true},
		pemKey{key + ".tls.client_ca", &l.TLS.ClientCA, false},
	)
	if err == nil {
		err = l.TLS.checkFiles(key + ".tls")
	}
	return errors.Join(err, l.readTokens(key+".masque.tokens_file", from))
}

// checkFiles finds out whether what the files hold is what it should be.
func (t TLS) checkFiles(key string) error {
	var errs []error
	if _, err := t.Pair(); t.Certificate != "" && err != nil {
		errs = append(errs, keyErrorf(key, "%v", err))
	}
	if _, err := t.Authorities(); err != nil {
		errs = append(errs, keyErrorf(key+".client_ca", "%v", err))
	}
	return errors.Join(errs...)
}

// readTokens puts the tokens of a file in its place.
func (l *Listener) readTokens(key string, from *files) error {
	m := &l.MASQUE
	if m.TokensFile == "" {
		return nil
	}
	text, err := from.readText(key, m.TokensFile, true)
	if err != nil {
		return err
	}
	list, err := access.ParseTokens(strings.NewReader(text))
	if err != nil {
		return keyErrorf(key, "%v", err)
	}
	m.Tokens = m.Tokens[:len(m.Tokens):len(m.Tokens)]
	for _, t := range list {
		m.Tokens = append(m.Tokens, Token{Name: t.Name, Token: t.Value})
	}
	m.TokensFile = ""
	if len(m.Tokens) == 0 && l.TLS.ClientCA == "" {
		return keyErrorf(key, "there is no token in it; add a line such as: phone and what openssl rand -hex 16 prints")
	}
	return nil
}

// Pair is the certificate with its key.
func (t TLS) Pair() (tls.Certificate, error) {
	return tls.X509KeyPair([]byte(t.Certificate), []byte(t.Key))
}

// Authorities are those of client_ca; nil: none were named.
func (t TLS) Authorities() (*x509.CertPool, error) {
	if t.ClientCA == "" {
		return nil, nil
	}
	return certificatePool(t.ClientCA)
}

// certificatePool are the authorities in PEM.
func certificatePool(text string) (*x509.CertPool, error) {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM([]byte(text)) {
		return nil, errors.New("there is no certificate in it")
	}
	return pool, nil
}

// Access are the tokens in package access's terms.
func (m MASQUE) Access() []access.Token {
	var out []access.Token
	for _, t := range m.Tokens {
		out = append(out, t.accessToken())
	}
	return out
}

func (t Token) accessToken() access.Token { return access.Token{Name: t.Name, Value: t.Token} }

func (m MASQUE) isZero() bool {
	return len(m.Pool) == 0 && len(m.Tokens) == 0 && m.TokensFile == "" && !m.Open
}
