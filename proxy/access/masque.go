package access

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/penstock-net/penstock/proxy/config/check"
)

// MASQUESettings are a MASQUE endpoint: IP packets and TCP streams over HTTP/3.
type MASQUESettings struct {
	// Addresses for clients that send IP packets (CONNECT-IP), one of each prefix to a client; none: only TCP
	// (CONNECT) and UDP (CONNECT-UDP) are served.
	Pool []netip.Prefix `yaml:"pool"`
	// Bearer tokens: a client must show one, unless it has a certificate of tls.client_ca.
	Tokens []Token `yaml:"tokens" reload:"yes"`
	// A file with more tokens, a name and a token on each line, closed to others; relative to the configuration file,
	// and reread with it.
	TokensFile string `yaml:"tokens_file" reload:"yes"`
	// Let everybody in who reaches the port. A client is known by its IPv4 address or IPv6 /64.
	Open bool `yaml:"open"`
}

// TLS is who a listener is, and which clients' certificates it trusts. Each key holds PEM, or the name of a file of
// PEM.
type TLS struct {
	// The certificate with its chain: PEM, or a file of it relative to the configuration file, reread with it.
	Certificate string `yaml:"certificate" pem:"yes"`
	// The certificate's private key: PEM, or a file of it, which must be closed to others.
	Key string `yaml:"key" pem:"yes" secret:"pem"`
	// Clients with a certificate of these authorities may come in: PEM, or a file of it. Not set: certificates are not
	// asked for.
	ClientCA string `yaml:"client_ca" pem:"yes"`
}

// isZero reports whether no key was set.
func (m *MASQUESettings) isZero() bool {
	return len(m.Pool) == 0 && len(m.Tokens) == 0 && m.TokensFile == "" && !m.Open
}

// checkMASQUE checks the keys of mode masque.
func (l *Listener) checkMASQUE() error {
	m := &l.MASQUE
	errs := []error{check.Address("address", l.Address), checkPool("masque.pool", m.Pool)}
	names, values := check.Taken{}, check.Taken{}
	for i, t := range m.Tokens {
		at := fmt.Sprintf("masque.tokens[%d]", i)
		if err := t.CheckName(); err != nil {
			errs = append(errs, check.Errorf(at+".name", "%v", err))
		} else {
			errs = append(errs, names.Add(at+".name", t.Name))
		}
		if err := t.CheckValue(); err != nil {
			errs = append(errs, check.Errorf(at+".token", "%v", err))
		} else {
			errs = append(errs, values.AddSecret(at+".token", t.Value))
		}
	}
	if l.TLS.Certificate == "" {
		errs = append(errs, check.Errorf("tls.certificate",
			"missing; mode masque needs a certificate that its clients trust, and its key"))
	}
	if l.TLS.Key == "" {
		errs = append(errs, check.Errorf("tls.key", "missing; it is the certificate's private key"))
	}
	switch asks := len(m.Tokens) > 0 || m.TokensFile != "" || l.TLS.ClientCA != ""; {
	case !asks && !m.Open:
		errs = append(errs, check.Errorf("masque.tokens_file",
			"missing; name a file of tokens, or tls.client_ca, or write open: true for everybody"))
	case asks && m.Open:
		errs = append(errs, check.Errorf("masque.open",
			"not together with tokens or tls.client_ca; remove the one or the other"))
	}
	return errors.Join(errs...)
}

// readTokens adds the tokens of tokens_file.
func (l *Listener) readTokens(from check.Files) error {
	m := &l.MASQUE
	if m.TokensFile == "" {
		return nil
	}
	text, err := from.Read(m.TokensFile, true)
	if err == nil {
		var list []Token
		if list, err = ParseTokens(strings.NewReader(text)); err == nil {
			m.Tokens, m.TokensFile = slices.Concat(m.Tokens, list), ""
		}
	}
	if err == nil && len(m.Tokens) == 0 && l.TLS.ClientCA == "" {
		err = errors.New("there is no token in it; add a line such as: phone and what openssl rand -hex 16 prints")
	}
	if err != nil {
		return check.Errorf("masque.tokens_file", "%v", err)
	}
	return nil
}

// checkPEM checks that those keys that hold PEM are a certificate with its key, and authorities.
func (t *TLS) checkPEM() error {
	var errs []error
	read := strings.HasPrefix(t.Certificate, check.PEMBegin) && strings.HasPrefix(t.Key, check.PEMBegin)
	if _, err := t.Pair(); read && err != nil {
		errs = append(errs, check.Errorf("", "%v", err))
	}
	if _, err := t.Authorities(); strings.HasPrefix(t.ClientCA, check.PEMBegin) && err != nil {
		errs = append(errs, check.Errorf("client_ca", "%v", err))
	}
	return errors.Join(errs...)
}

// Pair returns the certificate with its key.
func (t *TLS) Pair() (tls.Certificate, error) {
	return tls.X509KeyPair([]byte(t.Certificate), []byte(t.Key))
}

// Authorities returns the certificates of client_ca; nil: it is not set.
func (t *TLS) Authorities() (*x509.CertPool, error) {
	if t.ClientCA == "" {
		return nil, nil
	}
	return ParseAuthorities(t.ClientCA)
}

// ParseAuthorities reads certificates in PEM.
func ParseAuthorities(text string) (*x509.CertPool, error) {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM([]byte(text)) {
		return nil, errors.New("there is no certificate in it")
	}
	return pool, nil
}
