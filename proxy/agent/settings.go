package agent

import (
	"crypto/tls"
	"embed"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config/check"
)

// Sources are the files with the types of this room's keys. The comment of a field says what its key is for.
//
//go:embed settings.go
var Sources embed.FS

// Settings are the keys of an agent: a process that decides for the flows of rules with algorithm ccp:NAME.
type Settings struct {
	// Rules call it ccp:NAME. Lower-case letters, digits, - and _.
	Name string `yaml:"name"`
	// The agent's Unix datagram socket; /tmp/ccp/portus where not set.
	Socket string `yaml:"socket"`
	// The proxy's own, which the agent can reach. Not set: socket.penstock-NAME.
	Reply string `yaml:"reply"`
	// What flows ask the agent for, up to 63 bytes. Not set: its default.
	Algorithm string `yaml:"algorithm"`
	// HOST:PORT of an agent on another machine; in place of socket, reply.
	Address string `yaml:"address"`
	// For address: both ends show certificates.
	TLS TLS `yaml:"tls" reload:"yes"`
}

// TLS is who the proxy is to an agent on another machine, and which certificates it takes for the agent's. Each key
// holds PEM, or the name of a file of PEM.
type TLS struct {
	// The proxy's, with its chain: PEM, or a file, relative to this one.
	Certificate string `yaml:"certificate" pem:"yes"`
	// Its private key: PEM, or a file of it, which must be closed to others.
	Key string `yaml:"key" pem:"yes" secret:"pem"`
	// The authorities of the agent's certificate: PEM, or a file of it.
	CA string `yaml:"ca" pem:"yes"`
}

// Validate checks an agent's keys against each other. Errors are *check.Errors.
func (s *Settings) Validate() error {
	var errs []error
	if err := ccp.CheckName(s.Name); err != nil {
		errs = append(errs, check.Errorf("name", "%v", err))
	}
	if s.Address == "" && s.TLS == (TLS{}) {
		errs = append(errs, s.checkSockets())
	} else {
		errs = append(errs, s.checkRemote())
	}
	if len(s.Algorithm) > ccp.MaxName || strings.ContainsRune(s.Algorithm, 0) {
		errs = append(errs, check.Errorf("algorithm", "%q has %d bytes; the message has room for %d", s.Algorithm,
			len(s.Algorithm), ccp.MaxName))
	}
	return errors.Join(errs...)
}

// checkSockets checks the paths of both sockets.
func (s *Settings) checkSockets() error {
	// The default of reply begins with socket, so that one error is enough.
	if err := checkSocket("socket", s.SocketPath()); err != nil && s.Reply == "" {
		return err
	}
	return errors.Join(checkSocket("socket", s.SocketPath()), checkSocket("reply", s.ReplyPath()))
}

// checkSocket checks that a path is absolute and fits the address of a Unix socket.
func checkSocket(key, path string) error {
	if !filepath.IsAbs(path) || len(path) > ccp.MaxReply {
		return check.Errorf(key, "%q is no whole path of at most %d bytes, such as %s", path, ccp.MaxReply, ccp.DefaultSocket)
	}
	return nil
}

// checkRemote checks the keys of an agent on another machine.
func (s *Settings) checkRemote() error {
	var errs []error
	if s.Address == "" {
		errs = append(errs, check.Errorf("address",
			"missing; tls is for an agent on another machine, as in controller.example:4433"))
	} else {
		errs = append(errs, check.Target("address", s.Address))
	}
	for _, k := range [...]struct {
		name, why string
		wrong     bool
	}{
		{"socket", "not together with address; remove the one or the other", s.Socket != ""},
		{"reply", "not together with address, whose agent answers on the same connection; remove it", s.Reply != ""},
		{"tls.certificate", "missing; the proxy shows one to the agent", s.TLS.Certificate == ""},
		{"tls.key", "missing; it is the certificate's private key", s.TLS.Key == ""},
		{"tls.ca", "missing; whoever has a certificate of it is taken for the agent", s.TLS.CA == ""},
	} {
		if k.wrong {
			errs = append(errs, check.Errorf(k.name, "%s", k.why))
		}
	}
	return errors.Join(errs...)
}

// LoadFiles checks that tls has a certificate with its key, and authorities, once its files have been read.
func (s *Settings) LoadFiles(check.Files) error {
	for _, text := range []string{s.TLS.Certificate, s.TLS.Key, s.TLS.CA} {
		if !strings.HasPrefix(text, check.PEMBegin) {
			return nil
		}
	}
	if _, err := s.TLSConfig(); err != nil {
		return check.Errorf("tls", "%v", err)
	}
	return nil
}

// TLSConfig returns the configuration for an agent on another machine; nil: the agent is on this one.
func (s *Settings) TLSConfig() (*tls.Config, error) {
	if s.Address == "" {
		return nil, nil
	}
	own, err := tls.X509KeyPair([]byte(s.TLS.Certificate), []byte(s.TLS.Key))
	if err != nil {
		return nil, err
	}
	authorities, err := access.ParseAuthorities(s.TLS.CA)
	if err != nil {
		return nil, fmt.Errorf("ca: %w", err)
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{own}, RootCAs: authorities}, nil
}

// SocketPath returns the path where the agent listens.
func (s *Settings) SocketPath() string {
	if s.Socket == "" {
		return ccp.DefaultSocket
	}
	return s.Socket
}

// ReplyPath returns the path to which the agent sends its answers.
func (s *Settings) ReplyPath() string {
	if s.Reply == "" {
		return s.SocketPath() + ".penstock-" + s.Name
	}
	return s.Reply
}
