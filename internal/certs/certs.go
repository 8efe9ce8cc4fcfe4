// Package certs makes certificates for tests, good for an hour. Nothing it is given can be
// wrong, so it panics where making one fails.
package certs

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"time"
)

// SelfSigned is a certificate for names and IP addresses that is its own authority.
func SelfSigned(names ...string) tls.Certificate {
	return sign(nil, pkix.Name{CommonName: "a test"}, names)
}

// Authority issues certificates, for servers and for clients.
type Authority struct{ own tls.Certificate }

// NewAuthority makes an authority.
func NewAuthority() *Authority {
	return &Authority{SelfSigned()}
}

// Issue is a certificate of a subject, for names and IP addresses.
func (a *Authority) Issue(subject string, names ...string) tls.Certificate {
	return sign(&a.own, pkix.Name{CommonName: subject}, names)
}

// IssueTo is a certificate of a subject with groups (organisations) and all else that it has.
func (a *Authority) IssueTo(subject pkix.Name, names ...string) tls.Certificate {
	return sign(&a.own, subject, names)
}

// PEM is the authority's own certificate as files have it.
func (a *Authority) PEM() string {
	certificate, _ := PEM(a.own)
	return certificate
}

// Pool holds the authority alone.
func (a *Authority) Pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.own.Leaf)
	return p
}

// PEM is a certificate and its key as files have them.
func PEM(c tls.Certificate) (certificate, key string) {
	secret := must(x509.MarshalPKCS8PrivateKey(c.PrivateKey))
	block := func(kind string, b []byte) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}))
	}
	return block("CERTIFICATE", c.Certificate[0]), block("PRIVATE KEY", secret)
}

// sign makes a certificate; by is who signs it, nil: itself.
func sign(by *tls.Certificate, subject pkix.Name, names []string) tls.Certificate {
	key := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	form := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: subject,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: by == nil, BasicConstraintsValid: true,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, name := range names {
		if ip := net.ParseIP(name); ip != nil {
			form.IPAddresses = append(form.IPAddresses, ip)
		} else {
			form.DNSNames = append(form.DNSNames, name)
		}
	}
	parent, signer := form, crypto.PrivateKey(key)
	if by != nil {
		parent, signer = by.Leaf, by.PrivateKey
	}
	der := must(x509.CreateCertificate(rand.Reader, form, parent, &key.PublicKey, signer))
	leaf := must(x509.ParseCertificate(der))
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

// must panics on an error: whatever fails here is a mistake of this package.
func must[T any](made T, err error) T {
	if err != nil {
		panic(err)
	}
	return made
}
